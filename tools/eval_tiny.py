"""Evaluate an engine of clover-tiny on held-out prompts with checkable answers.

python tools/eval_tiny.py --engine build/engines/tiny --seed 7 --count 500 --json
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tiny.tasks import Example, examples
from tiny.training import answer_text

from clover_trt.runtime.generate import Generator
from clover_trt.runtime.request import Result

Scored = tuple[Example, Result, bool]


def score(generator: Generator, prompts: list[Example], threshold: float, quiet: bool) -> list[Scored]:
    """Decode every prompt and compare the whole answer."""
    sequences = [
        generator.chat(
            [{"role": "user", "content": example.prompt}],
            enable_thinking=example.thinking is not None,
            max_new_tokens=128,
            threshold=threshold,
        )
        for example in prompts
    ]
    with Progress(console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("decoding", total=len(prompts))
        results = generator.generate(sequences, lambda event: progress.advance(task, event.finish_reason is not None))
    return [(example, result, result.text == answer_text(example)) for example, result in zip(prompts, results, strict=True)]


def figures(scored: list[Scored]) -> dict[str, float | int]:
    """Exact match and tokens per forward of a set of answers; forwards include prefill and commits."""
    results = [result for _, result, _ in scored]
    tokens, forwards = sum(len(r.token_ids) for r in results), sum(r.forwards for r in results)
    return {
        "count": len(scored),
        "exact_match": sum(right for *_, right in scored) / len(scored),
        "tpf_mean": statistics.mean(r.tpf for r in results),
        "tpf_aggregate": tokens / forwards,
        "tokens": tokens,
        "forwards": forwards,
    }


def main(
    engine: Annotated[Path, typer.Option(help="Engine package.")],
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 7,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 500,
    threshold: Annotated[float, typer.Option(help="Confidence threshold.")] = 0.95,
    slots: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 16,
    show_wrong: Annotated[int, typer.Option(help="Print this many wrong answers.")] = 0,
    write: Annotated[Path | None, typer.Option(help="Only write the prompts here, for 'clover-trt sweep'.")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Decode held-out prompts and report exact match and tokens per forward, in all and by task."""
    prompts = list(itertools.islice(examples(f"eval {seed}", "held_out"), count))
    if write is not None:
        lines = [{"prompt": e.prompt, "answer": answer_text(e), "enable_thinking": e.thinking is not None} for e in prompts]
        write.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return
    scored = score(Generator(str(engine), slots=min(slots, count)), prompts, threshold, json_out)
    by_task: dict[str, list[Scored]] = defaultdict(list)
    for item in scored:
        by_task[item[0].task + (", thinking" if item[0].thinking is not None else "")].append(item)
    report = {"engine": str(engine), "seed": seed, "threshold": threshold, **figures(scored)}
    tasks = {task: figures(items) for task, items in sorted(by_task.items())}
    if json_out:
        print(json.dumps({**report, "tasks": tasks}))
        return
    table = Table("task", "prompts", "exact match", "TPF, mean", "TPF, aggregate")
    for task, row in [*tasks.items(), ("all", figures(scored))]:
        table.add_row(
            task, str(row["count"]), f"{row['exact_match']:.1%}", f"{row['tpf_mean']:.2f}", f"{row['tpf_aggregate']:.2f}"
        )
    Console().print(table)
    for example, result, _right in [item for item in scored if not item[2]][:show_wrong]:
        print(f"{example.prompt!r}: expected {answer_text(example)!r}, found {result.text!r}")


if __name__ == "__main__":
    typer.run(main)
