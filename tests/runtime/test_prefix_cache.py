"""Reuse of earlier turns: same tokens with and without, and a tree that stays within its budget."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_trt.engine.package import EnginePackage
from clover_trt.runtime.generate import Generator
from clover_trt.runtime.prefix_cache import PrefixCache
from clover_trt.runtime.session import Snapshot, StepInput, StepOutput
from tests.small import SMALL


class RowsOnly:
    """A session whose state after some tokens is those tokens."""

    def __init__(self) -> None:
        self.config, self.slots, self.max_len = SMALL, 1, 4096
        self.prefix_len = np.zeros(1, np.int32)
        self.tokens: list[int] = []

    def fill(self, tokens: list[int]) -> None:
        self.tokens, self.prefix_len[0] = list(tokens), len(tokens)

    def save(self, slot: int, begin: int) -> Snapshot:
        rows = {"key_cache.0": np.array(self.tokens[begin:], np.int64)}
        return Snapshot(begin, len(self.tokens), rows, {"state": np.array([sum(self.tokens)])})

    def load(self, slot: int, chain: list[Snapshot]) -> None:
        self.fill([int(token) for part in chain for token in part.rows["key_cache.0"]])
        assert sum(self.tokens) == int(chain[-1].states["state"][0])

    def reset(self, slot: int) -> None:
        self.fill([])

    def step(self, step: StepInput) -> StepOutput:
        raise NotImplementedError


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([200, 2_000, 10**6]))
def test_a_match_is_the_beginning_of_the_tokens_and_the_budget_holds(seed: int, budget: int) -> None:
    rng, session, cache = random.Random(seed), RowsOnly(), PrefixCache(budget)
    stored: set[tuple[int, ...]] = set()
    for _ in range(60):
        base = list(rng.choice(sorted(stored))) if stored and rng.random() < 0.7 else []
        tokens = base[: rng.randint(0, len(base))] + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        chain = cache.match(tokens)
        if chain:
            assert [part.begin for part in chain] == [0, *(part.end for part in chain[:-1])]
            session.load(0, chain)
            assert session.tokens == tokens[: chain[-1].end]
        if budget == 10**6:
            longest = max((len(known) for known in stored if tuple(tokens[: len(known)]) == known), default=0)
            assert (chain[-1].end if chain else 0) == longest
        session.fill(tokens)
        cache.store(tokens, session, 0)
        stored.add(tuple(tokens))
        assert cache.statistics.bytes <= budget
        assert cache.statistics.bytes == sum(node.snapshot.nbytes for node in cache._nodes.values())
        assert cache.statistics.snapshots == len(cache._nodes)
        assert all(node.parent in cache._nodes or node.parent == b"" for node in cache._nodes.values())
    assert cache.statistics.evictions == 0 or budget < 10**6


@pytest.mark.parametrize("mode", ["diffusion", "autoregressive", "self-speculative"])
def test_tokens_are_the_same_with_reuse_and_without(tiny_engine: EnginePackage, mode: str) -> None:
    cache = PrefixCache(1 << 28)
    with_reuse, without = Generator(tiny_engine, slots=2, prefix_cache=cache), Generator(tiny_engine, slots=2)
    messages: list[dict[str, str]] = []
    rng = random.Random(0)
    for turn in range(6):
        word = "".join(rng.choice("abcdefgh") for _ in range(6))
        messages.append({"role": "user", "content": f'Reverse "{word}".'})
        results = [g.run_one(g.chat(messages, max_new_tokens=64, mode=mode, ignore_eos=turn == 2)) for g in (with_reuse, without)]
        assert results[0].token_ids == results[1].token_ids
        assert results[1].cached_tokens == 0
        assert (results[0].cached_tokens > 0) == (turn > 0)
        messages.append({"role": "assistant", "content": results[0].content})
    assert cache.statistics.hits == 5
    assert cache.statistics.reused_tokens > 100
