"""The parity record and the gate on it, over the CPU engine and over a stand-in for a GPU's engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny.wider import write_wider

from clover_trt.checkpoint import fp8, nvfp4
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import GenerationConfig
from clover_trt.engine import build as build_module
from clover_trt.engine.build import build, build_settings
from clover_trt.engine.package import RECORD, EnginePackage, open_package
from clover_trt.engine.profiles import Precision, read_profile
from clover_trt.errors import EngineError
from clover_trt.model.block_step import CloverModel
from clover_trt.model.load import load_model
from clover_trt.parity.record import BOUNDS, ParityGate, compare_with_record, write_record
from clover_trt.parity.torch_session import TorchSession
from clover_trt.runtime.session import Snapshot
from tests.small import SMALL, AbsentTensorRT


@pytest.fixture(scope="module")
def engine(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> EnginePackage:
    target = tmp_path_factory.mktemp("gated") / "engine"
    build(Checkpoint(small_folder), target, gate=ParityGate())
    return open_package(target)


def test_a_gated_build_carries_its_record_and_equals_it(engine: EnginePackage) -> None:
    checks = compare_with_record(engine)
    assert len(checks) == 2 + 2 * SMALL.num_hidden_layers
    assert all(check.passed for check in checks), checks
    assert max(check.error for check in checks) > 0, "two programs, not one result twice"


def test_the_record_is_what_the_whole_model_computes(engine: EnginePackage, small_model: CloverModel) -> None:
    """Layer by layer from the file, against all layers in memory."""
    checks = compare_with_record(engine, TorchSession(small_model, slots=3, max_len=256))
    assert max(check.error for check in checks) < 1e-6


@pytest.mark.parametrize(
    ("broken", "first"),
    [
        ("layers.2.linear_attn.conv1d.weight", "layer 2, recurrent state"),
        ("layers.1.mlp.experts.down_proj", "layer 2, conv state"),
        ("layers.3.self_attn.k_norm.weight", "layer 3, key cache"),
        ("layers.0.linear_attn.memory_slope", "log-probabilities of step 2"),
        ("lm_head.weight", "log-probabilities of step 1"),
    ],
)
def test_what_is_off_first_is_named(engine: EnginePackage, small_folder: Path, broken: str, first: str) -> None:
    """One weight of the engine is not the checkpoint's: no layer before it differs."""
    model = load_model(Checkpoint(small_folder))
    for name, tensor in model.state_dict().items():
        if name.endswith(broken):
            tensor.copy_(tensor.flip(-1) * 1.5)
    checks = compare_with_record(engine, TorchSession(model, slots=3, max_len=256))
    assert not next(check for check in checks if check.name == first).passed
    layer = int(broken.split(".")[1]) if "layers" in broken else SMALL.num_hidden_layers
    before = [check for check in checks if check.name.startswith("layer") and int(check.name.split()[1].rstrip(",")) < layer]
    assert all(check.passed for check in before)


