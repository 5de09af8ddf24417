from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clover_trt.config import GenerationConfig
from clover_trt.runtime.controls import ControlState, ramp, stack
from clover_trt.runtime.sampling import choose


@given(st.integers(0, 1000), st.integers(1, 1000), st.floats(0, 50))
def test_a_ramp_is_zero_before_start_monotone_and_full_at_the_end(start: int, window: int, strength: float) -> None:
    values = ramp(np.arange(start + window + 10), start, window, strength)
    assert not values[: start + 1].any()
    assert (np.diff(values) >= 0).all()
    assert (values[start + window :] == np.float32(strength)).all()


def test_ramps_use_the_position_of_each_token() -> None:
    settings = GenerationConfig(
        dllm_length_penalty_start=10, dllm_length_penalty_window=10, dllm_think_end_start=0, dllm_think_end_window=4
    )
    state = ControlState(settings, [7, 8], 9, thinking=True)
    early = state.row(np.arange(4))
    assert set(early.biases) == {9}
    assert early.biases[9].tolist() == [0.0, 2.5, 5.0, 7.5]
    state.add(9)
    assert not state.row(np.arange(4)).biases, "after </think> nothing raises it"
    late = state.row(np.arange(9, 13))
    assert late.biases[7].tolist() == late.biases[8].tolist() == [0.0, 0.0, 1.0, 2.0]


def test_stack_pads_with_the_filler() -> None:
    settings = GenerationConfig(repetition_penalty=1.5)
    state = ControlState(settings, [7], None, thinking=False)
    for token in (3, 3, 4):
        state.add(token)
    out = stack([None, (state.row(np.arange(2)), settings)], 2, filler=99)
    assert out.history_ids.tolist() == [[99, 99], [3, 4]]
    assert out.history_counts.tolist() == [[0, 0], [2, 1]]
    assert out.repetition_penalty.tolist() == [1.0, 1.5]


def test_without_penalties_no_history_is_kept() -> None:
    state = ControlState(GenerationConfig(), [7], None, thinking=False)
    state.add(3)
    assert not state.row(np.arange(2)).history


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
