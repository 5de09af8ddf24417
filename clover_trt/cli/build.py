"""Verbs that make things: build, plan, quantize, profiles."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from clover_trt.cli.shared import JsonOption, TensorMapOption, err, fail, log_file, out, progress_lines
from clover_trt.errors import RequestError

if TYPE_CHECKING:
    from clover_trt.engine.capacity import Capacity

app = typer.Typer()


class ExpertFormat(StrEnum):
    """Formats of quantized expert matrices."""

    fp8 = "fp8"
    nvfp4 = "nvfp4"


@app.command(epilog="Example: clover-trt build --gpu cpu --checkpoint clover-tiny --out build/engines/tiny")
def build(
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint folder, or clover-tiny for the model that ships with us.")
    ] = None,
    target: Annotated[Path | None, typer.Option("--out", help="Folder of the engine package to write.")] = None,
    gpu: Annotated[str, typer.Option(help="Target: a name that 'clover-trt profiles' lists, or a YAML file.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="One that the profile offers; its first when not given.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longest prompt and response together.")] = None,
    compute_capability: Annotated[str | None, typer.Option(help="Instead of the profile's, as 12.0.")] = None,
    operations: Annotated[
        str | None, typer.Option(help="plugins, or functions: the operations in TensorRT's own operators.")
    ] = None,
    plugin_library: Annotated[Path | None, typer.Option(help="A compiled libclover_plugins.so; else compiled here.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Finish this build bundle on a machine that can.")] = None,
    gate: Annotated[
        bool, typer.Option("--gate/--no-gate", help="Compare the layers with the reference before the package is finished.")
    ] = True,
    log: Annotated[Path | None, typer.Option(help="Write TensorRT's messages to this file.")] = None,
    tensor_map: TensorMapOption = None,
    json_out: JsonOption = False,
) -> None:
    """Build an engine package from a checkpoint, or finish a build bundle."""
    from clover_trt.checkpoint.reader import Checkpoint
    from clover_trt.engine import build as engine
    from clover_trt.engine.inspect import describe_engine
    from clover_trt.parity.record import ParityGate

    if resume is None and (checkpoint is None or target is None):
        raise RequestError("expected --checkpoint and --out, or --resume BUNDLE")
    with progress_lines(json_out) as progress, log_file(log) as write_log:
        if resume is not None:
            if checkpoint is not None or target is not None:
                raise RequestError(
                    "--resume takes neither --checkpoint nor --out: the bundle has its settings, and stays where it is"
                )
            target, finished = resume, True
            engine.resume(resume, progress=progress, log=write_log, gate=ParityGate() if gate else None)
        else:
            assert checkpoint is not None
            assert target is not None
            source = Checkpoint(checkpoint, tensor_map)
            if source.neutral and not json_out:
                err.print("note: a plain Qwen3.5-MoE checkpoint: logits are exact, but it has no tensors to denoise blocks with")
            finished = engine.build(
                source,
                target,
                gpu=gpu,
                precision=precision,
                max_seq_len=max_seq_len,
                compute_capability=compute_capability,
                operations=operations,
                plugin_library=plugin_library,
                progress=progress,
                log=write_log,
                gate=ParityGate() if gate else None,
            )
    if json_out:
        print(json.dumps({"engine": str(target), "finished": finished, **describe_engine(target)}))
    elif finished:
        out.print(f"built {target}")
    else:
        out.print(f"wrote the build bundle {target}: everything but the plan, which needs TensorRT and the GPU it is for")
        out.print(f"finish it there with: clover-trt build --resume {target}", soft_wrap=True)


@app.command(epilog="Example: clover-trt export --checkpoint clover-tiny --gpu rtx --precision fp8 --out out/tiny-onnx")
def export(
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder, or clover-tiny.")],
    target: Annotated[Path, typer.Option("--out", help="Folder to write step.onnx and its data into.")],
    gpu: Annotated[str, typer.Option(help="Target: a name that 'clover-trt profiles' lists, or a YAML file.")] = "cpu",
    precision: Annotated[str | None, typer.Option(help="One that the profile offers; its first when not given.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longest prompt and response together.")] = None,
    operations: Annotated[str | None, typer.Option(help="plugins: keep the clover:: nodes; functions: with bodies.")] = None,
    tensor_map: TensorMapOption = None,
) -> None:
    """Write the ONNX graph of a target alone."""
    from clover_trt.checkpoint.reader import Checkpoint
    from clover_trt.engine import build as engine

    with progress_lines() as progress:
        engine.export(
            Checkpoint(checkpoint, tensor_map),
            target,
            gpu=gpu,
            precision=precision,
            max_seq_len=max_seq_len,
            operations=operations,
            progress=progress,
        )
    out.print(f"wrote {target / 'step.onnx'}", soft_wrap=True)


@app.command(epilog="Example: clover-trt plan --gpu h200 --context 131072 --slots 4")
def plan(
    gpu: Annotated[str, typer.Option(help="A name that 'clover-trt profiles' lists, or a YAML file.")],
    context: Annotated[int, typer.Option(min=1, help="Longest prompt and response together.")] = 131_072,
    slots: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    precision: Annotated[str | None, typer.Option(help="One that the profile offers; its first when not given.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Geometry to plan for; Clover-35B-A3B when not given.")] = None,
    json_out: JsonOption = False,
) -> None:
    """Say without building what an engine needs, whether it fits, and how fast a pass can be at best."""
    from clover_trt.checkpoint.reader import checkpoint_folder
    from clover_trt.checkpoint.synthetic import CLOVER_35B
    from clover_trt.config import ModelConfig
    from clover_trt.engine.capacity import capacity
    from clover_trt.engine.profiles import check_precision, read_profile

    profile = read_profile(gpu)
    model = CLOVER_35B if checkpoint is None else ModelConfig.from_folder(checkpoint_folder(checkpoint))
    chosen = check_precision(profile, precision)
    found = capacity(model, profile, chosen, context, slots)
    if json_out:
        totals = {"total_bytes": found.total_bytes, "fits": found.fits, "gpu": profile.name, "precision": chosen}
        print(json.dumps({**totals, "context": context, **asdict(found)}))
    else:
        _print_capacity(found, f"{profile.description}, {chosen}, {slots} x {context:,} tokens")
    if not found.fits:
        fail(f"{slots} slots of {context:,} tokens do not fit: {found.most_slots} do")


def _print_capacity(found: Capacity, title: str) -> None:
    table = Table("part", "GB", title=title)
    for part, size in found.parts.items():
        table.add_row(part, f"{size / 1e9:.3f}")
    table.add_section()
    table.add_row("all", f"{found.total_bytes / 1e9:.1f} of {found.memory_bytes / 1e9:g}")
    table.add_row("a slot", f"{found.slot_bytes / 1e9:.2f}")
    table.add_row("slots that fit", str(found.most_slots))
    out.print(table)
    rates = list(found.floors[0].tokens_per_second)
    floors = Table("distinct experts", "GB moved", "floor, ms", "bound by", *(f"tokens/s at TPF {tpf:g}" for tpf in rates))
    for floor in found.floors:
        floors.add_row(
            str(floor.distinct_experts),
            f"{floor.bytes_moved / 1e9:.1f}",
            f"{floor.milliseconds:.2f}",
            floor.bound_by,
            *(f"{floor.tokens_per_second[tpf]:,.0f}" for tpf in rates),
        )
    out.print(floors)
    out.print("one row, empty prefix; a floor, not a measurement: bytes over bandwidth, operations over the peak rate")
    if found.stated_tokens_per_second:
        out.print(f"stated by the model's vendor, bfloat16: {found.stated_tokens_per_second:g} tokens/s")


@app.command(epilog="Example: clover-trt quantize --checkpoint clover-tiny --out out/tiny-fp8")
def quantize(
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder in bfloat16, or clover-tiny.")],
    target: Annotated[Path, typer.Option("--out", help="Checkpoint folder to write.")],
    experts: Annotated[ExpertFormat, typer.Option(help="Format of the expert matrices.")] = ExpertFormat.fp8,
    tensor_map: TensorMapOption = None,
    json_out: JsonOption = False,
) -> None:
    """Write an FP8 copy of a checkpoint and say what the rounding costs; interrupted work goes on when called again."""
    from clover_trt.checkpoint.quantize import REPORT, quantize_checkpoint, summary
    from clover_trt.checkpoint.reader import Checkpoint

    with progress_lines(json_out) as progress:
        report = quantize_checkpoint(Checkpoint(checkpoint, tensor_map), target, progress, experts=experts.value)
    parts = summary(report)
    if json_out:
        print(json.dumps({"checkpoint": str(target), "summary": parts}))
        return
    table = Table("part", "matrices", "relative error, mean", "largest", "worst channel", "where")
    for part, row in parts.items():
        errors = (f"{row[field]:.2%}" for field in ("relative_error_mean", "relative_error_max", "worst_channel_error"))
        table.add_row(part, f"{row['matrices']:,}", *errors, row["worst_channel"])
    out.print(table)
    out.print(f"wrote {target}; every matrix: {target / REPORT}", soft_wrap=True)


@app.command(epilog="Example: clover-trt profiles")
def profiles(json_out: JsonOption = False) -> None:
    """List the GPU profiles that engines can be built for."""
    from clover_trt.engine.profiles import profile_names, profiles_folder, read_profile

    found = [read_profile(name) for name in profile_names()]
    if json_out:
        print(json.dumps([profile.model_dump(mode="json") for profile in found]))
        return
    table = Table("profile", "target", "backend", "compute capability", "memory", "bandwidth", "precisions")
    for each in found:
        table.add_row(
            each.name,
            each.description,
            each.backend,
            each.compute_capability or "-",
            f"{each.memory_gb:g} GB" if each.memory_gb else "-",
            f"{each.bandwidth_gb_s:,g} GB/s" if each.bandwidth_gb_s else "-",
            ", ".join(each.precisions),
        )
    out.print(table)
    out.print(f"files: {profiles_folder()}; your own: --gpu FILE.yaml", soft_wrap=True)
