"""Autoregressive and self-speculative decoding on the shipped model, and on a random one that agrees with itself rarely."""

from __future__ import annotations

import numpy as np
import pytest

from clover_trt.engine.package import EnginePackage
from clover_trt.errors import RequestError
from clover_trt.runtime.causal import CausalSequence
from clover_trt.runtime.generate import Generator
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.scheduler import build_step
from clover_trt.runtime.scoring import commit_logits
from tests.small import SMALL

PROMPTS = ['Reverse "stone".', 'Write "abcdefg" in capitals.', "Turn on the lamp in the kitchen.", "What is 7 + 8?"]


def chat(generator: Generator, prompt: str, **settings: object):  # type: ignore[no-untyped-def]
    return generator.chat([{"role": "user", "content": prompt}], max_new_tokens=48, **settings)


def test_autoregressive_is_the_argmax_of_whole_text_logits(tiny_engine: EnginePackage) -> None:
    generator = Generator(tiny_engine)
    for prompt in PROMPTS:
        sequence = chat(generator, prompt, mode="autoregressive")
        found = generator.run_one(sequence)
        ids = [*sequence.prompt, *found.token_ids]
        logits = commit_logits(OrtSession(tiny_engine), ids)
        logits[:, tiny_engine.model.mask_token_id] = -np.inf
        logits[:, tiny_engine.valid_tokens :] = -np.inf
        expected = logits[len(sequence.prompt) - 1 : -1].argmax(-1)
        assert found.token_ids == expected.tolist()


@pytest.mark.parametrize("slots", [1, 3])
def test_self_speculative_gives_the_autoregressive_tokens(tiny_engine: EnginePackage, slots: int) -> None:
    generator = Generator(tiny_engine, slots=slots)
    modes = {}
    for mode in ("autoregressive", "self-speculative"):
        modes[mode] = generator.generate([chat(generator, prompt, mode=mode, ignore_eos=True) for prompt in PROMPTS])
    for plain, drafted in zip(*modes.values(), strict=True):
        assert plain.token_ids == drafted.token_ids
        assert drafted.forwards < plain.forwards
        assert drafted.accepted_per_verification is not None


def test_a_model_that_disagrees_with_its_drafts_still_gives_the_same(small_engine: EnginePackage) -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        prompt = rng.integers(6, 100, int(rng.choice([1, 20, 70]))).tolist()
        answers = []
        for mode in ("autoregressive", "self-speculative"):
            session = OrtSession(small_engine)
            settings = small_engine.generation.override({"mode": mode, "max_new_tokens": 24, "ignore_eos": True})
            sequence = CausalSequence(prompt, settings, SMALL, 512, SMALL.vocab_size, prefill_chunk=32)
            answers.append(run_alone(session, sequence))
        assert answers[0] == answers[1]


def run_alone(session: OrtSession, sequence: CausalSequence) -> list[int]:
    session.reset(0)
    while sequence.finish_reason is None:
        step = build_step([sequence], sequence.mask)
        before = session.save(0, int(session.prefix_len[0]))
        output = session.step(step)
        sequence.apply(output.candidate_ids[0], output.candidate_logprobs[0])
        if sequence.undo:
            session.load(0, [before])
    return sequence.response


def test_what_a_draft_cannot_follow_is_refused(tiny_engine: EnginePackage) -> None:
    generator = Generator(tiny_engine)
    for settings in ({"do_sample": True}, {"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 2}):
        with pytest.raises(RequestError, match="self-speculative is greedy and takes no"):
            chat(generator, PROMPTS[0], mode="self-speculative", **settings)
        chat(generator, PROMPTS[0], mode="autoregressive", **settings)
