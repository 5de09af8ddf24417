from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_trt.config import GenerationConfig
from clover_trt.engine.package import EnginePackage
from clover_trt.runtime.controls import ControlState, RowControls, ramp, stack
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.sampling import choose
from clover_trt.runtime.session import StepInput, no_controls


@given(st.integers(0, 1000), st.integers(1, 1000), st.floats(0, 50))
def test_a_ramp_is_zero_before_start_monotone_and_full_at_the_end(start: int, window: int, strength: float) -> None:
    values = ramp(np.arange(start + window + 10), start, window, strength)
    assert not values[: start + 1].any()
    assert (np.diff(values) >= 0).all()
    assert (values[start + window :] == np.float32(strength)).all()


def test_ramps_use_the_position_of_each_token() -> None:
    wanted = GenerationConfig(
        dllm_length_penalty_start=10, dllm_length_penalty_window=10, dllm_think_end_start=0, dllm_think_end_window=4
    )
    state = ControlState(wanted, [7, 8], 9, thinking=True)
    early = state.row(np.arange(4))
    assert set(early.biases) == {9}
    assert early.biases[9].tolist() == [0.0, 2.5, 5.0, 7.5]
    state.add(9)
    assert not state.row(np.arange(4)).biases, "after </think> nothing raises it"
    late = state.row(np.arange(9, 13))
    assert late.biases[7].tolist() == late.biases[8].tolist() == [0.0, 0.0, 1.0, 2.0]


def test_stack_pads_with_the_filler() -> None:
    wanted = GenerationConfig(repetition_penalty=1.5)
    state = ControlState(wanted, [7], None, thinking=False)
    for token in (3, 3, 4):
        state.add(token)
    out = stack([None, (state.row(np.arange(2)), wanted)], 2, filler=99)
    assert out.history_ids.tolist() == [[99, 99], [3, 4]]
    assert out.history_counts.tolist() == [[0, 0], [2, 1]]
    assert out.repetition_penalty.tolist() == [1.0, 1.5]


def test_without_penalties_no_history_is_kept() -> None:
    state = ControlState(GenerationConfig(), [7], None, thinking=False)
    state.add(3)
    assert not state.row(np.arange(2)).history_ids.size


def test_sampling_follows_the_distribution() -> None:
    logprobs = np.log(np.tile(np.array([[0.6, 0.3, 0.1]], np.float32), (20_000, 1)))
    ids = np.tile(np.array([[4, 5, 6]]), (20_000, 1))
    rng = np.random.default_rng(0)
    drawn, confidence = choose(ids, logprobs, GenerationConfig(do_sample=True), rng)
    shares = [float((drawn == token).mean()) for token in (4, 5, 6)]
    np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=0.015)
    assert np.allclose(confidence[drawn == 5], 0.3)
    drawn, _ = choose(ids, logprobs, GenerationConfig(do_sample=True, top_p=0.7), rng)
    assert set(drawn.tolist()) == {4, 5}
    np.testing.assert_allclose((drawn == 4).mean(), 2 / 3, atol=0.015)
    drawn, _ = choose(ids, logprobs, GenerationConfig(do_sample=True, top_k=1), rng)
    assert set(drawn.tolist()) == {4}
    cold, _ = choose(ids, logprobs, GenerationConfig(do_sample=True, temperature=0.05), rng)
    assert (cold == 4).mean() > 0.999


def test_counts_of_many_tokens_are_kept() -> None:
    tokens = np.random.default_rng(0).integers(0, 500, 2000).tolist()
    state = ControlState(GenerationConfig(frequency_penalty=0.1), [7], None, thinking=False)
    for token in tokens:
        state.add(token)
    row = state.row(np.arange(2))
    assert dict(zip(row.history_ids.tolist(), row.history_counts.tolist(), strict=True)) == Counter(tokens)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 99), max_size=30),
    st.integers(0, 200),
    st.sampled_from(["repetition_penalty", "presence_penalty", "frequency_penalty"]),
)
def test_neutral_controls_change_nothing_bit_for_bit(
    small_engine: EnginePackage, response: list[int], early: int, other: str
) -> None:
    """Penalties at their neutral value with a history, and ramps that a position has not reached."""
    neutral = GenerationConfig(
        eos_token_id=(5,), dllm_length_penalty_start=early + 16, dllm_think_end_start=early + 16, dllm_length_penalty_window=3
    )
    state = ControlState(neutral, neutral.eos_token_id, 9, thinking=True)
    counted = ControlState(neutral.override({other: 0.5}), neutral.eos_token_id, 9, thinking=True)
    for token in response:
        state.add(token)
        counted.add(token)
    positions = np.arange(early, early + 16)
    history = counted.row(positions)
    with_history = stack(
        [(RowControls(history.history_ids, history.history_counts, state.row(positions).biases), neutral)], 16, 120
    )
    outputs = []
    for controls in (no_controls(1, 16), stack([(state.row(positions), neutral)], 16, 120), with_history):
        session = OrtSession(small_engine, threads=1)
        ids, lengths = np.full((1, 16), 120), (np.zeros(1, np.int32), np.full(1, 16, np.int32))
        outputs.append(
            session.step(StepInput(ids, *lengths, np.arange(16)[None], np.ones(1, np.float32), controls, candidates=8))
        )
    for output in outputs[1:]:
        assert output.candidate_ids.tobytes() == outputs[0].candidate_ids.tobytes()
        assert output.candidate_logprobs.tobytes() == outputs[0].candidate_logprobs.tobytes()
