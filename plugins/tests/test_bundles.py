"""Builds for a GPU that is not here, with the plugin library compiled for it, and finished by a stand-in for TensorRT."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file

from clover_trt.checkpoint.quantize import quantize_checkpoint
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine import build as build_module
from clover_trt.engine import build_tensorrt
from clover_trt.engine.build import build, resume
from clover_trt.engine.package import BOUND, open_package, sha256_of
from clover_trt.engine.plugins import EXPECTED, LIBRARY, build_library, open_library
from clover_trt.errors import EngineError
from clover_trt.graph.contract import OPS
from clover_trt.model.lengths import Lengths
from clover_trt.model.moe import expert_subset_moe
from clover_trt.parity.kernel_ops import Kernels
from tests.small import SMALL, AbsentTensorRT, random_state, write_checkpoint

FITTING = SMALL.model_copy(update={"hidden_size": 128, "linear_key_head_dim": 16, "moe_intermediate_size": 128})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(write_checkpoint(tmp_path_factory.mktemp("fitting") / "checkpoint", random_state(FITTING), FITTING))


def finish(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Resume with a plan that is only bytes; the versions of the library that was there when it was written."""
    seen = []

    def write_plan(work: Path, *_: object) -> dict[str, str]:
        seen.append(open_library(work / LIBRARY).clover_plugins_version().decode())
        (work / "rank0.engine").write_bytes(b"a plan")
        for path in work.glob("step*"):
            path.unlink()
        return {"tensorrt": "10.14.1"}

    monkeypatch.setattr(build_module, "find_library", lambda backend: AbsentTensorRT())
    monkeypatch.setattr(build_tensorrt, "write_plan", write_plan)
    resume(bundle)
    return seen


def replace_library(bundle: Path, data: bytes) -> None:
    """As if the bundle had been made elsewhere with this file."""
    (bundle / LIBRARY).write_bytes(data)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][LIBRARY] = sha256_of(bundle / LIBRARY)
    (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(("gpu", "precision"), [("gb300", "fp8"), ("gb300", "nvfp4"), ("h200", "bfloat16")])
def test_the_library_of_the_target_is_in_the_bundle_and_the_finished_package(
    checkpoint: Checkpoint, gpu: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "bundle"
    assert build(checkpoint, bundle, gpu=gpu, precision=precision) is False
    package = open_package(bundle, unfinished=True)
    assert package.manifest["tools"]["plugins"] == EXPECTED
    assert (bundle / LIBRARY).read_bytes() == build_library(gpu).read_bytes()
    assert finish(bundle, monkeypatch) == [EXPECTED]
    assert {"rank0.engine", LIBRARY} <= set(open_package(bundle).manifest["files"])


@pytest.mark.parametrize("precision", ["bfloat16", "fp8", "nvfp4"])
def test_bound_experts_mean_to_kernels_what_the_checkpoint_says(checkpoint: Checkpoint, precision: str, tmp_path: Path) -> None:
    """A bundle's banks and scales, as its graph hands them to the plugin, through the kernels on the host."""
    build(checkpoint, tmp_path / "bundle", gpu="gb300", precision=precision)
    meant = checkpoint
    if precision != "bfloat16":
        quantize_checkpoint(checkpoint, tmp_path / "copy", experts=precision)  # type: ignore[arg-type]
        meant = Checkpoint(tmp_path / "copy")
    graph = onnx.load(str(tmp_path / "bundle" / "step.onnx")).graph
    nodes = [node for node in graph.node if node.op_type == "ExpertSubsetMoe"]
    bound = {name: tensor.clone() for name, tensor in load_file(tmp_path / "bundle" / BOUND).items()}
    lengths = Lengths(*(torch.tensor(each, dtype=torch.int32) for each in ((0, 3), (8, 0), (16, 5))))
    kernels = Kernels(build_library("host"))
    generator = torch.Generator().manual_seed(0)
    for layer, node in enumerate(nodes):
        at = f"model.layers.{layer}.mlp."
        router, *others = (checkpoint.load(at + name).bfloat16() for name in (
            "gate.weight", "shared_expert.gate_proj.weight", "shared_expert.up_proj.weight", "shared_expert.down_proj.weight",
            "shared_expert_gate.weight"
        ))  # fmt: skip
        x = torch.randn(2, 24, FITTING.hidden_size, generator=generator).bfloat16()
        gate_up, down, *scales = (bound[name] for name in (*node.input[2:4], *node.input[len(OPS["ExpertSubsetMoe"].inputs) :]))
        mass = torch.ones(2)
        found, _ = kernels.expert_subset_moe(x, router, gate_up, down, tuple(others), lengths, mass, 4, tuple(scales))
        banks = (meant.load(f"{at}experts.{part}_proj") for part in ("gate_up", "down"))
        plain = [each.float() for each in (x, router, *banks)]
        expected, _ = expert_subset_moe(*plain, tuple(each.float() for each in others), lengths, mass, 4)
        valid = (lengths.masks(24)[0] | lengths.masks(24)[1])[..., None]
        assert (found - expected * valid).norm() < (6e-2 if precision == "fp8" else 1e-2) * (expected * valid).norm()


def test_a_library_for_another_processor_is_compiled_again_where_the_bundle_is_finished(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ELF header of 64-bit Arm (or of x86-64, where the tests run on Arm)."""
    bundle = tmp_path / "bundle"
    build(checkpoint, bundle, gpu="gb300", precision="fp8", plugin_library=build_library("gb300"))
    elf = bytearray((bundle / LIBRARY).read_bytes())
    elf[18] = 0x3E if elf[18] == 0xB7 else 0xB7
    replace_library(bundle, bytes(elf))
    assert finish(bundle, monkeypatch) == [EXPECTED]
    assert (bundle / LIBRARY).read_bytes() == build_library("gb300").read_bytes()


def test_a_bundle_with_a_library_of_another_version_is_refused_and_stays(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.c").write_text('const char *clover_plugins_version() { return "clover-plugins 0.0.1 contract 0"; }')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "old.so"), str(tmp_path / "old.c")], check=True)
    bundle = tmp_path / "bundle"
    with pytest.raises(EngineError, match=r"is clover-plugins 0\.0\.1 contract 0, expected"):
        build(checkpoint, bundle, gpu="h200", plugin_library=tmp_path / "old.so")
    assert not bundle.exists()
    build(checkpoint, bundle, gpu="h200")
    replace_library(bundle, (tmp_path / "old.so").read_bytes())
    with pytest.raises(EngineError, match=r"is clover-plugins 0\.0\.1 contract 0, expected"):
        finish(bundle, monkeypatch)
    assert not open_package(bundle, unfinished=True).manifest["finished"]


def test_a_geometry_the_plugins_do_not_support_is_refused_before_any_work(small_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"do not support this model: GdnBlockScan expects .*--operations functions"):
        build(Checkpoint(small_folder), tmp_path / "bundle", gpu="h200")
    assert build(Checkpoint(small_folder), tmp_path / "bundle", gpu="h200", operations="functions") is False
    assert not (tmp_path / "bundle" / LIBRARY).exists()
