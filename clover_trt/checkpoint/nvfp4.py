"""NVFP4 expert weights: e2m1 values, an e4m3 scale for 16 of them, and one float32 scale for the matrix.

`weight = e2m1 * weight_scale * weight_scale_2`, the layout of NVIDIA's published NVFP4 checkpoints: two values a byte, the first
in the low half. Source of the format: NVIDIA, "Introducing NVFP4 for efficient and accurate low-precision inference", 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clover_trt.checkpoint.fp8 import FP8, LARGEST

GROUP = 16
LARGEST_E2M1 = 6.0
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIGNED = torch.cat((VALUES, -VALUES))  # by code
PAIRS = torch.stack((SIGNED.repeat(16), SIGNED.repeat_interleave(16)), dim=1)  # [256, 2], the two values of a byte


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a matrix of this shape divides into groups."""
    return shape[-1] % GROUP == 0


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a matrix `[rows, columns]`, columns a multiple of 16, to NVFP4.

    Returns:
        packed values `[rows, columns / 2]` uint8, scales `[rows, columns / 16]` e4m3, and the matrix scale, float32 `[]`.

    Raises:
        ValueError: a value is not finite.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1)
    if not torch.isfinite(amax).all():
        raise ValueError("a weight to quantize holds NaN or infinity")
    whole = (amax.max() / (LARGEST_E2M1 * LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = (amax / (LARGEST_E2M1 * whole)).clamp(max=LARGEST).to(FP8)
    step = scale.float() * whole
    scaled = torch.where(step[..., None] > 0, groups / step[..., None], torch.zeros(())).flatten(-2)
    return _pack(_codes(scaled)), scale, whole


def _codes(scaled: Tensor) -> Tensor:
    """The nearest e2m1 code of each float32 value; ties go to the even code, what is beyond 6 becomes 6.

    From 1 on a code is the low exponent bits and the first mantissa bit of the value, rounded there; below, the steps of 0.5 are
    those of the numbers from 2^22 on.
    """
    size = scaled.abs().clamp_(max=LARGEST_E2M1)
    bits = size.view(torch.int32)
    above = (bits + 0x1FFFFF + (bits >> 22 & 1) >> 22) - 252
    below = (size + 2.0**22).view(torch.int32) - 0x4A800000
    return (torch.where(size < 1, below, above) | scaled.view(torch.int32) >> 28 & 8).to(torch.uint8)


def _pack(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | codes[..., 1::2] << 4


def interleave(packed: Tensor) -> Tensor:
    """Packed values as the kernels take them: the eight of each four bytes in the order 0 2 4 6 1 3 5 7, which they widen
    fastest; columns a multiple of 8. The shape stays; int8, since TensorRT hands plugins no uint8.
    """
    pairs = packed.unflatten(-1, (-1, 2, 2))
    first, second = pairs.unbind(-1)
    even, odd = first & 15 | second << 4, first >> 4 | second & 0xF0
    return torch.cat((even, odd), dim=-1).flatten(-2).view(torch.int8)


def dequantize_bank(packed: Tensor, scale: Tensor, whole: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`dequantize` of matrices of one size stacked along their rows; `whole` `[matrices]` has the scale of each."""
    return dequantize(packed, scale, whole.repeat_interleave(len(packed) // len(whole))[:, None], dtype)


def dequantize(packed: Tensor, scale: Tensor, whole: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The matrix `[rows, columns]` that packed values and scales stand for."""
    step = scale.float() * whole.float()
    grouped = PAIRS[packed.int()].reshape(*step.shape, GROUP)
    return (grouped * step[..., None]).flatten(-2).to(dtype)
