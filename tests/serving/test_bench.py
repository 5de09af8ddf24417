"""`clover-trt bench serve`: the loops, the figures, and the command against the real server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clover_trt.bench.serve import Outcome, closed_loop, figures, open_loop, read_dataset
from clover_trt.errors import RequestError
from tests.serving.conftest import Served


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    running, most, asked = 0, 0, []

    async def ask(number: int) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        asked.append(number)
        await asyncio.sleep(0.002)
        running -= 1
        return Outcome(seconds=0.002)

    outcomes = asyncio.run(closed_loop(ask, 20, 3))
    assert (len(outcomes), most, sorted(asked)) == (20, 3, list(range(20)))


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """No answer comes before the last request was sent."""

    async def run() -> list[Outcome]:
        last_sent = asyncio.Event()

        async def ask(number: int) -> Outcome:
            if number == 29:
                last_sent.set()
            await last_sent.wait()
            return Outcome(seconds=0.1)

        return await asyncio.wait_for(open_loop(ask, 30, rate=500.0, seed=0), 60)

    assert len(asyncio.run(run())) == 30


def test_figures_are_those_of_the_outcomes() -> None:
    good = [
        Outcome(seconds=s, time_to_first_block=s / 2, inter_block=[0.1], output_tokens=10, forwards=4) for s in (1.0, 2.0, 3.0)
    ]
    load = figures("concurrency 2", [*good, Outcome(seconds=0.1, error="UNAVAILABLE")], seconds=5.0)
    assert (load.requests, load.errors) == (4, {"UNAVAILABLE": 1})
    assert (load.tokens_per_second, load.requests_per_second, load.tpf) == (6.0, 0.6, 2.5)
    assert load.end_to_end["p50"] == 2.0
    assert load.time_to_first_block["p50"] == 1.0
    assert load.tokens_per_second_per_request["p50"] == 5.0
    assert figures("rate 1", [], 1.0).end_to_end == {}


def test_datasets(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    assert [each[0]["content"] for each in read_dataset(file, 0)] == ["a", "b"]
    assert len(read_dataset(None, 0)) > 30
    for content, message in (
        ("{", "line 1: expected an object"),
        ("[]", "found list"),
        ("{}", "expected .*'messages'"),
        ("", "no prompts"),
    ):
        file.write_text(content)
        with pytest.raises(RequestError, match=message):
            read_dataset(file, 0)
    with pytest.raises(RequestError, match="cannot be read"):
        read_dataset(tmp_path / "none", 0)


WIDE = {**os.environ, "COLUMNS": "200"}


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "clover_trt.cli", "bench", "serve", *options], capture_output=True, text=True)


def test_the_command_measures_a_server_and_draws(served: Served, tmp_path: Path) -> None:
    common = ("--url", served.grpc, "--concurrency", "1,4", "--rates", "30", "--requests", "12")
    done = bench(*common, "--out", str(tmp_path / "load"), "--json")
    assert done.returncode == 0, done.stderr
    loads = json.loads(done.stdout)
    assert [load["load"] for load in loads] == ["concurrency 1", "concurrency 4", "rate 30"]
    for load in loads:
        assert (load["requests"], load["errors"]) == (12, {})
        assert load["tpf"] > 1
        assert 0 < load["time_to_first_block"]["p50"] <= load["end_to_end"]["p50"]
    assert json.loads((tmp_path / "load" / "serve.json").read_text())["loads"] == loads
    assert (tmp_path / "load" / "serve.png").read_bytes()[:4] == b"\x89PNG"
    table = subprocess.run(
        [sys.executable, "-m", "clover_trt.cli", "bench", "serve", *common], capture_output=True, text=True, env=WIDE
    )
    assert "concurrency 4" in table.stdout


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    for options, message in (
        (("--concurrency", "a"), "expected numbers separated by commas"),
        (("--concurrency", "0"), "expected numbers above 0"),
        (("--concurrency", ""), "with at least one number"),
        (("--dataset", str(tmp_path / "none")), "cannot be read"),
        (("--url", "127.0.0.1:9"), "failed to connect"),
    ):
        done = bench(*options)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert "Traceback" not in done.stderr
