"""Unmasking rules, the n-gram ban, log-probabilities and the budget of forwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoBadWordsLogitsProcessor

from clover_trt.config import GenerationConfig
from clover_trt.engine.package import EnginePackage
from clover_trt.errors import RequestError
from clover_trt.runtime.bans import TokenBans
from clover_trt.runtime.generate import Generator
from clover_trt.runtime.sequence import Sequence
from clover_trt.runtime.unmask import RULES
from tests.small import SMALL

END, BLOCK = 5, SMALL.block_size


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(sorted(RULES)), st.floats(0.05, 1.0), st.integers(1, 40))
def test_every_rule_fills_unresolved_positions_and_makes_progress(seed: int, name: str, threshold: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    left = int(rng.integers(1, BLOCK + 1))
    logprobs = -np.sort(-np.log(rng.dirichlet(np.full(9, 0.3), left) + 1e-9), axis=-1)[:, :8].astype(np.float32)
    config = GenerationConfig(threshold=threshold, tokens_per_pass=count)
    fill = RULES[name].fill(np.exp(logprobs[:, 0]), logprobs, config)
    assert fill.shape == (left,)
    assert fill.any()
    if name == "tokens_per_pass":
        assert fill.sum() == min(count, left)


def run(config: GenerationConfig, seed: int, k: int) -> Sequence:
    """A request over made-up candidates from few tokens, which the controls of its row are applied to."""
    rng = np.random.default_rng(seed)
    request = Sequence([1, 2, 3], config, SMALL, 512, 124)
    while request.finish_reason is None:
        plan = request.plan()
        logits = rng.normal(size=(len(plan.positions), 124)).astype(np.float32) * 3
        logits[:, 16:] = -1e30
        for token, values in request.row_controls().biases.items():
            logits[:, token] += values
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        order = np.argsort(-logprobs, axis=-1, kind="stable")[:, :k]
        request.apply(order, np.take_along_axis(logprobs, order, 1))
    return request


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from(sorted(RULES)))
def test_no_ngram_comes_twice(seed: int, size: int, rule: str) -> None:
    config = GenerationConfig(
        block_size=BLOCK, max_new_tokens=12 if size == 1 else 80, threshold=0.3, rule=rule, no_repeat_ngram_size=size
    )
    response = run(config, seed, RULES[rule].candidates).response
    grams = [tuple(response[i : i + size]) for i in range(len(response) - size + 1)]
    assert len(grams) == len(set(grams))
    ban, seen = TokenBans(size), set()
    for i, token in enumerate(response):
        assert token not in ban.banned()
        assert {gram[-1] for gram in seen if gram[:-1] == tuple(response[i - size + 1 : i]) and i >= size - 1} == ban.banned()
        ban.add(token)
        if i >= size - 1:
            seen.add(tuple(response[i - size + 1 : i + 1]))


WORDS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(WORDS, st.lists(st.integers(0, 7), max_size=30))
def test_bad_words_are_those_of_transformers(words: list[list[int]], response: list[int]) -> None:
    processor = NoBadWordsLogitsProcessor(words)
    bans = TokenBans(words=words)
    for i in range(len(response) + 1):
        scores = processor(torch.tensor([response[:i]], dtype=torch.int64), torch.zeros(1, 8))
        assert set(torch.isinf(scores)[0].nonzero().flatten().tolist()) == bans.banned()
        if i < len(response):
            bans.add(response[i])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), WORDS, st.sampled_from(sorted(RULES)))
def test_no_bad_word_comes(seed: int, words: list[list[int]], rule: str) -> None:
    config = GenerationConfig(block_size=BLOCK, max_new_tokens=80, threshold=0.3, rule=rule, bad_words_ids=words)
    response = run(config, seed, RULES[rule].candidates).response
    for word in words:
        assert word not in [response[i : i + len(word)] for i in range(len(response))]


def test_a_budget_of_forwards_ends_a_request_with_what_it_has() -> None:
    config = GenerationConfig(block_size=BLOCK, max_new_tokens=80, threshold=1.0, max_forwards=BLOCK + 3)
    request = run(config, 0, 1)
    assert (request.finish_reason, request.counts.forwards) == ("max_forwards", BLOCK + 3)
    assert len(request.response) >= BLOCK


@pytest.mark.parametrize("mode", ["diffusion", "autoregressive", "self-speculative"])
def test_logprobs_are_those_of_the_tokens(tiny_engine: EnginePackage, mode: str) -> None:
    generator = Generator(tiny_engine)
    result = generator.run_one(
        generator.chat([{"role": "user", "content": 'Reverse "stone".'}], mode=mode, logprobs=3, max_new_tokens=40)
    )
    assert result.logprobs is not None
    assert [each.token for each in result.logprobs] == result.token_ids
    for each in result.logprobs:
        assert len(each.top) == 3
        assert each.top[0] == (each.token, pytest.approx(each.logprob, abs=1e-5))
        assert [value for _, value in each.top] == sorted((value for _, value in each.top), reverse=True)
    without = generator.run_one(generator.chat([{"role": "user", "content": 'Reverse "stone".'}], mode=mode, max_new_tokens=40))
    assert without.logprobs is None
    assert without.token_ids == result.token_ids


def test_an_unknown_rule_is_refused(tiny_engine: EnginePackage) -> None:
    with pytest.raises(RequestError, match=r"rule: expected one of low_confidence, .* \(found 'best'\)"):
        Generator(tiny_engine).sequence("Hi", rule="best")
