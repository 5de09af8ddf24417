"""Many short requests with random arrivals and cancellations: every answer as when asked alone, memory flat.

Prompts come from the held-out tasks; some are second turns of a conversation, so that prefix reuse takes part. The reference
answer of each prompt is decoded first, alone and without reuse.

    python tools/soak.py --engine build/engines/tiny --count 10000
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.progress import Progress
from tiny.tasks import examples

from clover_trt.runtime.generate import Generator
from clover_trt.runtime.prefix_cache import PrefixCache
from clover_trt.runtime.request import Request
from clover_trt.runtime.scheduler import Scheduler

console = Console(stderr=True)


def conversations(count: int, seed: int) -> list[list[dict[str, Any]]]:
    """Prompts, every third one a second turn."""
    found = []
    for i, example in enumerate(itertools.islice(examples(f"soak {seed}", "held_out"), 2 * count)):
        message = {"role": "user", "content": example.prompt}
        if len(found) < count:
            earlier = found[-1] if found and i % 3 == 2 else None
            found.append([*earlier, {"role": "assistant", "content": "Done."}, message] if earlier else [message])
    return found


def main(
    engine: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Engine package.")],
    count: Annotated[int, typer.Option(min=100, help="Requests.")] = 10_000,
    prompts: Annotated[int, typer.Option(min=10, help="Distinct prompts.")] = 300,
    slots: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    cancelled: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that are cancelled at a random pass.")] = 0.2,
    cache_mb: Annotated[int, typer.Option(help="Budget of the prefix cache; small, so that it evicts.")] = 16,
    seed: Annotated[int, typer.Option(help="Of prompts, arrivals and cancellations.")] = 0,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the soak; exit code 1 when an answer differs or memory grows by 2 % over the second half."""
    rng, process = random.Random(seed), psutil.Process()
    alone = Generator(str(engine))
    chats = conversations(prompts, seed)

    def ask(generator: Generator, number: int) -> Any:
        return generator.chat(chats[number], max_new_tokens=96, threshold=0.95)

    with Progress(console=console, disable=json_out) as progress:
        task = progress.add_task("answers alone", total=prompts)
        expected = []
        for number in range(prompts):
            expected.append(alone.run_one(ask(alone, number)).token_ids)
            progress.advance(task)
        cache = PrefixCache(cache_mb << 20)
        together = Generator(alone.package, slots=slots, prefix_cache=cache)
        scheduler = Scheduler(together.session, max_queue=4 * slots, prefix_cache=cache)
        task = progress.add_task("soak", total=count)
        running: dict[Request, int] = {}
        doomed: dict[Request, int] = {}  # request to the pass at which it is cancelled
        asked = done = ended_early = wrong = passes = 0
        memory: list[int] = []
        while done < count:
            while asked < count and scheduler.waiting < 2 * slots and rng.random() < 0.6:
                number = rng.randrange(prompts)
                request = Request(ask(together, number), together.codec)
                scheduler.add(request)
                running[request] = number
                if rng.random() < cancelled:
                    doomed[request] = passes + rng.randint(1, 5)
                asked += 1
            for request in [r for r, at in doomed.items() if at <= passes]:
                scheduler.cancel(request)
                del doomed[request]
            for event in scheduler.step():
                if event.finish_reason is None:
                    continue
                number = running.pop(event.request)
                doomed.pop(event.request, None)
                tokens = event.request.result().token_ids
                early = event.finish_reason == "cancelled"
                wrong += (expected[number][: len(tokens)] if early else expected[number]) != tokens
                ended_early += early
                done += 1
                progress.advance(task)
                if done % (count // 100) == 0:
                    memory.append(process.memory_info().rss)
            passes += 1
    half, last = memory[len(memory) // 2], max(memory[-5:])
    report = {
        "requests": count,
        "passes": passes,
        "cancelled": ended_early,
        "wrong": wrong,
        "resident_mb_half": half >> 20,
        "resident_mb_end": last >> 20,
        "growth_second_half": last / half - 1,
        "prefix_cache": vars(cache.statistics),
    }
    print(json.dumps(report) if json_out else "\n".join(f"{key}: {value}" for key, value in report.items()))
    if wrong or last > 1.02 * half:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
