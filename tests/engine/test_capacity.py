from __future__ import annotations

import json
from pathlib import Path

import pytest

from clover_trt.checkpoint.quantize import quantize_checkpoint
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.checkpoint.synthetic import CLOVER_35B, write_synthetic
from clover_trt.engine.capacity import capacity, slot_bytes, weight_bytes
from clover_trt.engine.profiles import read_profile
from clover_trt.errors import CheckpointError, EngineError
from tests.small import SMALL


def test_bytes_of_the_weights_are_those_of_checkpoints(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "bf16", SMALL, shard_bytes=200_000)
    source = Checkpoint(tmp_path / "bf16")
    assert len(source.weight_files()) > 3
    assert sum(weight_bytes(SMALL, "bfloat16").values()) == sum(info.nbytes for info in source.stored.values())
    quantize_checkpoint(source, tmp_path / "fp8")
    fp8 = sum(info.nbytes for name, info in Checkpoint(tmp_path / "fp8").stored.items() if not name.endswith("_scale_inv"))
    assert sum(weight_bytes(SMALL, "fp8").values()) == pytest.approx(fp8, rel=1e-3)
    with pytest.raises(CheckpointError, match="exists"):
        write_synthetic(tmp_path / "bf16", SMALL)


def test_the_real_size_is_the_published_one() -> None:
    """35 billion parameters, 3 billion of them active, 69 GB in bfloat16 (what Clover's vendor states)."""
    weights = weight_bytes(CLOVER_35B, "bfloat16")
    assert 34.5e9 < sum(weights.values()) / 2 < 35.5e9
    assert 69e9 < sum(weights.values()) < 69.7e9
    active = sum(weights.values()) - weights["experts"] * (1 - 8 / 256) - weights["embedding"]
    assert 2.5e9 < active / 2 < 3.5e9


def test_a_slot_holds_keys_values_and_states() -> None:
    keys_values, states = slot_bytes(CLOVER_35B, read_profile("h200"), 1000)
    assert keys_values == 10 * 2 * 2 * 256 * 1000 * 2
    assert states == 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)


@pytest.mark.parametrize("name", ["h200", "gb300"])
def test_the_slots_that_a_profile_promises_fit_in_every_precision(name: str) -> None:
    profile = read_profile(name)
    for context, slots in profile.slots_by_context.items():
        for precision in profile.precisions:
            assert capacity(CLOVER_35B, profile, precision, context, slots).fits, (context, slots, precision)


def test_a_floor_is_bytes_over_bandwidth_until_arithmetic_takes_longer() -> None:
    profile = read_profile("h200")
    found = capacity(CLOVER_35B, profile, "bfloat16", 131_072, 4)
    assert found.fits
    assert not capacity(CLOVER_35B, profile, "bfloat16", 131_072, found.most_slots + 1).fits
    for floor in found.floors:
        assert floor.bound_by == "bandwidth"
        assert floor.milliseconds == pytest.approx(floor.bytes_moved / 4.8e12 * 1e3)
        assert floor.tokens_per_second[4.0] == pytest.approx(4 / floor.milliseconds * 1e3)
    assert [floor.distinct_experts for floor in found.floors] == sorted({floor.distinct_experts for floor in found.floors})
    slow = profile.model_copy(update={"peak_tflops": {"bfloat16": 1.0}})
    assert {floor.bound_by for floor in capacity(CLOVER_35B, slow, "bfloat16", 8192, 1).floors} == {"arithmetic"}


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(EngineError, match="neither memory nor bandwidth"):
        capacity(CLOVER_35B, read_profile("cpu"), "float32", 8192, 1)
    with pytest.raises(EngineError, match="takes 1 to 131072"):
        capacity(CLOVER_35B, read_profile("h200"), "bfloat16", 200_000, 1)


def test_the_index_of_a_synthetic_checkpoint_names_every_tensor(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "c", SMALL, shard_bytes=100_000, seed=3)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(Checkpoint(tmp_path / "c").stored)
