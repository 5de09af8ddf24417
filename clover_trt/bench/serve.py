"""Load on a server: requests one after another by so many clients, or at random times; what each client saw."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from clover_trt.bench.json_lines import read_objects
from clover_trt.errors import RequestError
from clover_trt.serving.client import AsyncClient, ServingError

PERCENTILES = (50, 95, 99)
Message = list[dict[str, str]]


@dataclass
class Outcome:
    """One request as its client saw it; times in seconds from sending."""

    seconds: float = 0.0
    time_to_first_block: float | None = None
    inter_block: list[float] = field(default_factory=list)  # between pieces with new tokens
    output_tokens: int = 0
    forwards: int = 0
    error: str | None = None


@dataclass
class Load:
    """Figures of one load."""

    load: str  # "concurrency 4", or "rate 2"
    requests: int
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    tokens_per_second: float  # of all together
    tokens_per_second_per_request: dict[str, float]
    time_to_first_block: dict[str, float]
    inter_block: dict[str, float]
    end_to_end: dict[str, float]
    tpf: float  # all tokens over all forwards


def read_dataset(path: Path | None, seed: int) -> list[Message]:
    """Conversations of a JSON-lines file, each line with `prompt` or `messages`; short sums and words without a file.

    Raises:
        RequestError: the file can't be read, or a line has neither.
    """
    if path is None:
        rng = random.Random(seed)
        words = ["stone", "river", "cloud", "green", "house", "apple", "train", "light"]
        texts = [f"What is {rng.randint(1, 40)} + {rng.randint(1, 40)}?" for _ in range(32)]
        texts += [f'Reverse "{word}".' for word in words] + [
            f"Switch off the kitchen {word}." for word in ("lamp", "heater", "television")
        ]
        return [[{"role": "user", "content": text}] for text in texts]
    expected, found = "an object with 'prompt' or 'messages'", []
    for where, data in read_objects(path, expected):
        if not ("messages" in data or isinstance(data.get("prompt"), str)):
            raise RequestError(f"{where}: expected {expected}")
        found.append(data.get("messages") or [{"role": "user", "content": data["prompt"]}])
    return found


async def ask(client: AsyncClient, messages: Message, settings: dict[str, Any]) -> Outcome:
    """One streamed request."""
    outcome, began = Outcome(), time.perf_counter()
    last, known = began, 0
    try:
        async for piece in client.stream(messages=messages, **settings):
            now = time.perf_counter()
            if piece.output_tokens > known:
                if outcome.time_to_first_block is None:
                    outcome.time_to_first_block = now - began
                else:
                    outcome.inter_block.append(now - last)
                last, known = now, piece.output_tokens
            outcome.output_tokens, outcome.forwards = piece.output_tokens, piece.forwards
    except ServingError as error:
        outcome.error = error.code
    outcome.seconds = time.perf_counter() - began
    return outcome


Ask = Callable[[int], Awaitable[Outcome]]


async def closed_loop(ask_one: Ask, count: int, concurrency: int) -> list[Outcome]:
    """`concurrency` clients, each sending its next request when the last one is answered."""
    numbers = iter(range(count))

    async def client() -> list[Outcome]:
        return [await ask_one(number) for number in numbers]

    return [outcome for found in await asyncio.gather(*(client() for _ in range(concurrency))) for outcome in found]


async def open_loop(ask_one: Ask, count: int, rate: float, seed: int) -> list[Outcome]:
    """Requests sent at the times of a Poisson process of `rate` a second, whether or not earlier ones are answered."""
    rng, tasks = random.Random(seed), []
    due = time.perf_counter()
    for number in range(count):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.ensure_future(ask_one(number)))
        due += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, p95 and p99; empty for no values."""
    if not values:
        return {}
    return dict(zip((f"p{p}" for p in PERCENTILES), map(float, np.percentile(values, PERCENTILES)), strict=True))


def figures(load: str, outcomes: list[Outcome], seconds: float) -> Load:
    """What a load came to."""
    good = [each for each in outcomes if each.error is None]
    tokens, forwards = sum(each.output_tokens for each in good), sum(each.forwards for each in good)
    return Load(
        load=load,
        requests=len(outcomes),
        errors=dict(Counter(each.error for each in outcomes if each.error is not None)),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        tokens_per_second=tokens / seconds,
        tokens_per_second_per_request=percentiles([each.output_tokens / each.seconds for each in good]),
        time_to_first_block=percentiles([each.time_to_first_block for each in good if each.time_to_first_block is not None]),
        inter_block=percentiles([gap for each in good for gap in each.inter_block]),
        end_to_end=percentiles([each.seconds for each in good]),
        tpf=tokens / forwards if forwards else 0.0,
    )


async def measure(
    url: str,
    dataset: list[Message],
    count: int,
    settings: dict[str, Any],
    *,
    concurrency: list[int],
    rates: list[float],
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Load]:
    """Run every load against the server at `url`, one after another, after one request to warm up.

    Args:
        url: HOST:PORT of Triton's gRPC endpoint.
        dataset: conversations, taken in turn.
        count: requests of each load.
        settings: inputs of the model.
        concurrency: closed loops.
        rates: open loops, requests a second.
        seed: of arrival times.
        progress: called with a line before each load.

    Raises:
        ServingError: the server does not answer the first request.
    """
    loads = []
    async with AsyncClient(url, retries=0) as client:
        await client.generate(messages=dataset[0], **settings)

        async def one(number: int) -> Outcome:
            return await ask(client, dataset[number % len(dataset)], settings)

        plans: list[tuple[str, Callable[[], Awaitable[list[Outcome]]]]] = []
        plans += [(f"concurrency {n}", lambda n=n: closed_loop(one, count, n)) for n in concurrency]  # type: ignore[misc]
        plans += [(f"rate {r:g}", lambda r=r: open_loop(one, count, r, seed)) for r in rates]  # type: ignore[misc]
        for name, run in plans:
            progress(name)
            began = time.perf_counter()
            outcomes = await run()
            loads.append(figures(name, outcomes, time.perf_counter() - began))
    return loads


def write_report(folder: Path, loads: list[Load], about: dict[str, Any]) -> None:
    """`serve.json` and `serve.png` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serve.json").write_text(json.dumps({**about, "loads": [asdict(load) for load in loads]}, indent=2) + "\n")
    from matplotlib.figure import Figure

    names = [load.load for load in loads]
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    axes[0].bar(names, [load.tokens_per_second for load in loads])
    axes[0].set_title("tokens/s, all requests")
    for axis, kind in zip(axes[1:], ("time_to_first_block", "end_to_end"), strict=True):
        for p in PERCENTILES:
            axis.plot(names, [1e3 * getattr(load, kind).get(f"p{p}", float("nan")) for load in loads], marker="o", label=f"p{p}")
        axis.set(title=f"{kind.replace('_', ' ')}, ms", ylim=(0, None))
        axis.legend()
    for axis in axes:
        axis.tick_params(axis="x", rotation=30)
        axis.grid(alpha=0.3)
    figure.savefig(folder / "serve.png", dpi=110)
