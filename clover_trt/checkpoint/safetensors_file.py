"""Checked reading and streamed writing of one safetensors file (https://github.com/huggingface/safetensors, its format)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clover_trt.errors import CheckpointError

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
MAX_HEADER = 100_000_000
Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: its file, dtype (safetensors name), shape, and byte range in the file."""

    path: Path
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.begin


def file_head(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """What a safetensors file of these dtypes and shapes begins with; the tensors follow in order, one behind the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def safetensors_writer(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Iterator[Callable[[str, Buffer], None]]:
    """Write a file one tensor after another, so that none but the present one is in memory.

    Args:
        path: the file; it is written beside itself and renamed at the end, so that a partial file never has its name.
        tensors: dtype (safetensors name) and shape of each tensor, in the order they will be written.

    Yields:
        `write(name, data)`, to be called once for each tensor in that order.
    """
    left = list(tensors)
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(file_head(tensors))

            def write(name: str, data: Buffer) -> None:
                dtype, shape = tensors[name]
                view = memoryview(data).cast("B")
                assert name == left.pop(0), name
                assert view.nbytes == math.prod(shape) * DTYPE_BYTES[dtype], (name, view.nbytes, shape)
                file.write(view)

            yield write
            assert not left, left
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header; no tensor data is read.

    Raises:
        CheckpointError: the file is missing, truncated or corrupt; the message names it and what is wrong.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(MAX_HEADER, size - 8):
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file: {size} bytes, header said to be {length}; download it again"
                )
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: not found; the checkpoint is incomplete, download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: corrupt safetensors header ({error}); download it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: corrupt safetensors header (not an object); download it again")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {name: _entry(path, name, entry, start) for name, entry in header.items()}
    _check_ranges(path, tensors, start, size)
    return tensors


def _entry(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
        expected = math.prod(shape) * DTYPE_BYTES[dtype]
        valid = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: corrupt header entry of tensor {name!r}: {entry!r}; download it again") from None
    if not valid or end - begin != expected:
        raise CheckpointError(
            f"{path}: tensor {name!r} of {dtype} {list(shape)} needs {expected} bytes, "
            f"its range [{begin}, {end}) differs; download it again"
        )
    return TensorInfo(path, name, dtype, shape, start + begin, start + end)


def _check_ranges(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """Tensors must lie one behind the other and fill the file, so that no byte is lost or read twice."""
    at = start
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != at:
            raise CheckpointError(
                f"{path}: corrupt header: tensor {info.stored_name!r} begins at byte {info.begin}, expected {at}"
            )
        at = info.end
    if at != size:
        kind = "truncated" if size < at else "has stray bytes at its end"
        raise CheckpointError(f"{path}: {kind}: {size} bytes, the header describes {at}; download it again")
