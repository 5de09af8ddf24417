"""What the server adds: the mid-size model through Triton against the same engine in this process, in turn.

python -m clover_trt.bench.serve_cost --out out/bench
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from clover_trt.bench.midsize import build_midsize
from clover_trt.runtime.generate import Generator
from clover_trt.serving.client import AsyncClient, Client
from clover_trt.serving.options import ServeOptions
from clover_trt.serving.supervisor import Supervisor

IN_FLIGHT, PROMPT, RESPONSE = 8, 64, 64
SETTINGS: dict[str, Any] = {"ignore_eos": True, "rule": "tokens_per_pass"}
console = Console(stderr=True)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Random prompts, none twice."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 500, PROMPT).tolist() for _ in range(count)]


def in_process(generator: Generator, asked: list[list[int]]) -> float:
    """Tokens a second of all requests without a server."""
    began = time.perf_counter()
    results = generator.generate([generator.sequence(ids, max_new_tokens=RESPONSE, **SETTINGS) for ids in asked])
    tokens = sum(len(result.token_ids) for result in results)
    return tokens / (time.perf_counter() - began)


def through_server(url: str, asked: list[list[int]]) -> float:
    """Tokens a second of all requests at once."""

    async def run() -> float:
        async with AsyncClient(url) as client:
            began = time.perf_counter()
            answers = await asyncio.gather(*(client.generate(ids, max_tokens=RESPONSE, **SETTINGS) for ids in asked))
            return sum(answer.output_tokens for answer in answers) / (time.perf_counter() - began)

    return asyncio.run(run())


def first_block(client: Client, ids: list[int]) -> float:
    """Seconds until a client has the first block of its answer."""
    began = time.perf_counter()
    stream = client.stream(ids, max_tokens=RESPONSE, show_passes=True, **SETTINGS)
    seconds = next(time.perf_counter() - began for piece in stream if piece.time_to_first_block)
    stream.close()  # type: ignore[attr-defined]
    return seconds


def first_block_in_process(generator: Generator, ids: list[int]) -> float:
    """The same without a server."""
    began = time.perf_counter()
    for event in generator.passes([generator.sequence(ids, max_new_tokens=RESPONSE, **SETTINGS)]):
        if event.request.first_block is not None:
            return time.perf_counter() - began
    raise AssertionError("an answer has a first block")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens at."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main(
    out: Annotated[Path, typer.Option(help="Folder of serve_cost.json.")] = Path("out/bench"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of eight requests each way, in turn.")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine, each way.")] = 2,
) -> None:
    """Measure and write the report."""
    with tempfile.TemporaryDirectory() as scratch, console.status("making the mid-size model") as status:
        engine = build_midsize(Path(scratch), status.update, max_seq_len=1024, with_tokenizer=True).folder
        generator = Generator(str(engine), slots=IN_FLIGHT, threads=threads)
        ports = dict(zip(("http_port", "grpc_port", "metrics_port", "health_port"), free_ports(4), strict=True))
        given = {"engine": engine, "slots": IN_FLIGHT, "threads": threads, "prefix_cache_mb": 0}
        options = ServeOptions.read(None, {**given, **ports})
        supervisor = Supervisor(options, status.update)
        thread = threading.Thread(target=supervisor.run)
        thread.start()
        try:
            while not supervisor.ready:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.1)
            url = f"127.0.0.1:{options.grpc_port}"
            ratios, added, rates = [], [], []
            with Client(url) as client:
                for number in range(-1, rounds):  # the first warms up
                    status.update(f"round {number + 1}/{rounds}")
                    asked = prompts(2 * IN_FLIGHT, number + 1)
                    alone = in_process(generator, asked)
                    served = through_server(url, asked)
                    singles = prompts(4, 1000 + number)
                    pairs = [(first_block(client, ids), first_block_in_process(generator, ids)) for ids in singles]
                    if number >= 0:
                        ratios.append(served / alone)
                        rates.append((served, alone))
                        added += [with_server - without for with_server, without in pairs]
        finally:
            supervisor.stop()
            thread.join()
    result = {
        "threads": threads,
        "in_flight": IN_FLIGHT,
        "tokens_per_second_served": statistics.median(served for served, _ in rates),
        "tokens_per_second_in_process": statistics.median(alone for _, alone in rates),
        "served_over_in_process": statistics.median(ratios),
        "added_first_block_ms": 1e3 * statistics.median(added),
        "rounds": rounds,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "serve_cost.json").write_text(json.dumps(result, indent=2) + "\n")
    for name, value in result.items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    typer.run(main)
