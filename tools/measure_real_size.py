"""Take a synthetic checkpoint of the real size through inspect, quantize and build, and measure memory and speed.

python tools/measure_real_size.py --work /big/disk/folder     # needs 40 GB of disk; docs/real-size.md has a run
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from clover_trt.checkpoint.synthetic import write_synthetic

CLI = [sys.executable, "-m", "clover_trt.cli"]


def status(pid: int) -> dict[str, float]:
    """Resident memory of a process in GB: private pages, and all with those mapped from files, now and at most so far."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) / 1e6 for name in ("RssAnon", "VmHWM") if name in fields}


def run(arguments: list[str]) -> dict[str, float]:
    """Run a command and watch its memory."""
    began, peak = time.perf_counter(), {"RssAnon": 0.0, "VmHWM": 0.0}
    process = subprocess.Popen([*CLI, *arguments], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        for name, value in status(process.pid).items():
            peak[name] = max(peak[name], value)
        time.sleep(0.1)
    if process.returncode:
        raise typer.Exit(process.returncode)
    return {"seconds": time.perf_counter() - began, "private_gb": peak["RssAnon"], "resident_gb": peak["VmHWM"]}


def folder_gb(folder: Path) -> float:
    """Bytes of the files of a folder, in GB."""
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e9


def copy_speed(source: Path, target: Path) -> float:
    """MB/s of a plain copy of the largest file of a folder, written through to the disk."""
    largest = max(source.iterdir(), key=lambda path: path.stat().st_size)
    began = time.perf_counter()
    subprocess.run(["dd", f"if={largest}", f"of={target}", "bs=16M", "conv=fsync"], check=True, capture_output=True)
    seconds = time.perf_counter() - began
    target.unlink()
    return largest.stat().st_size / 1e6 / seconds


def main(
    work: Annotated[Path, typer.Option(help="Folder on a disk with 40 GB free; what is written there is removed again.")],
    precision: Annotated[str, typer.Option(help="fp8 or nvfp4, the format of the experts.")] = "fp8",
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Inspect, quantize and build; prints a table."""
    work.mkdir(parents=True, exist_ok=True)
    checkpoint, quantized, bundle = work / "synthetic-35b", work / "quantized", work / "bundle"
    if not checkpoint.exists():
        write_synthetic(checkpoint)
    size = folder_gb(checkpoint)
    rows: dict[str, dict[str, float]] = {}
    rows["inspect"] = run(["inspect", str(checkpoint), "--json"])
    found = run(["quantize", "--checkpoint", str(checkpoint), "--out", str(quantized), "--experts", precision])
    rows[f"quantize to {precision}"] = found | {"read_gb": size, "written_gb": folder_gb(quantized)}
    speed = copy_speed(quantized, work / "copy")
    shutil.rmtree(quantized)
    found = run(["build", "--gpu", "gb300", "--precision", precision, "--checkpoint", str(checkpoint), "--out", str(bundle)])
    rows[f"build gb300 {precision}"] = found | {"read_gb": size, "written_gb": folder_gb(bundle)}
    shutil.rmtree(bundle)
    table = Table("step", "seconds", "private GB", "resident GB", "read GB", "written GB", "read MB/s", "written MB/s")
    for name, row in rows.items():
        read, written = row.get("read_gb", 0.0), row.get("written_gb", 0.0)
        figures = (row["seconds"], row["private_gb"], row["resident_gb"], read, written)
        rates = (1e3 * read / row["seconds"], 1e3 * written / row["seconds"])
        table.add_row(name, *(f"{value:.1f}" for value in figures), *(f"{value:.0f}" for value in rates))
    Console().print(table)
    print(f"a plain copy of one shard on this disk: {speed:.0f} MB/s")
    if out is not None:
        out.write_text(json.dumps({"steps": rows, "copy_mb_s": speed}, indent=2))


if __name__ == "__main__":
    typer.run(main)
