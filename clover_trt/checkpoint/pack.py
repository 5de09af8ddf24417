"""Write tensors that are read one after another into one safetensors file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from clover_trt.checkpoint.safetensors_file import safetensors_writer


class Packed(NamedTuple):
    """A tensor to be written: dtype (safetensors name), shape, and how to get it, once."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy when it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def pack(tensors: dict[str, Packed], path: Path) -> None:
    """Write `tensors` in their order; one at a time is in memory."""
    with safetensors_writer(path, {name: (each.dtype, each.shape) for name, each in tensors.items()}) as write:
        for name, each in tensors.items():
            write(name, tensor_bytes(each.read()))
