"""`make bench`, decoding: many requests in flight against one, the host's share, reuse of a long history.

All on the mid-size model and in one process; ratios come from alternating runs.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from clover_trt.bench.midsize import build_midsize
from clover_trt.checkpoint.reader import checkpoint_folder
from clover_trt.config import GenerationConfig
from clover_trt.engine.package import EnginePackage
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.prefix_cache import PrefixCache
from clover_trt.runtime.request import Request
from clover_trt.runtime.scheduler import Scheduler
from clover_trt.runtime.sequence import Sequence
from clover_trt.runtime.session import Session, StepInput, StepOutput
from clover_trt.runtime.text import TextCodec

IN_FLIGHT, PROMPT, RESPONSE, HISTORY = 8, 64, 64, 8192
console = Console(stderr=True)


class TimedSession:
    """A session that counts the seconds spent in its steps, and keeps those of each."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def step(self, step: StepInput) -> StepOutput:
        """Run and time one step."""
        begin = time.perf_counter()
        output = self._session.step(step)
        self.seconds.append(time.perf_counter() - begin)
        return output


class FreeSession:
    """A session whose steps cost next to nothing: what is left is the host loop."""

    def __init__(self, package: EnginePackage, slots: int, max_len: int) -> None:
        self.config, self.slots, self.max_len = package.model, slots, max_len
        self.prefix_len = np.zeros(slots, np.int32)

    def reset(self, slot: int) -> None:
        """Empty a slot."""
        self.prefix_len[slot] = 0

    def step(self, step: StepInput) -> StepOutput:
        """Candidates that look like a model's: any ids, surer and less sure."""
        rng = np.random.default_rng(int(self.prefix_len.sum()) + int(step.noisy_len.sum()))
        shape = (*step.logit_index.shape, step.candidates)
        self.prefix_len[step.slots] += step.commit_len
        logprobs = -np.sort(rng.random(shape, np.float32), axis=-1)
        return StepOutput(rng.integers(0, 1000, shape), logprobs, np.ones(self.config.num_hidden_layers, np.int64))


def requests(package: EnginePackage, codec: TextCodec, count: int, prompt: int, response: int, **settings: Any) -> list[Request]:
    """Requests of random ids that run to their full length, four tokens a pass."""
    rng = np.random.default_rng(0)
    wanted = GenerationConfig(rule="tokens_per_pass", ignore_eos=True, max_new_tokens=response, **settings)
    limit = package.build.max_seq_len
    ids = [rng.integers(0, 31_000, prompt).tolist() for _ in range(count)]
    return [Request(Sequence(each, wanted, package.model, limit, package.valid_tokens), codec) for each in ids]


def run(scheduler: Scheduler, asked: list[Request]) -> float:
    """Seconds to run all of them."""
    begin = time.perf_counter()
    for request in asked:
        scheduler.add(request)
    while not scheduler.idle:
        scheduler.step()
    assert not any(request.error for request in asked)
    return time.perf_counter() - begin


def in_flight(package: EnginePackage, codec: TextCodec, rounds: int, threads: int) -> dict[str, float]:
    """Tokens/s of one request alone and of eight together, and the share of the wall time outside the engine's steps."""
    one = TimedSession(OrtSession(package, threads=threads))
    many = TimedSession(OrtSession(package, slots=IN_FLIGHT, threads=threads))
    speeds: dict[str, list[float]] = {"one": [], "many": []}
    wall = {"one": 0.0, "many": 0.0}
    for turn in range(rounds + 1):
        for name, session, count in (("one", one, 1), ("many", many, IN_FLIGHT)):
            seconds = run(Scheduler(session), requests(package, codec, count, PROMPT, RESPONSE))
            if turn:
                speeds[name].append(count * RESPONSE / seconds)
                wall[name] += seconds
            else:
                session.seconds.clear()
    return {
        "tokens_per_second_one": statistics.median(speeds["one"]),
        "tokens_per_second_in_flight": statistics.median(speeds["many"]),
        "in_flight_vs_one": statistics.median(speeds["many"]) / statistics.median(speeds["one"]),
        "host_share_one": 1 - sum(one.seconds) / wall["one"],
        "host_share_in_flight": 1 - sum(many.seconds) / wall["many"],
    }


def operators(package: EnginePackage, codec: TextCodec, threads: int, folder: Path) -> dict[str, dict[str, float]]:
    """Milliseconds of a pass by operator, for one request and for eight in flight: sums over nodes of their medians over passes,
    by ONNX Runtime's own profile.
    """
    found: dict[str, dict[str, float]] = {}
    for name, count in (("one", 1), ("in_flight", IN_FLIGHT)):
        session = OrtSession(package, slots=count, threads=threads, profile=folder / name)
        run(Scheduler(session), requests(package, codec, count, PROMPT, RESPONSE))
        nodes: dict[tuple[str, str], list[float]] = {}
        for event in json.loads(session.end_profile().read_text()):
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                nodes.setdefault((event["args"]["op_name"], event["name"]), []).append(event["dur"] / 1e3)
        for (operator, _), times in nodes.items():
            found.setdefault(operator, {"one": 0.0, "in_flight": 0.0})[name] += statistics.median(times)
    return dict(sorted(found.items(), key=lambda item: -item[1]["in_flight"]))


