"""`make bench`: our CPU engine, our PyTorch reference and transformers' model, side by side in one process.

Every figure is a ratio of medians of alternating runs, since the machines this runs on are noisy.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from clover_trt.bench.midsize import build_midsize, transformers_model
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.package import EnginePackage
from clover_trt.model.load import load_model
from clover_trt.parity.torch_session import TorchSession
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.session import Session, StepInput, no_controls

PREFIX, BLOCK, PREFILL = 512, 32, 512
Job = Callable[[], None]
console = Console(stderr=True)


def step_input(ids: np.ndarray[Any, Any], commit: int, noisy: int) -> StepInput:
    """One row: `commit` tokens, then `noisy`; candidates for the noisy ones, or for the last token."""
    index = np.arange(commit, commit + noisy) if noisy else np.array([commit - 1])
    lengths = np.array([commit], np.int32), np.array([noisy], np.int32)
    used = ids[:, : commit + noisy]
    return StepInput(used, *lengths, index[None].astype(np.int64), np.ones(1, np.float32), no_controls(1, len(index)))


def fill(session: Session, ids: np.ndarray[Any, Any], tokens: int) -> None:
    """Empty slot 0 and commit `tokens` tokens."""
    session.reset(0)
    for begin in range(0, tokens, PREFILL):
        session.step(step_input(ids[:, begin : begin + PREFILL], min(PREFILL, tokens - begin), 0))


def session_jobs(session: Session, ids: np.ndarray[Any, Any]) -> dict[str, Job]:
    """The timed jobs of a session; each leaves the prefix where it was."""

    def at_prefix(*steps: StepInput) -> Job:
        def job() -> None:
            for step in steps:
                session.step(step)
            session.prefix_len[0] = PREFIX

        return job

    def prefill() -> None:
        session.prefix_len[0] = 0
        session.step(step_input(ids, PREFILL, 0))
        session.prefix_len[0] = PREFIX

    return {
        "denoise": at_prefix(step_input(ids, 0, BLOCK)),
        "fused": at_prefix(step_input(ids, BLOCK, BLOCK)),
        "split": at_prefix(step_input(ids, BLOCK, 0), step_input(ids, 0, BLOCK)),
        "prefill": prefill,
    }


def transformers_jobs(model: Any, ids: np.ndarray[Any, Any]) -> dict[str, Job]:
    """The same work for transformers: 32 tokens behind a cached prefix (logits for all), and a prefill (for the last)."""
    tensor = torch.from_numpy(ids)
    saved: dict[str, Any] = {}

    def denoise() -> None:
        with torch.no_grad():
            model(tensor[:, :BLOCK], past_key_values=saved["cache"], use_cache=True)

    def refresh() -> None:
        with torch.no_grad():
            saved["cache"] = model(tensor[:, :PREFIX], use_cache=True).past_key_values

    def prefill() -> None:
        with torch.no_grad():
            model(tensor[:, :PREFILL], use_cache=True, logits_to_keep=1)

    return {"denoise": denoise, "refresh": refresh, "prefill": prefill}


def alternate(jobs: dict[str, tuple[Job, Job]], rounds: int) -> dict[str, float]:
    """Median seconds of each job, run in turn `rounds` times after one warm-up; the second of a pair is set-up, untimed."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, (job, prepare) in jobs.items():
            prepare()
            begin = time.perf_counter()
            job()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(package: EnginePackage, reference: Any, hf: Any, threads: int, rounds: int) -> dict[str, float]:
    """Medians of all jobs at one number of threads."""
    torch.set_num_threads(threads)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 31_000, (1, PREFIX + 2 * BLOCK)).astype(np.int64)
    engine = OrtSession(package, threads=threads)
    ours = TorchSession(reference, max_len=PREFIX + 4 * BLOCK)
    for session in (engine, ours):
        fill(session, ids, PREFIX)
    theirs = transformers_jobs(hf, ids)

    def nothing() -> None:
        return None

    jobs: dict[str, tuple[Job, Job]] = {f"engine {name}": (job, nothing) for name, job in session_jobs(engine, ids).items()}
    jobs |= {f"torch {name}": (job, nothing) for name, job in session_jobs(ours, ids).items() if name != "split"}
    jobs["transformers denoise"] = (theirs["denoise"], theirs["refresh"])
    jobs["transformers prefill"] = (theirs["prefill"], nothing)
    return alternate(jobs, rounds)


def against_max_len(package: EnginePackage, threads: int, rounds: int) -> dict[str, float]:
    """Median seconds of a denoise pass over the same prefix, for engines that allow longer and longer contexts."""
    ids = np.random.default_rng(0).integers(0, 31_000, (1, PREFIX + BLOCK)).astype(np.int64)
    jobs: dict[str, tuple[Job, Job]] = {}
    for limit in (1024, 4096, 16_384):
        limited = dataclasses.replace(package, build=package.build.model_copy(update={"max_seq_len": limit}))
        session = OrtSession(limited, threads=threads)
        fill(session, ids, PREFIX)
        jobs[str(limit)] = (session_jobs(session, ids)["denoise"], lambda: None)
    return alternate(jobs, rounds)


