"""The parts of tools/gpu_check.py that need neither a GPU nor the kernels; its dry run is in plugins/tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest
import torch

from clover_trt.checkpoint.synthetic import CLOVER_35B
from clover_trt.model.moe import expert_subset_moe
from tests.kernel_cases import Case, moe_inputs, read_cases

TOOLS = Path(gpu_check.__file__).parent
OTHERS = "pydantic,typer,rich,yaml,onnx,onnxruntime,tokenizers,safetensors,jinja2"
BLOCKED = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in sys.argv[2].split(","):
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
sys.path.insert(0, sys.argv[1])
import gpu_check
"""


def test_it_needs_pytorch_and_this_repository_alone() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED, str(TOOLS), OTHERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_real_geometry_is_that_of_the_model() -> None:
    for name, value in vars(gpu_check.REAL).items():
        assert getattr(CLOVER_35B, name) == value, name


@pytest.mark.parametrize("case", [case for case in read_cases("moe") if case.is_bf16 and "real" not in case.name], ids=str)
def test_the_baseline_computes_the_mixture(case: Case) -> None:
    x, router, gate_up, down, shared, lengths, mass = moe_inputs(case)
    found, _ = gpu_check.eager_moe(x, router, gate_up, down, shared, lengths, mass, case["top_k"])
    expected, _ = expert_subset_moe(x, router, gate_up, down, shared, lengths, mass, case["top_k"])
    committed, noisy = lengths.masks(x.shape[1])
    valid = (committed | noisy)[..., None]
    assert ((found - expected) * valid).float().norm() / (expected * valid).float().norm() < 1e-2


def test_targets_are_judged_against_the_measured_bandwidth() -> None:
    row = gpu_check.rated(
        {"kernel": "gdn_block_scan", "precision": "bf16", "rows": 1, "tokens": 32, "bytes": 4e9, "ms": 1.25}, 4000.0
    )
    assert row["floor_ms"] == pytest.approx(1.0)
    whole = {"rows": 1, "tokens": 32, "expert_mass": 1.0, "bytes": 4e10}
    passes = [
        gpu_check.rated({**whole, "program": name, "ms": ms}, 4000.0) for name, ms in (("kernels", 13.0), ("eager PyTorch", 26.0))
    ]
    report = {"kernels": [row], "step": {"passes": passes}, "dry_run": False}
    assert [(each["found"], each["met"]) for each in gpu_check.targets(report)] == [
        (pytest.approx(0.8), True), (pytest.approx(10 / 13), False), (pytest.approx(2.0), True)
    ]  # fmt: skip
    assert {each["met"] for each in gpu_check.targets({**report, "dry_run": True})} == {None}


def test_without_a_gpu_it_says_what_to_do() -> None:
    if torch.cuda.is_available():
        return
    done = subprocess.run([sys.executable, str(TOOLS / "gpu_check.py")], capture_output=True, text=True)
    assert done.returncode != 0
    assert "--dry-run needs none" in done.stderr