def second_turn(package: EnginePackage, codec: TextCodec, rounds: int) -> dict[str, float]:
    """Seconds to the first block over a history that was seen before, against a cold start."""
    session = OrtSession(package)
    cold, warm, cache = [], [], PrefixCache(1 << 31)
    for turn in range(rounds):
        rng = np.random.default_rng(turn)
        history = rng.integers(0, 31_000, HISTORY).tolist()
        settings = GenerationConfig(rule="tokens_per_pass", ignore_eos=True, max_new_tokens=32)

        def first_block(ids: list[int], cache: PrefixCache | None, settings: GenerationConfig = settings) -> float:
            limit = package.build.max_seq_len
            request = Request(Sequence(ids, settings, package.model, limit, package.valid_tokens), codec)
            run(Scheduler(session, prefix_cache=cache), [request])
            return request.result().seconds_to_first_block

        question = rng.integers(0, 31_000, 64).tolist()
        first_block(history, cache)
        cold.append(first_block(history + question, None))
        warm.append(first_block(history + question, cache))
    return {
        "first_block_cold_seconds": statistics.median(cold),
        "first_block_second_turn_seconds": statistics.median(warm),
        "second_turn_vs_cold": statistics.median(warm) / statistics.median(cold),
    }


def host_loop(package: EnginePackage, codec: TextCodec) -> dict[str, Any]:
    """Host time of a pass early and late in a long response, with all penalties on, over a session that costs nothing."""
    length = 12_288
    session = FreeSession(package, 1, length + 256)
    scheduler = Scheduler(session)  # type: ignore[arg-type]
    (request,) = requests(package, codec, 1, 64, length, repetition_penalty=1.1, frequency_penalty=0.1, stop=("\x00",))
    request.sequence.max_len = session.max_len
    scheduler.add(request)
    profile, times = cProfile.Profile(), []
    while not scheduler.idle:
        begin = time.perf_counter()
        scheduler.step()
        times.append(time.perf_counter() - begin)
    quarter = len(times) // 4
    early, late = statistics.median(times[quarter // 4 : quarter]), statistics.median(times[-quarter:])
    again = requests(package, codec, IN_FLIGHT, 64, 512)
    profile.runcall(run, Scheduler(FreeSession(package, IN_FLIGHT, 4096)), again)  # type: ignore[arg-type]
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = sorted(((entry[2], f"{Path(key[0]).name}:{key[2]}") for key, entry in stats.items()), reverse=True)
    total = sum(seconds for seconds, _ in own)
    return {
        "host_ms_per_pass_early": 1000 * early,
        "host_ms_per_pass_late": 1000 * late,
        "host_late_vs_early": late / early,
        "profile": [{"function": name, "share": seconds / total} for seconds, name in own[:8]],
    }


TARGETS = {
    "in_flight_vs_one": ">= 2.5",
    "host_share_one": "< 0.05",
    "host_share_in_flight": "< 0.05",
    "second_turn_vs_cold": "<= 0.15",
    "host_late_vs_early": "about 1",
}


def show_operators(found: dict[str, dict[str, float]]) -> None:
    """The operators that take most of a pass with eight in flight, and the rest together."""
    table = Table("operator", "one, ms", f"{IN_FLIGHT} in flight, ms", "ratio")
    rows = [*list(found.items())[:6], ("all", {key: sum(each[key] for each in found.values()) for key in ("one", "in_flight")})]
    for name, each in rows:
        table.add_row(name, *(f"{each[key]:.1f}" for key in ("one", "in_flight")), f"{each['in_flight'] / each['one']:.1f}")
    Console().print(table)


def main(
    out: Annotated[Path, typer.Option(help="Folder of decode.json.")] = Path("out/bench"),
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each job.")] = 3,
) -> None:
    """Build the mid-size model, time decoding on it and write the report."""
    codec = TextCodec(checkpoint_folder("clover-tiny"))
    with tempfile.TemporaryDirectory() as scratch, console.status("making the mid-size model") as status:
        package = build_midsize(Path(scratch), status.update)
        status.update("one request and eight in flight")
        cores = len(os.sched_getaffinity(0))
        by_threads = {str(n): in_flight(package, codec, rounds, n) for n in sorted({1, min(2, cores)})}
        result: dict[str, Any] = {**by_threads[max(by_threads, key=int)], "by_threads": by_threads}
        status.update("a pass by operator")
        result["operators_ms"] = operators(package, codec, min(2, cores), Path(scratch))
        status.update("the host loop alone")
        result |= host_loop(package, codec)
        status.update(f"a second turn over {HISTORY} tokens")
        result |= second_turn(package, codec, rounds)
    out.mkdir(parents=True, exist_ok=True)
    (out / "decode.json").write_text(json.dumps(result, indent=2) + "\n")
    table = Table("figure", "value", "target")
    for key, value in result.items():
        if isinstance(value, float):
            table.add_row(key, f"{value:.4g}", TARGETS.get(key, ""))
    Console().print(table)
    for threads, figures in by_threads.items():
        Console().print(f"{threads} thread(s): in_flight_vs_one {figures['in_flight_vs_one']:.2f}", highlight=False)
    show_operators(result["operators_ms"])
    for each in result["profile"]:
        Console().print(f"{each['share']:6.1%} of the host loop: {each['function']}", highlight=False)
    print(f"wrote {out / 'decode.json'}")


if __name__ == "__main__":
    typer.run(main)
