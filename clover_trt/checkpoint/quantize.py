"""Write a quantized copy of a checkpoint, shard by shard, with a report of what the rounding costs.

One shard holds one layer; a finished shard is kept when the work is interrupted, and skipped when it goes on.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from clover_trt.checkpoint import fp8, nvfp4
from clover_trt.checkpoint.inspect import part_of
from clover_trt.checkpoint.names import EXPERT, expert_parts
from clover_trt.checkpoint.pack import tensor_bytes
from clover_trt.checkpoint.reader import INDEX, Checkpoint
from clover_trt.checkpoint.safetensors_file import DTYPE_BYTES, safetensors_writer
from clover_trt.config import read_json
from clover_trt.errors import CheckpointError

REPORT = "quantization_report.json"
ORIGIN = "origin.json"
SAFETENSORS_DTYPE = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Progress = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R")
Format = Literal["fp8", "nvfp4"]


@dataclass(frozen=True)
class Rounding:
    """What quantization does to one matrix: `||q - w|| / ||w||` of the whole, and of its worst output channel."""

    name: str
    relative_error: float
    worst_channel: int
    worst_channel_error: float


def quantize_checkpoint(
    checkpoint: Checkpoint, out: Path, progress: Progress = lambda _: None, *, experts: Format = "fp8"
) -> list[Rounding]:
    """Write the quantized checkpoint `out`; interrupted work goes on where it stopped when called again.

    Args:
        checkpoint: the source, in higher precision.
        out: the folder to write.
        progress: called with a line for each shard.
        experts: format of the expert matrices; one that does not divide into NVFP4's groups, and every other quantized
            matrix, is FP8.

    Returns:
        the report, also written to `out/quantization_report.json`.

    Raises:
        CheckpointError: the source is not usable or is FP8 already, `out` exists, or the disk is too small (before any work).
    """
    out = Path(out).absolute()
    if checkpoint.quantized:
        raise CheckpointError(f"{checkpoint.folder}: holds FP8 weights already; quantize the bfloat16 checkpoint")
    if out.exists():
        raise CheckpointError(f"{out}: exists; choose another --out or remove it")
    work = out.parent / f".{out.name}.quantizing"
    shards = _shards(checkpoint)
    files = {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, start=1)}
    _open_work(work, checkpoint, experts)
    missing = [file for file in files if not (work / file).exists()]
    _check_space(work, sum(_shard_bytes(checkpoint, files[file], experts) for file in missing))
    for count, (file, names) in enumerate(files.items(), start=1):
        if file in missing:
            progress(f"quantizing shard {count}/{len(files)}")
            report = write_shard(checkpoint, names, work / file, experts)
            (work / f"{file}.report").write_text(json.dumps([asdict(each) for each in report]))
    progress("writing the index")
    rounding = _finish(work, checkpoint, files, experts)
    work.rename(out)
    return rounding


def _shards(checkpoint: Checkpoint) -> list[list[str]]:
    """Tensor names by shard: what is before the layers, each layer, what is after them."""
    groups: dict[int, list[str]] = {}
    for name in checkpoint.expected:
        after = checkpoint.config.num_hidden_layers
        number = int(name.split(".")[2]) if name.startswith("model.layers.") else (-1 if "embed_tokens" in name else after)
        groups.setdefault(number, []).append(name)
    return [groups[number] for number in sorted(groups)]


def _layout(checkpoint: Checkpoint, names: list[str], experts: Format) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a shard, experts one by one, each quantized weight followed by its scales."""
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in names:
        parts = expert_parts(name, checkpoint.config) if ".mlp.experts." in name else {name: checkpoint.expected[name]}
        for part, shape in parts.items():
            if _is_nvfp4(part, shape, experts):
                layout[part] = ("U8", (shape[0], shape[1] // 2))
                layout[f"{part}_scale"] = ("F8_E4M3", (shape[0], shape[1] // nvfp4.GROUP))
                layout[f"{part}_scale_2"] = ("F32", ())
            elif fp8.is_quantized(name):
                layout[part] = ("F8_E4M3", shape)
                layout[part + fp8.SCALE_SUFFIX] = ("BF16", fp8.scale_shape(shape))
            else:
                layout[part] = (checkpoint.stored_dtype(name), shape)
    return layout


def _is_nvfp4(part: str, shape: tuple[int, ...], experts: Format) -> bool:
    return experts == "nvfp4" and EXPERT.match(part) is not None and nvfp4.fits(shape)


def _shard_bytes(checkpoint: Checkpoint, names: list[str], experts: Format) -> int:
    return sum(math.prod(shape) * DTYPE_BYTES[dtype] for dtype, shape in _layout(checkpoint, names, experts).values())


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed * 1.02 > free:
        raise CheckpointError(f"{folder.parent}: {needed / 1e9:.1f} GB to write, {free / 1e9:.1f} GB free; choose another --out")


def _open_work(work: Path, checkpoint: Checkpoint, experts: Format) -> None:
    """The folder of unfinished work; what is there of another source is refused."""
    facts = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in checkpoint.weight_files()}
    origin = {"folder": str(checkpoint.folder.absolute()), "files": facts, "experts": experts}
    if (work / ORIGIN).exists():
        if read_json(work / ORIGIN) != origin:
            raise CheckpointError(f"{work}: unfinished work on another checkpoint or format; remove it to start again")
        return
    work.mkdir(parents=True, exist_ok=True)
    (work / ORIGIN).write_text(json.dumps(origin))


def write_shard(checkpoint: Checkpoint, names: list[str], path: Path, experts: Format) -> list[Rounding]:
    """Write the tensors `names`, matrices quantized; returns the report of the matrices."""
    report = []
    with safetensors_writer(path, _layout(checkpoint, names, experts)) as write, _Workers() as workers:
        for name in names:
            if not fp8.is_quantized(name):
                ((_, tensor),) = checkpoint.tensors([name])
                write(name, tensor_bytes(tensor))
                continue
            matrices = _matrices(checkpoint, name)
            for part, stored, cost in workers.map(lambda item: _rounded(*item, experts, checkpoint.folder), matrices):
                for suffix, data in stored.items():
                    write(part + suffix, tensor_bytes(data))
                report.append(cost)
    return report


class _Workers:
    """A thread for each core, in place of PyTorch's own threads, which cost more than they bring on matrices this small."""

    def __enter__(self) -> _Workers:
        self._count = len(os.sched_getaffinity(0))
        self._threads, self._pool = torch.get_num_threads(), ThreadPoolExecutor(self._count)
        torch.set_num_threads(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def map(self, function: Callable[[T], R], items: Iterator[T]) -> Iterator[R]:
        """Results in order, a few items ahead of the consumer."""
        ahead: deque[Future[R]] = deque()
        for item in items:
            ahead.append(self._pool.submit(function, item))
            if len(ahead) > 2 * self._count:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _rounded(part: str, weight: Tensor, experts: Format, folder: Path) -> tuple[str, dict[str, Tensor], Rounding]:
    """A matrix' name, what is stored for it by the suffix of that name, and what the rounding costs."""
    try:
        if _is_nvfp4(part, tuple(weight.shape), experts):
            packed, group_scale, whole = nvfp4.quantize(weight)
            stored = {"": packed, "_scale": group_scale, "_scale_2": whole}
            return part, stored, rounding(part, weight, nvfp4.dequantize(packed, group_scale, whole, torch.float32))
        q, scale = fp8.quantize(weight)
    except ValueError:
        raise CheckpointError(f"{folder}: not finite (NaN or infinity): {part}") from None
    return part, {"": q, fp8.SCALE_SUFFIX: scale}, rounding(part, weight, fp8.dequantize(q, scale, torch.float32))


def _matrices(checkpoint: Checkpoint, name: str) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a tensor by the names they get: itself, or gate, up and down of one expert after another."""
    if ".mlp.experts." not in name:
        yield name, checkpoint.load(name)
        return
    for expert, tensor in enumerate(checkpoint.experts(name)):
        bank = f"{name.rpartition('.')[0]}.{expert}"
        if name.endswith("gate_up_proj"):
            gate, up = tensor.chunk(2)
            yield f"{bank}.gate_proj.weight", gate
            yield f"{bank}.up_proj.weight", up
        else:
            yield f"{bank}.down_proj.weight", tensor


def rounding(name: str, weight: Tensor, stands_for: Tensor) -> Rounding:
    """Measure the error of a quantized matrix, in float32."""
    wide = weight.float()
    error = (stands_for - wide).square_().sum(-1)
    size = wide.square_().sum(-1) if wide is not weight else wide.square().sum(-1)
    worst = int((error / size.clamp(min=torch.finfo(torch.float32).tiny)).argmax())
    total = float((error.sum() / size.sum().clamp(min=torch.finfo(torch.float32).tiny)).sqrt())
    channel = float((error[worst] / size[worst].clamp(min=torch.finfo(torch.float32).tiny)).sqrt())
    return Rounding(name, total, worst, channel)


def _finish(work: Path, checkpoint: Checkpoint, files: dict[str, list[str]], experts: Format) -> list[Rounding]:
    weight_map: dict[str, str] = {}
    total = 0
    report: list[Rounding] = []
    for file, names in files.items():
        weight_map |= dict.fromkeys(_layout(checkpoint, names, experts), file)
        total += _shard_bytes(checkpoint, names, experts)
        report += [Rounding(**each) for each in json.loads((work / f"{file}.report").read_text())]
    (work / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    (work / REPORT).write_text(json.dumps({"summary": summary(report), "matrices": [asdict(each) for each in report]}))
    config: dict[str, Any] = read_json(checkpoint.folder / "config.json")
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
    }
    if experts == "nvfp4":
        config["quantization_config"]["experts"] = {"quant_algo": "NVFP4", "group_size": nvfp4.GROUP}
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in checkpoint.folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not (work / path.name).exists():
            shutil.copyfile(path, work / path.name)
    for file in files:
        (work / f"{file}.report").unlink()
    (work / ORIGIN).unlink()
    return report


def summary(report: list[Rounding]) -> dict[str, dict[str, Any]]:
    """Mean and largest relative error, and the worst channel, of every part of the model."""
    parts: dict[str, list[Rounding]] = {}
    for each in report:
        parts.setdefault(part_of(each.name), []).append(each)
    table = {}
    for part, items in parts.items():
        worst = max(items, key=lambda each: each.worst_channel_error)
        table[part] = {
            "matrices": len(items),
            "relative_error_mean": sum(each.relative_error for each in items) / len(items),
            "relative_error_max": max(each.relative_error for each in items),
            "worst_channel_error": worst.worst_channel_error,
            "worst_channel": f"{worst.name} row {worst.worst_channel}",
        }
    return table
