"""Many streams on a running server, cancellations and bad requests among them: every answer right, memory flat, nobody hangs.

clover-trt serve --engine build/engines/tiny --max-queue 128 &
python tools/serve_soak.py --engine build/engines/tiny --url localhost:8001 --minutes 10
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.progress import Progress
from tiny.tasks import examples

from clover_trt.runtime.generate import Generator
from clover_trt.serving.client import AsyncClient, ServingError

console = Console(stderr=True)
BAD: list[dict[str, Any]] = [
    {"prompt": "x", "threshold": 7.0},
    {"prompt": ""},
    {"prompt": [10**6]},
    {"messages": "not json"},
    {"prompt": "word " * 5000},
    {"prompt": "x", "sampling_parameters": {"nonsense": 1}},
    {},
]
LONGEST = 120.0  # seconds after which a request counts as hung


async def one(client: AsyncClient, rng: random.Random, prompts: list[str], expected: list[str], counts: Counter[str]) -> None:
    """One request of some kind."""
    draw, number = rng.random(), rng.randrange(len(prompts))
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompts[number]}], "max_tokens": 96}
    try:
        if draw < 0.1:
            bad = dict(rng.choice(BAD))
            await client.generate(bad.pop("prompt", None), **bad)
            counts["bad request taken"] += 1
        elif draw < 0.3:
            stream = client.stream(**asked, ignore_eos=True, threshold=1.0)
            for _ in range(rng.randint(0, 3)):
                await anext(stream, None)
            await stream.aclose()  # type: ignore[attr-defined]
            counts["cancelled"] += 1
        elif draw < 0.65:
            answer = await client.generate(**asked)
            counts["right" if answer.text == expected[number] else "WRONG"] += 1
        else:
            text = "".join([piece.text async for piece in client.stream(**asked)])
            counts["right" if text == expected[number] else "WRONG"] += 1
    except ServingError as error:
        counts["refused, bad" if draw < 0.1 and error.code == "INVALID_ARGUMENT" else f"error {error.code}"] += 1


def server_memory(port: int) -> int:
    """Resident bytes of the server that listens at a port, and of its model processes."""
    for each in psutil.net_connections("tcp"):
        if each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN and each.pid:
            process = psutil.Process(each.pid)
            return sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
    raise typer.BadParameter(f"nobody listens at port {port} of this machine")


def main(
    engine: Annotated[Path, typer.Option(exists=True, file_okay=False, help="The engine that is served, for reference answers.")],
    url: Annotated[str, typer.Option(help="HOST:PORT of Triton's gRPC endpoint, on this machine.")] = "localhost:8001",
    streams: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 64,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 10.0,
    prompts: Annotated[int, typer.Option(min=10, help="Distinct prompts.")] = 200,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the soak; exit code 1 when an answer is wrong, a request hangs or is lost, or memory grows by 2 % in the last half."""
    rng = random.Random(seed)
    texts = [example.prompt for example in itertools.islice(examples(f"serve soak {seed}", "held_out"), prompts)]
    counts: Counter[str] = Counter()
    memory: list[tuple[float, int]] = []
    port = int(url.rsplit(":", 1)[1])
    with Progress(console=console, disable=json_out) as progress:
        task = progress.add_task("answers alone", total=prompts)
        alone, expected = Generator(str(engine)), []
        for text in texts:
            expected.append(alone.run_one(alone.chat([{"role": "user", "content": text}], max_new_tokens=96)).text)
            progress.advance(task)
        task = progress.add_task(f"{streams} streams", total=60 * minutes)
        began = time.monotonic()

        async def client_loop(client: AsyncClient) -> None:
            while time.monotonic() - began < 60 * minutes:
                try:
                    await asyncio.wait_for(one(client, rng, texts, expected, counts), LONGEST)
                except TimeoutError:
                    counts["HUNG"] += 1

        async def watch() -> None:
            while time.monotonic() - began < 60 * minutes:
                memory.append((time.monotonic() - began, server_memory(port)))
                progress.update(task, completed=time.monotonic() - began)
                await asyncio.sleep(2)

        async def run() -> None:
            async with AsyncClient(url) as client:
                await asyncio.gather(watch(), *(client_loop(client) for _ in range(streams)))

        asyncio.run(run())
    half = [size for at, size in memory if at >= 30 * minutes]
    quarter = len(half) // 2
    first, last = sum(half[:quarter]) / max(1, quarter), sum(half[quarter:]) / max(1, len(half) - quarter)
    report = {
        "minutes": minutes,
        "streams": streams,
        "requests": sum(counts.values()),
        **dict(sorted(counts.items())),
        "resident_mb_third_quarter": int(first) >> 20,
        "resident_mb_last_quarter": int(last) >> 20,
        "growth_last_half": last / first - 1,
    }
    print(json.dumps(report) if json_out else "\n".join(f"{key}: {value}" for key, value in report.items()))
    bad = (
        counts["WRONG"]
        + counts["HUNG"]
        + counts["bad request taken"]
        + sum(n for k, n in counts.items() if k.startswith("error"))
    )
    if bad or last > 1.02 * first:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