def peak_memory(engine: Path) -> dict[str, float]:
    """Peak resident memory of a process that loads the engine, prefills and denoises, against weights and caches.

    The process's memory after its imports is taken off, since it holds no weights yet.
    """
    code = (
        "import json, re, sys, numpy as np\n"
        "from clover_trt.engine.package import open_package\n"
        "from clover_trt.runtime.ort_session import OrtSession\n"
        "from clover_trt.runtime.session import StepInput, no_controls\n"
        "peak = lambda: 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = peak()\n"
        "session = OrtSession(open_package(sys.argv[1]))\n"
        "ids = np.random.default_rng(0).integers(0, 31000, (1, 512))\n"
        "one = np.ones(1, np.float32)\n"
        "def step(commit, noisy):\n"
        "    n = max(1, noisy)\n"
        "    index = np.arange(commit + noisy - n, commit + noisy)[None]\n"
        "    lengths = np.array([commit], np.int32), np.array([noisy], np.int32)\n"
        "    session.step(StepInput(ids[:, : commit + noisy], *lengths, index, one, no_controls(1, n)))\n"
        "for _ in range(4): step(512, 0)\n"
        "for _ in range(4): step(0, 32)\n"
        "print(json.dumps({'peak': peak() - before, 'caches': session.cache_bytes()}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(engine)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    weights = sum((engine / name).stat().st_size for name in ("step.data", "experts.safetensors"))
    return {"peak": found["peak"], "weights": weights, "caches": found["caches"]}


def report(by_threads: dict[str, dict[str, float]], lengths: dict[str, float], memory: dict[str, float]) -> dict[str, Any]:
    """Ratios at the most threads, with all medians behind them."""
    best = by_threads[max(by_threads, key=int)]
    ratios = {
        threads: {
            "pass_vs_hf": t["transformers denoise"] / t["engine denoise"],
            "prefill_vs_hf": t["transformers prefill"] / t["engine prefill"],
            "fused_vs_split": t["engine fused"] / t["engine split"],
        }
        for threads, t in by_threads.items()
    }
    return {
        **ratios[max(by_threads, key=int)],
        "peak_memory_vs_weights": memory["peak"] / (memory["weights"] + memory["caches"]),
        "ratios_by_threads": ratios,
        "seconds_by_threads": by_threads,
        "pass_seconds_by_max_len": lengths,
        "memory_bytes": memory,
        "denoise_pass_ms": 1000 * best["engine denoise"],
        "cores": len(os.sched_getaffinity(0)),
    }


def show(result: dict[str, Any]) -> None:
    """Print the medians and the ratios beside their targets."""
    table = Table(*("job", *(f"{threads} thread(s), ms" for threads in result["seconds_by_threads"])))
    for job in next(iter(result["seconds_by_threads"].values())):
        table.add_row(job, *(f"{1000 * times[job]:.1f}" for times in result["seconds_by_threads"].values()))
    Console().print(table)
    lengths = ", ".join(f"{limit}: {1000 * t:.1f} ms" for limit, t in result["pass_seconds_by_max_len"].items())
    Console().print(f"denoise pass over {PREFIX} tokens by max_len: {lengths}", highlight=False)
    targets = {"pass_vs_hf": ">= 2.0", "prefill_vs_hf": ">= 1.0", "fused_vs_split": "<= 0.75", "peak_memory_vs_weights": "<= 1.3"}
    table = Table("ratio", *(f"{threads} thread(s)" for threads in result["ratios_by_threads"]), "target")
    for key, target in targets.items():
        by_threads = [ratios.get(key, result[key]) for ratios in result["ratios_by_threads"].values()]
        table.add_row(key, *(f"{value:.2f}" for value in by_threads), target)
    Console().print(table)


def main(
    out: Annotated[Path, typer.Option(help="Folder of cpu.json.")] = Path("out/bench"),
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each job.")] = 9,
) -> None:
    """Build the mid-size model, time it against transformers and write the report."""
    warnings.simplefilter("ignore", FutureWarning)  # transformers renames an argument
    with tempfile.TemporaryDirectory() as scratch, console.status("making the mid-size model") as status:
        package = build_midsize(Path(scratch), status.update)
        status.update("measuring memory")
        memory = peak_memory(package.folder)
        checkpoint = Checkpoint(Path(scratch) / "checkpoint")
        reference, hf = load_model(checkpoint), transformers_model(dict(checkpoint.tensors()))
        counts = sorted({1, min(2, len(os.sched_getaffinity(0)))})
        by_threads = {}
        for threads in counts:
            status.update(f"timing with {threads} thread(s)")
            by_threads[str(threads)] = measure(package, reference, hf, threads, rounds)
        status.update("timing against max_len")
        lengths = against_max_len(package, counts[-1], rounds)
    result = report(by_threads, lengths, memory)
    out.mkdir(parents=True, exist_ok=True)
    (out / "cpu.json").write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    print(f"wrote {out / 'cpu.json'}")


if __name__ == "__main__":
    typer.run(main)
