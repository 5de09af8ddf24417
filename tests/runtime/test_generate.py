"""Generation over the CPU engine of a small random model."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny.tokenizer import build_tokenizer, save_tokenizer

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import ModelConfig
from clover_trt.engine.build import build
from clover_trt.engine.package import EnginePackage, open_package
from clover_trt.errors import EngineError, RequestError
from clover_trt.runtime.generate import Generator
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.request import PassEvent
from clover_trt.runtime.session import StepInput, StepOutput
from tests.small import SMALL, random_state, write_checkpoint


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> EnginePackage:
    """A random model with the vocabulary of the real tokenizer."""
    tokenizer = build_tokenizer()
    size = tokenizer.get_vocab_size()
    config = ModelConfig.model_validate(
        {**SMALL.model_dump(), "vocab_size": size + 7, "mask_token_id": tokenizer.token_to_id("<|mask|>")}
    )
    folder = tmp_path_factory.mktemp("text")
    write_checkpoint(folder / "checkpoint", random_state(config), config)
    save_tokenizer(tokenizer, folder / "checkpoint")
    build(Checkpoint(folder / "checkpoint"), folder / "engine")
    return open_package(folder / "engine")


PROMPTS = ["Hello", "What is 12 + 30?", "x" * 90, "Reverse the list", "a"]
SETTINGS: list[dict[str, Any]] = [
    {"max_new_tokens": 40, "threshold": 0.3},
    {"max_new_tokens": 16, "threshold": 0.95},
    {"max_new_tokens": 33, "threshold": 0.05, "expert_subset_mass": 0.6},
    {"max_new_tokens": 50, "threshold": 0.2, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"max_new_tokens": 20, "threshold": 0.2, "do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5},
]


def test_a_batch_gives_what_each_request_gives_alone(package: EnginePackage) -> None:
    many, one = Generator(package, slots=5), Generator(package)
    together = many.generate([many.sequence(p, **s) for p, s in zip(PROMPTS, SETTINGS, strict=True)])
    for prompt, settings, result in zip(PROMPTS, SETTINGS, together, strict=True):
        alone = one.run_one(one.sequence(prompt, **settings))
        assert alone.token_ids == result.token_ids
        assert (alone.forwards, alone.finish_reason) == (result.forwards, result.finish_reason)


def test_fused_and_split_give_the_same_tokens(package: EnginePackage) -> None:
    fused, split = Generator(package), Generator(package, fused=False)
    for prompt, settings in zip(PROMPTS, SETTINGS, strict=True):
        a, b = (g.run_one(g.sequence(prompt, **settings)) for g in (fused, split))
        assert a.token_ids == b.token_ids
        assert a.forwards < b.forwards
        assert a.denoise_passes == b.denoise_passes


def test_events_tell_the_whole_story(package: EnginePackage) -> None:
    generator = Generator(package)
    sequence = generator.sequence(PROMPTS[0], **SETTINGS[0])
    events: list[PassEvent] = []
    result = generator.run_one(sequence, events.append)
    assert "".join(event.text for event in events) == result.text
    filled = {fill.position: fill.token for event in events for fill in event.filled}
    assert [filled[i] for i in range(len(result.token_ids))] == result.token_ids
    assert all(0 < fill.confidence <= 1 for event in events for fill in event.filled)
    assert [event.forward for event in events] == list(range(1, result.forwards + 1))
    assert events[-1].finish_reason == result.finish_reason
    assert SMALL.mask_token_id not in result.token_ids
    assert len(result.distinct_experts) == SMALL.num_hidden_layers
    assert 0 < result.seconds_to_first_block <= result.seconds


@pytest.mark.parametrize("length", [*range(1, 18), 31, 32, 33, 100])
def test_prompts_of_every_residue_of_the_block_decode(package: EnginePackage, length: int) -> None:
    generator = Generator(package)
    result = generator.run_one(generator.sequence([7] * length, max_new_tokens=17, threshold=0.1, ignore_eos=True))
    assert len(result.token_ids) == 17


def test_a_prompt_in_chunks_gives_the_same_tokens(package: EnginePackage) -> None:
    whole = Generator(package)
    chunked = Generator(dataclasses.replace(package, build=package.build.model_copy(update={"prefill_chunk": 20})))
    a, b = (g.run_one(g.sequence(PROMPTS[2], **SETTINGS[0])) for g in (whole, chunked))
    assert a.token_ids == b.token_ids
    assert b.forwards == a.forwards + -(-b.prompt_tokens // 20) - 1


def test_a_seed_repeats_a_sampled_answer(package: EnginePackage) -> None:
    generator = Generator(package)
    settings = {**SETTINGS[4], "temperature": 2.0}
    answers = [generator.run_one(generator.sequence("Hi", **{**settings, "seed": seed})).token_ids for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


class _Faulty(OrtSession):
    """Row 0 turns into not-a-number on its second step."""

    steps = 0

    def step(self, step: StepInput) -> StepOutput:
        out = super().step(step)
        self.steps += 1
        if self.steps == 2:
            out.candidate_logprobs[0] = np.nan
        return out


def test_a_row_that_fails_does_so_alone(package: EnginePackage) -> None:
    healthy = Generator(package, slots=2)
    expected = healthy.generate([healthy.sequence("Hello", **SETTINGS[0]) for _ in range(2)])[1]
    generator = Generator(package, _Faulty(package, slots=2))
    first, second = generator.generate([generator.sequence("Hello", **SETTINGS[0]) for _ in range(2)])
    assert first.finish_reason == "error"
    assert first.error is not None
    assert "not a number" in first.error
    assert second.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("prompt", "overrides", "message"),
    [
        ("", {}, "the prompt is empty"),
        ("x" * 500, {"max_new_tokens": 100}, "the limit is 512"),
        ("x", {"threshold": 2.0}, r"threshold.*2\.0"),
        ("x", {"block_size": 64}, "built for blocks of up to 16"),
        ("x", {"temprature": 1.0}, "temprature"),
        ("a <|mask|> b", {}, "is the mask token"),
    ],
)
def test_bad_requests_are_refused(package: EnginePackage, prompt: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Generator(package).sequence(prompt, **overrides)


def test_running_an_engine_imports_no_torch(package: EnginePackage) -> None:
    code = (
        "import sys\nfrom clover_trt.runtime.generate import Generator\n"
        "g = Generator(sys.argv[1])\ng.run_one(g.sequence('Hi', max_new_tokens=4))\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'onnx', 'onnxscript', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(package.folder)], check=False).returncode == 0


def test_decoding_does_not_touch_the_package(package: EnginePackage) -> None:
    before = sorted(Path(package.folder).iterdir())
    generator = Generator(package)
    generator.run_one(generator.sequence("Hi", max_new_tokens=4))
    assert sorted(Path(package.folder).iterdir()) == before
    open_package(package.folder)


def test_a_stop_string_ends_the_request_and_is_not_shown(package: EnginePackage) -> None:
    generator = Generator(package)
    settings = {"max_new_tokens": 48, "threshold": 0.2, "ignore_eos": True}
    whole = generator.run_one(generator.sequence("Hello", **settings))
    stop = whole.text[len(whole.text) // 2 :][:3]
    events: list[PassEvent] = []
    result = generator.run_one(generator.sequence("Hello", stop=[stop, "never in it"], **settings), events.append)
    assert result.text == whole.text[: whole.text.index(stop)] == "".join(event.text for event in events)
    assert result.finish_reason == "stop"
    assert result.forwards <= whole.forwards
    token = whole.token_ids[20]
    result = generator.run_one(generator.sequence("Hello", stop_token_ids=[token], **settings))
    assert result.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    with pytest.raises(RequestError, match="stop"):
        generator.sequence("Hello", stop=[""])


def test_a_cache_budget_limits_what_a_request_may_hold(package: EnginePackage) -> None:
    budget = 350_000
    session = OrtSession(package, slots=4, cache_budget=budget)
    assert package.model.block_size < session.max_len < package.build.max_seq_len
    generator = Generator(package, session)
    with pytest.raises(RequestError, match=f"the limit is {session.max_len}"):
        generator.sequence([10] * session.max_len, max_new_tokens=16)
    longest = session.max_len - package.model.block_size
    results = generator.generate([generator.sequence([10] * longest, max_new_tokens=8) for _ in range(4)])
    assert all(result.error is None for result in results)
    assert session.cache_bytes() <= budget
    with pytest.raises(EngineError, match=r"cache budget of 1,000 bytes is too small for 4 slots: expected at least [\d,]+"):
        OrtSession(package, slots=4, cache_budget=1000)
