"""clover-tiny: its tasks, its training loop, and what the shipped weights can do."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eval_tiny import figures, score
from safetensors.torch import load_file
from tiny.tasks import examples, split_of
from tiny.tokenizer import build_tokenizer
from tiny.training import IGNORE, Balance, RowMaker, answer_text, prompt_text, tiny_config
from tokenizers import Tokenizer

from clover_trt.checkpoint.quantize import quantize_checkpoint
from clover_trt.checkpoint.reader import Checkpoint, checkpoint_folder
from clover_trt.engine.build import build
from clover_trt.engine.package import EnginePackage
from clover_trt.model.lengths import Lengths
from clover_trt.model.moe import expert_subset_moe
from clover_trt.runtime.generate import Generator

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def maker() -> RowMaker:
    return RowMaker(build_tokenizer(), 32)


def take(seed: int | str, split: str, count: int) -> list:  # type: ignore[type-arg]
    return list(itertools.islice(examples(seed, split), count))  # type: ignore[arg-type]


def test_examples_repeat_by_seed_and_the_splits_share_no_prompt() -> None:
    assert take(3, "train", 50) == take(3, "train", 50) != take(4, "train", 50)
    train, held_out = ({e.prompt for e in take(1, split, 3000)} for split in ("train", "held_out"))
    assert not train & held_out
    assert all(split_of(prompt) == "held_out" for prompt in held_out)


def test_answers_are_right() -> None:
    for example in take(5, "train", 2000):
        words = example.prompt.rstrip(".?").split()
        quoted = example.prompt.split('"')[1::2]
        if example.task == "reverse":
            assert example.answer == "".join(reversed(quoted[0]))
        elif example.task == "sort":
            assert example.answer == "".join(sorted(quoted[0]))
        elif example.task == "count":
            assert int(example.answer) == sum(letter in "aeiou" for letter in quoted[0])
        elif example.task == "upper":
            assert example.answer == quoted[0].upper()
        elif example.task == "add":
            assert int(example.answer) == sum(int(word) for word in words if word.isdigit())
        elif example.task == "subtract":
            a, b = sorted(int(word) for word in words if word.isdigit())
            assert int(example.answer) == b - a
        else:
            call = json.loads(example.answer.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert set(call) == {"name", "arguments"}


def test_rows_hold_prompt_answer_and_one_masked_block(maker: RowMaker) -> None:
    rng = random.Random(0)
    kinds = set()
    for example in take(6, "train", 300):
        row = maker.row(example, rng)
        assert len(row.ids) == len(row.targets) == row.commit_len + row.noisy_len
        kinds.add(row.noisy_len)
        whole = maker.tokenizer.encode(prompt_text(example) + answer_text(example), add_special_tokens=False).ids
        whole.append(maker.end)
        restored = [t if i == maker.mask else i for i, t in zip(row.ids, row.targets, strict=True)]
        assert restored[: len(whole)] == whole[: len(restored)]
        for position in range(row.commit_len, len(row.ids)):
            assert (row.targets[position] != IGNORE) == (row.ids[position] == maker.mask)
    assert kinds == {0, 32}


def test_the_dense_mixture_of_training_equals_the_reference() -> None:
    g = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g) * shape[-1] ** -0.5

    x, shared = weight(2, 9, 32), (weight(12, 32), weight(12, 32), weight(32, 12), weight(1, 32))
    banks = weight(8, 32), weight(8, 20, 32), weight(8, 32, 10)
    rows = Lengths(*(torch.tensor(v, dtype=torch.int32) for v in ([0, 0], [4, 9], [5, 0])))
    mass = torch.tensor([0.5, 1.0])
    expected, _ = expert_subset_moe(x, *banks, shared, rows, mass, 3)
    found, _ = Balance().expert_subset_moe(x, *banks, shared, rows, mass, 3)
    assert torch.allclose(found, expected, atol=1e-5)


def train(out: Path, *arguments: str) -> None:
    command = [
        sys.executable,
        "tools/train_tiny.py",
        "--out",
        str(out),
        "--steps",
        "12",
        "--rows",
        "2",
        "--threads",
        "1",
        *arguments,
    ]
    subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "tools:."}, check=True, capture_output=True)


def test_training_resumes_exactly(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    train(tmp_path / "parts", "--stop-after", "5")
    train(tmp_path / "parts")
    whole, parts = (load_file(tmp_path / name / "state.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert (tmp_path / "whole" / "checkpoint" / "model.safetensors").exists()


def test_the_shipped_tokenizer_and_config_are_what_the_tools_make() -> None:
    folder = checkpoint_folder("clover-tiny")
    shipped = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert shipped.get_vocab() == build_tokenizer().get_vocab()
    config = json.loads((folder / "config.json").read_text())
    assert config["mask_token_id"] == shipped.token_to_id("<|mask|>")
    assert config["hidden_size"] == tiny_config(config["vocab_size"], config["mask_token_id"]).hidden_size


def test_the_shipped_model_answers_held_out_prompts(tiny_engine: EnginePackage) -> None:
    command = [
        sys.executable,
        "tools/eval_tiny.py",
        "--engine",
        str(tiny_engine.folder),
        "--seed",
        "11",
        "--count",
        "120",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "tools:."}, check=True, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["exact_match"] >= 0.92  # docs/clover-tiny.md: 0.968 over 500 prompts
    assert report["tpf_mean"] >= 8.0  # 12.2


def test_fp8_weights_cost_the_shipped_model_next_to_nothing(tiny_engine: EnginePackage, tmp_path: Path) -> None:
    """Exact match within a point and TPF within 3 % (docs/quantization.md); 200 prompts here, so a point is two answers."""
    quantize_checkpoint(Checkpoint("clover-tiny"), tmp_path / "fp8")
    build(Checkpoint(tmp_path / "fp8"), tmp_path / "engine")
    prompts = take("fp8", "held_out", 200)
    exact, quantized = (
        figures(score(Generator(str(folder), slots=16), prompts, 0.95, True))
        for folder in (tiny_engine.folder, tmp_path / "engine")
    )
    assert quantized["exact_match"] >= exact["exact_match"] - 0.01
    assert abs(quantized["tpf_mean"] / exact["tpf_mean"] - 1) < 0.03
