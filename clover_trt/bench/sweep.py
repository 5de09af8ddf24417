"""Exact match against speed over thresholds, unmasking rules and expert-subset masses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clover_trt.bench.json_lines import read_objects
from clover_trt.errors import RequestError
from clover_trt.runtime.generate import Generator
from clover_trt.runtime.unmask import find_rule


@dataclass(frozen=True)
class Prompt:
    """A user message, the only answer that counts as right, and whether the model is to think."""

    prompt: str
    answer: str
    enable_thinking: bool = False


@dataclass(frozen=True)
class Point:
    """What one setting gave. TPF is all generated tokens over all forwards; `distinct_experts` is the mean per layer."""

    rule: str
    threshold: float
    expert_subset_mass: float
    exact_match: float
    tpf: float
    distinct_experts: float


def read_prompts(path: Path) -> list[Prompt]:
    """Read a JSON-lines file of `{"prompt": ..., "answer": ..., "enable_thinking": false}`.

    Raises:
        RequestError: with the line that is wrong.
    """
    expected, prompts = '{"prompt": text, "answer": text}', []
    for where, data in read_objects(path, expected):
        try:
            prompts.append(Prompt(**data))
        except TypeError as error:
            raise RequestError(f"{where}: expected {expected}; {error}") from None
    return prompts


def sweep(
    generator: Generator,
    prompts: Sequence[Prompt],
    rules: Sequence[str],
    thresholds: Sequence[float],
    masses: Sequence[float],
    progress: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> list[Point]:
    """Decode every prompt under every combination.

    Args:
        settings: further fields of `GenerationConfig`.

    Raises:
        RequestError: a setting is not valid; before any work.
    """
    for rule in rules:
        find_rule(rule)
    points = []
    combinations = list(itertools.product(rules, masses, thresholds))
    for number, (rule, mass, threshold) in enumerate(combinations, start=1):
        progress(f"{number}/{len(combinations)}: {rule}, threshold {threshold:g}, mass {mass:g}")
        sequences = [
            generator.chat(
                [{"role": "user", "content": each.prompt}],
                enable_thinking=each.enable_thinking,
                rule=rule,
                threshold=threshold,
                expert_subset_mass=mass,
                **settings,
            )
            for each in prompts
        ]
        results = generator.generate(sequences)
        right = sum(result.text == each.answer for result, each in zip(results, prompts, strict=True))
        forwards = sum(result.forwards for result in results)
        experts = sum(float(np.mean(result.distinct_experts)) * result.forwards for result in results) / forwards
        tokens = sum(len(result.token_ids) for result in results)
        points.append(Point(rule, threshold, mass, right / len(prompts), tokens / forwards, experts))
    return points


def area_under(points: Sequence[Point]) -> float:
    """AUP, the area under accuracy against TPF: the integral over x of the best exact match at a TPF of x or more."""
    area, best, last = 0.0, 0.0, None
    for point in sorted(points, key=lambda each: -each.tpf):
        if last is not None:
            area += best * (last - point.tpf)
        best, last = max(best, point.exact_match), point.tpf
    return area + best * (last or 0.0)


def series(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by rule and mass, each in the order of its thresholds."""
    groups: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda each: each.threshold):
        groups.setdefault(f"{point.rule}, mass {point.expert_subset_mass:g}", []).append(point)
    return dict(sorted(groups.items()))


def write_report(points: Sequence[Point], folder: Path) -> dict[str, float]:
    """Write `sweep.json` and `sweep.png` into `folder`; returns the AUP of every series."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    areas = {name: area_under(group) for name, group in series(points).items()}
    (folder / "sweep.json").write_text(json.dumps({"points": [asdict(point) for point in points], "aup": areas}, indent=2))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, group in series(points).items():
        match = [100 * point.exact_match for point in group]
        left.plot([point.tpf for point in group], match, marker="o", label=f"{name} (AUP {areas[name]:.2f})")
        right.plot([point.distinct_experts for point in group], match, marker="o", label=name)
    left.set(xlabel="tokens per forward (TPF)", ylabel="exact match, %")
    right.set(xlabel="distinct experts per layer, mean over forwards")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(folder / "sweep.png", dpi=110)
    return areas
