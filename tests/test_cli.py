"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clover_trt.checkpoint.reader import Checkpoint, checkpoint_folder
from clover_trt.engine.package import EnginePackage, sha256_of
from clover_trt.model.load import load_model
from clover_trt.parity.torch_session import TorchSession
from clover_trt.runtime.scoring import commit_logits
from tests.small import random_state, write_checkpoint

COMMANDS = ("build", "generate", "inspect", "logits", "verify", "doctor")


def cli(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clover_trt.cli", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3, done.stderr
    for part in parts:
        assert part in done.stderr


def test_the_surface_is_frozen_and_each_help_has_an_example() -> None:
    overview = cli("--help").stdout
    for command in COMMANDS:
        assert command in overview
        assert f"Example: clover-trt {command}" in " ".join(cli(command, "--help").stdout.split())


def test_generate_prints_an_answer_and_its_figures(tiny_engine: EnginePackage) -> None:
    done = cli("generate", "--engine", tiny_engine.folder, "--prompt", 'Write "abc" in capitals.')
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ABC\n")
    assert "TPF" in done.stdout


def test_generate_json_has_the_figures(tiny_engine: EnginePackage) -> None:
    done = cli("generate", "--engine", tiny_engine.folder, "-", "--json", "--enable-thinking", stdin=b"What is 12 + 30?")
    result = json.loads(done.stdout)
    assert {"text", "token_ids", "forwards", "tpf", "seconds_to_first_block", "tokens_per_second", "finish_reason"} <= set(result)
    assert "</think>" in result["text"]


def test_generate_takes_a_chat_file_and_shows_passes(tiny_engine: EnginePackage, tmp_path: Path) -> None:
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": 'Write "abc" in capitals.'}]}))
    done = cli("generate", "--engine", tiny_engine.folder, "--chat", chat, "--show-passes")
    assert "pass 1" in done.stdout
    assert "ABC" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompt", "x", "--threshold", "1.5"], "threshold"),
        (["--prompt", "x", "--block-size", "64"], "block_size = 64"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "-"], "exactly one of"),
        ([], "exactly one of"),
        (["--prompt", "x", "--max-new-tokens", "100000"], "the limit is 4096"),
        (["--chat", "/nowhere.json"], "/nowhere.json"),
        (["stray"], "unexpected argument"),
    ],
)
def test_generate_refuses_bad_input(tiny_engine: EnginePackage, arguments: list[str], part: str) -> None:
    refused(cli("generate", "--engine", tiny_engine.folder, *arguments), part)


def test_invalid_utf8_on_standard_input_is_refused(tiny_engine: EnginePackage) -> None:
    refused(cli("generate", "--engine", tiny_engine.folder, "-", stdin=b"a\xff"), "not valid Unicode")


def test_build_verify_inspect_and_logits(tmp_path: Path, small_folder: Path) -> None:
    engine = tmp_path / "engine"
    built = cli("build", "--checkpoint", small_folder, "--out", engine, "--json")
    assert json.loads(built.stdout)["build"]["precision"] == "float32"
    recorded = cli("verify", "--engine", engine, "--json")
    assert (recorded.returncode, json.loads(recorded.stdout)["passed"]) == (0, True)
    verified = cli("verify", "--engine", engine, "--checkpoint", small_folder)
    assert verified.returncode == 0, verified
    assert "logits" in verified.stdout
    assert json.loads(cli("inspect", engine, "--json").stdout)["geometry"]["num_experts"] == 16
    assert "parameters" in cli("inspect", small_folder).stdout
    ids = [3, 9, 60, 7]
    for source in (["--engine", engine], ["--checkpoint", small_folder]):
        done = cli("logits", *source, "--ids", "3,9,60,7", "--out", tmp_path / "logits.npy")
        assert done.returncode == 0, done.stderr
        expected = commit_logits(TorchSession(load_model(Checkpoint(small_folder))), ids)
        np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, atol=1e-4)


def test_verify_exits_with_1_when_the_engine_computes_something_else(
    small_engine: EnginePackage, small_folder: Path, tmp_path: Path
) -> None:
    engine = Path(shutil.copytree(small_engine.folder, tmp_path / "engine"))
    experts = load_file(engine / "experts.safetensors")
    experts["experts.2.down"] = experts["experts.2.down"] * np.float32(1.02)
    save_file(experts, engine / "experts.safetensors")
    manifest = json.loads((engine / "manifest.json").read_text())
    manifest["files"]["experts.safetensors"] = sha256_of(engine / "experts.safetensors")
    (engine / "manifest.json").write_text(json.dumps(manifest))
    done = cli("verify", "--engine", engine, "--checkpoint", small_folder)
    assert done.returncode == 1
    assert "DIFFERS" in done.stdout
    checks = {
        c["name"]: c["passed"]
        for c in json.loads(cli("verify", "--engine", engine, "--checkpoint", small_folder, "--json").stdout)["checks"]
    }
    assert [checks[f"hidden.{i}"] for i in range(5)] == [True, True, True, False, False], "the first layer that is off is named"


def test_what_cannot_be_verified_or_built_is_refused(tmp_path: Path, small_folder: Path) -> None:
    refused(cli("verify", "--engine", small_folder, "--checkpoint", small_folder), "no manifest.json")
    state = random_state()
    del state["model.norm.weight"]
    other = write_checkpoint(tmp_path / "c", state)
    refused(cli("build", "--checkpoint", other, "--out", tmp_path / "e"), "missing", "model.norm.weight")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["build", "--checkpoint", "/nowhere", "--out", "/tmp/never"], "/nowhere: not a folder"),
        (["build", "--gpu", "h900", "--checkpoint", "clover-tiny", "--out", "/tmp/never"], "unknown target"),
        (["build", "--precision", "bfloat16", "--checkpoint", "clover-tiny", "--out", "/tmp/never"], "no bfloat16"),
        (["inspect", "/nowhere"], "/nowhere"),
        (["logits", "--checkpoint", "clover-tiny", "--ids", "1,x", "--out", "/tmp/never"], "--ids"),
        (["logits", "--checkpoint", "clover-tiny", "--ids", "99999", "--out", "/tmp/never"], "outside the vocabulary"),
        (["logits", "--ids", "1", "--out", "/tmp/never"], "exactly one of"),
        (["logits", "--checkpoint", "clover-tiny", "--ids", "1", "--out", "/nowhere/x.npy"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], part: str) -> None:
    refused(cli(*arguments), part)
    assert not Path("/tmp/never").exists()


def test_doctor_names_every_part() -> None:
    findings = json.loads(cli("doctor", "--json").stdout)
    parts = {finding["part"] for finding in findings}
    assert {"GPU", "TensorRT", "TensorRT-RTX", "nvcc", "Triton Inference Server"} <= parts
    assert all(finding["present"] or finding["next_step"] for finding in findings)


def test_doctor_shows_square_brackets_of_an_extra() -> None:
    assert "clover-trt[serve]" in cli("doctor").stdout or "tritonclient" in cli("doctor").stdout


def test_version() -> None:
    assert cli("--version").stdout.strip() == "0.1.0"


def test_the_shipped_model_is_small_and_complete() -> None:
    folder = checkpoint_folder("clover-tiny")
    assert (folder / "model.safetensors").stat().st_size <= 6_000_000
    names = {path.name for path in folder.iterdir()}
    expected = {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "LICENSE", "ATTRIBUTIONS.md",
    }  # fmt: skip
    assert expected <= names
