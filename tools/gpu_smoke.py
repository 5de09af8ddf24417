"""Build and run an engine on the GPU of this machine: its layers against the reference, its answers against the CPU engine's.

python tools/gpu_smoke.py --gpu h200                           # needs TensorRT, cuda-python and the GPU of the profile
python tools/gpu_smoke.py --gpu h200 --operations functions    # without the plugins
python tools/gpu_smoke.py --gpu gb300 --precision nvfp4        # or fp8: over clover-tiny with its experts padded with zeros
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from eval_tiny import figures, score
from rich.console import Console
from rich.table import Table
from tiny.tasks import examples
from tiny.wider import write_wider

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.build import build
from clover_trt.errors import CloverError
from clover_trt.parity.record import ParityGate
from clover_trt.runtime.generate import Generator


def main(
    gpu: Annotated[str, typer.Option(help="GPU profile.")] = "h200",
    precision: Annotated[str | None, typer.Option(help="One that the profile offers.")] = None,
    operations: Annotated[str | None, typer.Option(help="plugins or functions; the profile's when not given.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Prompts to answer.")] = 100,
    slots: Annotated[int, typer.Option(min=1)] = 8,
    json_out: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Exit code 0 when the GPU engine answers as well as the CPU engine: exact match within 2 points, TPF within 5 %."""
    err = Console(stderr=True)
    prompts = list(itertools.islice(examples("smoke", "held_out"), count))
    rows = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            # The plugins take FP8 widths in multiples of 128, clover-tiny's experts are 24 wide.
            checkpoint = Checkpoint(write_wider(Path(folder) / "wider", 128))
            for target, form in (("cpu", None), (gpu, operations)):
                engine = Path(folder) / target
                finished = build(
                    checkpoint,
                    engine,
                    gpu=target,
                    precision=precision if target == gpu else None,
                    max_seq_len=1024,
                    operations=form,
                    progress=lambda line: err.print(line, highlight=False),
                    gate=ParityGate(),
                )
                if not finished:
                    raise typer.BadParameter(f"TensorRT or a GPU for {gpu} is not on this machine; see clover-trt doctor")
                rows[target] = figures(score(Generator(str(engine), slots=slots), prompts, 0.95, json_out))
    except CloverError as error:
        err.print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from None
    same = abs(rows["cpu"]["exact_match"] - rows[gpu]["exact_match"]) <= 0.02
    close = abs(rows[gpu]["tpf_aggregate"] / rows["cpu"]["tpf_aggregate"] - 1) <= 0.05
    if json_out:
        print(json.dumps({"passed": same and close, "engines": rows}))
    else:
        table = Table("engine", "exact match", "TPF, mean", "TPF, aggregate")
        for name, row in rows.items():
            table.add_row(name, f"{row['exact_match']:.1%}", f"{row['tpf_mean']:.2f}", f"{row['tpf_aggregate']:.2f}")
        Console().print(table)
    raise typer.Exit(0 if same and close else 1)


if __name__ == "__main__":
    typer.run(main)
