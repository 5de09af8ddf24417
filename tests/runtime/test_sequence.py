"""The state of one request, driven by made-up candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_trt.config import GenerationConfig
from clover_trt.errors import NumericsError, RequestError
from clover_trt.runtime.sequence import Sequence
from tests.small import SMALL

END, MASK, BLOCK = 5, 120, SMALL.block_size


def sequence(
    prompt: list[int] | None = None, *, max_len: int = 512, chunk: int = 512, fused: bool = True, **changes: Any
) -> Sequence:
    config = GenerationConfig(block_size=BLOCK, eos_token_id=(END,)).override({"max_new_tokens": 64, **changes})
    return Sequence([1, 2, 3] if prompt is None else prompt, config, SMALL, max_len, 124, prefill_chunk=chunk, fused=fused)


def candidates(rng: np.random.Generator, end_share: float = 0.02) -> tuple[np.ndarray, np.ndarray]:
    ids = rng.integers(10, 100, (BLOCK, 1))
    ids[rng.random((BLOCK, 1)) < end_share] = END
    return ids, np.log(rng.random((BLOCK, 1), np.float32) + 1e-6)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 100),
    st.integers(1, 70),
    st.sampled_from([4, 32, 512]),
    st.booleans(),
    st.floats(0.1, 1.0),
)
def test_every_request_ends_and_commits_exactly_what_it_says(
    seed: int, prompt: int, new: int, chunk: int, fused: bool, threshold: float
) -> None:
    rng = np.random.default_rng(seed)
    request = sequence(list(range(1, 1 + prompt)), chunk=chunk, fused=fused, max_new_tokens=new, threshold=threshold)
    committed: list[int] = []
    passes_of_block = 0
    told: list[int] = []
    seen: dict[int, int] = {}
    while request.finish_reason is None:
        plan = request.plan()
        assert plan.commit or plan.noisy
        assert len(plan.commit) <= max(chunk, BLOCK)
        assert not (plan.commit and plan.noisy and not fused)
        committed += plan.commit
        start = request.block_start
        for fill in request.apply(*candidates(rng)):
            assert fill.position not in seen, "a filled position never changes"
            seen[fill.position] = fill.token
        told += request.new_text_ids()
        passes_of_block = passes_of_block + bool(plan.noisy) if request.block_start == start else 0
        assert passes_of_block <= BLOCK
        assert request.counts.forwards < 2000
    assert committed[:prompt] == list(range(1, 1 + prompt))
    assert committed[prompt:] == request.response[: len(committed) - prompt]
    assert all(request.response[i] == seen[i] for i in range(len(request.response)))
    assert MASK not in request.response
    if request.finish_reason == "stop":
        assert request.response.index(END) == len(request.response) - 1 <= new - 1
        assert told == request.response[:-1]
    else:
        assert told == request.response
        assert len(request.response) == new
        assert END not in request.response


def test_a_block_of_s_passes_costs_s_forwards_when_fused() -> None:
    sure = np.log(np.full((BLOCK, 1), 0.999, np.float32))
    ids = np.arange(10, 10 + BLOCK)[:, None]
    for fused, forwards in ((True, 4), (False, 4 + 1 + 3)):
        request = sequence(fused=fused, max_new_tokens=4 * BLOCK)
        while request.finish_reason is None:
            request.plan()
            request.apply(ids, sure)
        assert request.counts.forwards == forwards
        assert request.response == ids.flatten().tolist() * 4


def test_the_end_of_turn_waits_for_what_stands_before_it() -> None:
    request = sequence()
    ids = np.full((BLOCK, 1), 50)
    ids[3] = END
    confidence = np.full((BLOCK, 1), -9.0, np.float32)
    confidence[3] = -0.001
    request.plan()
    request.apply(ids, confidence)
    assert request.finish_reason is None
    assert request.resolved() == []
    confidence[:3] = -0.001
    assert request.plan().positions == [0, 1, 2, *range(4, BLOCK)], "candidates are asked for where nothing is filled yet"
    request.apply(ids, confidence)
    assert (request.finish_reason, request.response, request.new_text_ids()) == ("stop", [50, 50, 50, END], [50, 50, 50])


def test_not_a_number_ends_the_request() -> None:
    request = sequence()
    request.plan()
    with pytest.raises(NumericsError, match="response position 0"):
        request.apply(np.zeros((BLOCK, 1), np.int64), np.full((BLOCK, 1), np.nan, np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1, 124]}, "prompt token 1 is 124: expected 0 to 123"),
        ({"prompt": [1, -1]}, "prompt token 1 is -1"),
        ({"prompt": [1, MASK]}, "prompt token 1 is the mask token"),
        ({"block_size": 17}, "built for blocks of up to 16"),
        ({"prompt": [1] * 33, "max_len": 96}, "33 tokens .* needs room for 64 .* 97 in all, the limit is 96"),
    ],
)
def test_a_bad_request_is_refused_before_any_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        sequence(**arguments)


@given(st.integers(1, 200), st.integers(1, 200))
def test_the_context_rule_counts_whole_blocks(prompt: int, new: int) -> None:
    fits = prompt + -(-new // BLOCK) * BLOCK <= 160
    try:
        sequence([1] * prompt, max_len=160, max_new_tokens=new)
    except RequestError:
        assert not fits
    else:
        assert fits
