"""The scheduler over a made-up session whose candidates depend on a row's own tokens alone."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny.tokenizer import build_tokenizer, save_tokenizer

from clover_trt.config import GenerationConfig, ModelConfig
from clover_trt.errors import QueueFullError
from clover_trt.runtime.request import PassEvent, Request
from clover_trt.runtime.scheduler import Scheduler
from clover_trt.runtime.sequence import Sequence
from clover_trt.runtime.session import StepInput, StepOutput, check_step
from clover_trt.runtime.text import TextCodec
from tests.small import SMALL

VOCAB, BLOCK, CHUNK, END = 128, SMALL.block_size, 40, 5


class HashSession:
    """Keeps the committed tokens of each slot; candidates are a hash of them, the block and the position."""

    def __init__(self, slots: int, config: ModelConfig = SMALL) -> None:
        self.config, self.slots, self.max_len = config, slots, 4096
        self.prefix_len = np.zeros(slots, np.int32)
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.steps: list[StepInput] = []
        self.poison: set[int] = set()  # prompts that begin with one of these ids give not-a-number

    def reset(self, slot: int) -> None:
        self.prefix_len[slot] = 0
        self.tokens[slot] = []

    def step(self, step: StepInput) -> StepOutput:
        check_step(self, step)
        self.steps.append(step)
        B, L = step.logit_index.shape
        ids, logprobs = np.zeros((B, L, 1), np.int64), np.zeros((B, L, 1), np.float32)
        for b in range(B):
            row, commit, slot = step.input_ids[b].tolist(), int(step.commit_len[b]), step.first_slot + b
            self.tokens[slot] += row[:commit]
            rng = random.Random(repr((self.tokens[slot], row[commit : commit + int(step.noisy_len[b])])))
            for i in range(L):
                ids[b, i, 0] = END if rng.random() < 0.02 else rng.randrange(10, 100)
                logprobs[b, i, 0] = np.log(rng.random())
            if self.tokens[slot] and self.tokens[slot][0] in self.poison:
                logprobs[b] = np.nan
        self.prefix_len[step.slots] += step.commit_len
        return StepOutput(ids, logprobs, np.ones(SMALL.num_hidden_layers, np.int64))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(build_tokenizer(), folder)
    return TextCodec(folder)


def request(codec: TextCodec, seed: int, prompt: int | None = None) -> Request:
    rng = random.Random(seed)
    ids = [rng.randrange(10, 100) for _ in range(prompt or rng.choice([1, 9, 30, 39, 40, 41, 150]))]
    config = GenerationConfig(
        block_size=BLOCK, eos_token_id=(END,), max_new_tokens=rng.randint(1, 60), threshold=rng.uniform(0.3, 1)
    )
    return Request(Sequence(ids, config, SMALL, 4096, 124, prefill_chunk=CHUNK), codec)


def finish(scheduler: Scheduler) -> list[PassEvent]:
    events = []
    for _ in range(20_000):
        if scheduler.idle:
            return events
        events += scheduler.step()
    raise AssertionError("the scheduler does not come to an end")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7))
def test_what_shares_the_batch_does_not_matter(codec: TextCodec, seed: int, slots: int) -> None:
    """50 times 20 requests: random arrivals, lengths and cancellations."""
    rng = random.Random(seed)
    scheduler = Scheduler(HashSession(slots))
    requests = [request(codec, seed + i) for i in range(20)]
    waiting, cancelled, doomed = list(requests), set(), set(rng.sample(requests, 4))
    for _ in range(20_000):
        while waiting and rng.random() < 0.4:
            scheduler.add(waiting.pop(0))
        for each in [r for r in doomed if r not in waiting and not r.ended and rng.random() < 0.2]:
            scheduler.cancel(each)
            cancelled.add(each)
        scheduler.step()
        assert scheduler.busy <= slots
        if not waiting and scheduler.idle:
            break
    for i, each in enumerate(requests):
        alone, only = request(codec, seed + i), Scheduler(HashSession(1))
        only.add(alone)
        finish(only)
        if each in cancelled:
            assert each.sequence.finish_reason in ("cancelled", alone.sequence.finish_reason)
            assert alone.sequence.response[: len(each.sequence.response)] == each.sequence.response
        else:
            assert each.result().token_ids == alone.result().token_ids
            assert each.result().text == alone.result().text
            assert each.result().forwards == alone.result().forwards


def test_a_long_prefill_delays_others_by_one_chunk_a_pass(codec: TextCodec) -> None:
    session = HashSession(4)
    scheduler = Scheduler(session)
    short = [request(codec, i, prompt=5) for i in range(2)]
    long = [request(codec, 10 + i, prompt=1500) for i in range(2)]
    for each in (*long, *short):
        scheduler.add(each)
    while not all(r.ended for r in short):
        session.steps.clear()
        events = scheduler.step()
        chunks = [step for step in session.steps if step.input_ids.shape[1] > 3 * BLOCK or len(step.input_ids) == 1]
        assert len(session.steps) <= 2
        assert sum(int(step.commit_len.max()) > BLOCK for step in session.steps) <= 1
        assert all(int(step.commit_len.sum()) <= CHUNK for step in chunks)
        touched = {id(event.request) for event in events}
        assert all(id(r) in touched for r in short if not r.ended)
    session.steps.clear()
    scheduler.step()
    scheduler.step()
    assert {step.first_slot for step in session.steps} == {0, 1}, "long prompts take turns"
    finish(scheduler)


def test_cancelling_frees_the_slot_before_any_more_work(codec: TextCodec) -> None:
    session = HashSession(1)
    scheduler = Scheduler(session)
    first, second = request(codec, 1, prompt=400), request(codec, 2, prompt=5)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.step()
    scheduler.cancel(first)
    events = scheduler.step()
    assert [(event.request, event.finish_reason) for event in events if event.request is first] == [(first, "cancelled")]
    assert any(event.request is second for event in events), "the slot is reused in the same pass"
    scheduler.cancel(first)
    finish(scheduler)
    assert second.ended


def test_a_deadline_ends_a_request_with_what_it_has(codec: TextCodec) -> None:
    scheduler = Scheduler(HashSession(1))
    late, queued = request(codec, 1, prompt=400), request(codec, 2)
    scheduler.add(late, deadline=time.monotonic() + 0.01)
    scheduler.add(queued, deadline=time.monotonic() - 1)
    events = scheduler.step()
    assert queued.sequence.finish_reason == "deadline"
    assert queued.sequence.counts.forwards == 0
    time.sleep(0.02)
    events = scheduler.step()
    assert [event.finish_reason for event in events] == ["deadline"]
    assert scheduler.idle


def test_a_full_queue_refuses_and_changes_nothing(codec: TextCodec) -> None:
    scheduler = Scheduler(HashSession(1), max_queue=2)
    for i in range(3):
        scheduler.add(request(codec, i))
    with pytest.raises(QueueFullError, match="the limit is 2"):
        scheduler.add(request(codec, 9))
    scheduler.step()
    assert (scheduler.busy, scheduler.waiting) == (1, 2)
    with pytest.raises(QueueFullError):
        scheduler.add(request(codec, 9))
    finish(scheduler)


def test_a_fault_ends_its_own_request_alone(codec: TextCodec) -> None:
    session = HashSession(3)
    requests = [request(codec, i, prompt=8) for i in range(3)]
    session.poison = {requests[1].sequence.prompt[0]} - {requests[i].sequence.prompt[0] for i in (0, 2)}
    assert session.poison
    scheduler = Scheduler(session)
    for each in requests:
        scheduler.add(each)
    finish(scheduler)
    assert [each.sequence.finish_reason == "error" for each in requests] == [False, True, False]
    assert "not a number" in str(requests[1].result().error)


def test_short_prompts_share_a_prefill_chunk(codec: TextCodec) -> None:
    session = HashSession(6)
    scheduler = Scheduler(session)
    for i in range(6):
        scheduler.add(request(codec, i, prompt=BLOCK + 3))
    scheduler.step()
    assert [(step.first_slot, len(step.input_ids)) for step in session.steps] == [(0, CHUNK // (BLOCK + 3))]
    scheduler.step()
    prefills = [step for step in session.steps[1:] if step.commit_len.max() > BLOCK]
    assert [step.first_slot for step in prefills] == [CHUNK // (BLOCK + 3)]
    finish(scheduler)
