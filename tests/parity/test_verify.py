"""The CPU engine against the reference (oracle 8), and that the comparison can fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.build_cpu import interleave
from clover_trt.engine.package import EnginePackage
from clover_trt.errors import EngineError
from clover_trt.model.block_step import CloverModel
from clover_trt.parity import verify as module
from clover_trt.parity.compare import relative_error
from clover_trt.parity.torch_session import TorchSession
from clover_trt.parity.verify import verify
from clover_trt.runtime.ort_session import GROWTH, OrtSession
from clover_trt.runtime.scoring import commit_logits
from clover_trt.runtime.session import ControlInput, StepInput, no_controls
from tests.small import SMALL, random_state, write_checkpoint

BLOCK = SMALL.block_size


def test_the_engine_equals_the_reference(small_engine: EnginePackage, small_folder: Path) -> None:
    checks = verify(small_engine, Checkpoint(small_folder))
    assert len(checks) == SMALL.num_hidden_layers + 2 + len(module.PROMPT_LENGTHS)
    assert all(check.passed for check in checks), checks


@pytest.mark.parametrize("broken", ["right_conv1d.weight", "memory_slope", "mlp.experts.down_proj", "shared_expert_gate.weight"])
def test_a_broken_part_is_found(
    small_engine: EnginePackage, small_folder: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = module.load_model

    def other(checkpoint: Checkpoint) -> CloverModel:
        model = load(checkpoint)
        for name, tensor in model.state_dict().items():
            if name.endswith(broken):
                tensor.mul_(1.01)
        return model

    monkeypatch.setattr(module, "load_model", other)
    assert not all(check.passed for check in verify(small_engine, Checkpoint(small_folder)))


def test_another_checkpoint_is_refused(small_engine: EnginePackage, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="built from a checkpoint with fingerprint"):
        verify(small_engine, Checkpoint(write_checkpoint(tmp_path, random_state(seed=1))))


def test_commit_logits_are_equal_for_any_chunking(small_engine: EnginePackage, small_model: CloverModel) -> None:
    ids = np.random.default_rng(0).integers(0, 100, 300).tolist()
    expected = commit_logits(TorchSession(small_model), ids)
    for chunk in (32, 100, 300):
        assert relative_error(commit_logits(OrtSession(small_engine), ids, chunk), expected) < 1e-5


def random_controls(rng: np.random.Generator, rows: int) -> ControlInput:
    history = np.stack([rng.permutation(100)[:9] for _ in range(rows)]).astype(np.int64)
    biases = np.stack([rng.permutation(100)[:3] for _ in range(rows)]).astype(np.int64)
    history[0, 5:] = SMALL.mask_token_id
    return ControlInput(
        history,
        rng.integers(1, 5, history.shape).astype(np.float32),
        rng.uniform(1, 2, rows).astype(np.float32),
        rng.uniform(0, 1, rows).astype(np.float32),
        rng.uniform(0, 1, rows).astype(np.float32),
        biases,
        rng.normal(size=(rows, BLOCK, 3)).astype(np.float32),
    )


def test_controls_and_candidates_are_equal(small_engine: EnginePackage, small_model: CloverModel) -> None:
    rng = np.random.default_rng(3)
    engine, reference = OrtSession(small_engine, slots=2), TorchSession(small_model, slots=2)
    ids = rng.integers(0, 100, (2, BLOCK)).astype(np.int64)
    lengths = np.zeros(2, np.int32), np.full(2, BLOCK, np.int32)
    index = np.tile(np.arange(BLOCK, dtype=np.int64), (2, 1))
    step = StepInput(ids, *lengths, index, np.ones(2, np.float32), random_controls(rng, 2), candidates=7)
    found, expected = engine.step(step), reference.step(step)
    assert (found.candidate_ids == expected.candidate_ids).all()
    np.testing.assert_allclose(found.candidate_logprobs, expected.candidate_logprobs, atol=2e-5)
    assert (found.distinct_experts == expected.distinct_experts).all()
    plain = engine.step(dataclasses.replace(step, controls=no_controls(2, BLOCK)))
    assert (plain.candidate_logprobs != found.candidate_logprobs).any()


def test_logits_that_are_not_numbers_show_in_that_row_alone(small_engine: EnginePackage) -> None:
    engine = OrtSession(small_engine, slots=2)
    rng = np.random.default_rng(0)
    lengths = np.zeros(2, np.int32), np.full(2, BLOCK, np.int32)
    index = np.tile(np.arange(BLOCK, dtype=np.int64), (2, 1))
    ids = rng.integers(0, 100, (2, BLOCK)).astype(np.int64)
    step = StepInput(ids, *lengths, index, np.ones(2, np.float32), no_controls(2, BLOCK))
    clean = engine.step(step)
    engine._caches["recurrent_state.0"][0] = np.nan
    engine.prefix_len[:] = 1
    spoiled = engine.step(step)
    assert not np.isfinite(spoiled.candidate_logprobs[0]).any()
    assert np.isfinite(spoiled.candidate_logprobs[1]).all()
    engine.reset(0)
    engine.reset(1)
    again = engine.step(step)
    assert (again.candidate_logprobs == clean.candidate_logprobs).all(), "a reset slot starts clean"


def test_caches_grow_and_keep_their_content(small_engine: EnginePackage, small_model: CloverModel) -> None:
    ids = np.random.default_rng(0).integers(0, 100, GROWTH + 100).tolist()
    engine = OrtSession(small_engine)
    before = engine.cache_bytes()
    found = commit_logits(engine, ids, 50)
    assert engine.cache_bytes() > before
    assert relative_error(found, commit_logits(TorchSession(small_model), ids)) < 1e-5


def test_expert_rows_are_interleaved() -> None:
    gate, up = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    packed = interleave(torch.cat((gate, up), 1))
    assert packed[:, 0::2].eq(0).all()
    assert packed[:, 1::2].eq(1).all()