def test_a_build_that_is_off_leaves_nothing(small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(checkpoint: Checkpoint, settings: object, folder: Path, progress: object) -> None:
        write_record(checkpoint, settings, folder)  # type: ignore[arg-type]
        record = load_file(folder / RECORD)
        record["row.2.recurrent_state.1"] *= 1.001
        save_file(record, folder / RECORD)

    monkeypatch.setattr("clover_trt.parity.record.write_record", spoiled)
    with pytest.raises(EngineError, match=r"differs from the reference model in 1 places: layer 1, recurrent state \(0\.001,"):
        build(Checkpoint(small_folder), tmp_path / "engine", gate=ParityGate())
    assert not list(tmp_path.iterdir())


def test_an_engine_without_a_record_says_so(small_engine: EnginePackage) -> None:
    with pytest.raises(EngineError, match=r"has no parity\.safetensors: it was built with --no-gate"):
        compare_with_record(small_engine)


@pytest.mark.parametrize("max_seq_len", [33, 64])
def test_short_engines_are_compared_too(small_folder: Path, tmp_path: Path, max_seq_len: int) -> None:
    assert build(Checkpoint(small_folder), tmp_path / "engine", max_seq_len=max_seq_len, gate=ParityGate())


class Bfloat16Caches(TorchSession):
    """The reference computing in bfloat16, whose snapshots are bytes as a GPU's are."""

    def save(self, slot: int, begin: int) -> Snapshot:
        caches, end = self._named(), int(self.prefix_len[slot])

        def raw(tensor: torch.Tensor) -> np.ndarray:
            return tensor.contiguous().view(torch.uint8).numpy()

        rows = {name: raw(cache[slot, :, begin:end]) for name, cache in caches.items() if "cache" in name}
        return Snapshot(begin, end, rows, {name: raw(cache[slot]) for name, cache in caches.items() if "state" in name})


@pytest.mark.parametrize("precision", ["bfloat16", "fp8", "nvfp4"])
def test_lower_precision_is_within_its_limits_and_a_wrong_layer_is_not(precision: Precision, tmp_path: Path) -> None:
    """clover-tiny in bfloat16, with weights as the engine has them; then with one layer's experts turned round."""
    checkpoint = Checkpoint(write_wider(tmp_path / "wider", 16) if precision == "nvfp4" else "clover-tiny")
    settings = build_settings(read_profile("gb300"), checkpoint.config, precision, 256)
    write_record(checkpoint, settings, tmp_path)
    package = EnginePackage(tmp_path, checkpoint.config, settings, GenerationConfig(), checkpoint.valid_tokens, {})
    model = load_model(checkpoint, torch.bfloat16)
    if precision != "bfloat16":
        for name, tensor in model.state_dict().items():
            if ".experts." in name and precision == "nvfp4":
                banks = zip(*checkpoint.load_nvfp4(name), strict=True)
                tensor.copy_(torch.stack([nvfp4.dequantize_bank(*bank) for bank in banks]))
            elif fp8.is_quantized(name):
                restore = fp8.dequantize_bank if name.endswith("gate_up_proj") else fp8.dequantize
                tensor.copy_(restore(*checkpoint.load_quantized(name)))
    checks = compare_with_record(package, Bfloat16Caches(model, slots=3, max_len=256))
    assert all(check.passed for check in checks), checks
    assert max(check.limit for check in checks) <= BOUNDS[1]
    model.model.layers[2].mlp.experts.down_proj.mul_(-1)
    checks = compare_with_record(package, Bfloat16Caches(model, slots=3, max_len=256))
    assert [check.name for check in checks if not check.passed][-1].startswith("layer")


def test_a_plan_finished_elsewhere_is_checked_against_the_bundles_record(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle carries the record; the machine that finishes it runs the gate, and a refusal leaves the bundle."""
    bundle = tmp_path / "bundle"
    monkeypatch.setattr(build_module, "find_library", lambda backend: None)
    assert build(Checkpoint(small_folder), bundle, gpu="h200", operations="functions", gate=ParityGate()) is False
    seen: list[Path] = []

    class Refusing(ParityGate):
        def check(self, folder: Path) -> None:
            assert open_package(folder).manifest["finished"]
            seen.append(folder)
            raise EngineError("differs")

    def write_plan(work: Path, *_: object) -> dict[str, str]:
        (work / "rank0.engine").write_bytes(b"a plan")
        return {"tensorrt": "10.14.1"}

    monkeypatch.setattr(build_module, "find_library", lambda backend: AbsentTensorRT())
    monkeypatch.setattr(build_module, "local_compute_capabilities", lambda: ["9.0"])
    monkeypatch.setattr(build_module.build_tensorrt, "write_plan", write_plan)
    with pytest.raises(EngineError, match="differs"):
        build_module.resume(bundle, gate=Refusing())
    assert len(seen) == 1
    assert not open_package(bundle, unfinished=True).manifest["finished"]
