"""FP8 weights in the layout of Qwen's published FP8 checkpoints: e4m3 with one scale for each 128 x 128 block.

`weight = fp8 * weight_scale_inv`, block by block; blocks at the edge may be smaller. Routers, norms, gates, convolutions,
states, embeddings and the language-model head stay in their own precision.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from clover_trt.config import ModelConfig

BLOCK = 128
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448
SCALE_SUFFIX = "_scale_inv"
QUANTIZED = re.compile(
    r"\.(self_attn\.[qkvo]_proj\.weight|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight"
    r"|mlp\.shared_expert\.(gate|up|down)_proj\.weight|mlp\.experts\.(gate_up|down)_proj)$"
)


def is_quantized(name: str) -> bool:
    """Whether the tensor `name` (our name, experts stacked) is FP8 in a quantized checkpoint."""
    return QUANTIZED.search(name) is not None


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight `[..., rows, columns]`."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


def bank_scale_shape(name: str, config: ModelConfig) -> tuple[int, ...]:
    """Shape of the scales of a stacked expert tensor; gate and up rows have blocks of their own."""
    H, width = config.hidden_size, config.moe_intermediate_size
    if name.endswith("gate_up_proj"):
        rows, columns = scale_shape((width, H))
        return config.num_experts, 2 * rows, columns
    return scale_shape((config.num_experts, H, width))


def _blocks(weight: Tensor) -> Tensor:
    """A weight as `[..., row blocks, 128, column blocks, 128]`, padded with zeros where the last block is smaller."""
    rows, columns = weight.shape[-2:]
    if rows % BLOCK or columns % BLOCK:
        weight = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    *batch, rows, columns = weight.shape
    return weight.reshape(*batch, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)


def _scaled(blocks: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """`blocks` times a scale each, as `[..., rows, columns]`."""
    return (blocks * scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight `[..., rows, columns]` to e4m3 by blocks.

    A scale is `amax / 448` rounded up to bfloat16, so that no value saturates; an all-zero block has scale 1.

    Returns:
        the e4m3 tensor, and the bfloat16 scales.

    Raises:
        ValueError: a value is not finite.
    """
    blocks = _blocks(weight)
    amax = blocks.abs().amax(dim=(-1, -3)).float()
    if not torch.isfinite(amax).all():
        raise ValueError("a weight to quantize holds NaN or infinity")
    scale = _round_up((amax / LARGEST).clamp(min=torch.finfo(torch.bfloat16).tiny))
    scale = torch.where(amax == 0, torch.ones((), dtype=torch.bfloat16), scale)
    return _scaled(blocks.float(), 1.0 / scale.float(), *weight.shape[-2:]).to(FP8).contiguous(), scale


def _round_up(value: Tensor) -> Tensor:
    """The smallest bfloat16 that is not below a positive float32."""
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def widen(values: Tensor) -> Tensor:
    """e4m3 to float32, several times as fast as PyTorch's own cast on the CPU; not for NaN.

    The bits are moved to where bfloat16 has sign, exponent and mantissa; 2^120 makes up for the different exponent bias.
    """
    bits = values.view(torch.uint8).to(torch.int16)
    moved = (bits & 0x7F) << 4 | (bits & 0x80) << 8
    return moved.view(torch.bfloat16).float() * 2.0**120


def dequantize(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The weight `[..., rows, columns]` that an e4m3 weight and its scales stand for; bfloat16 is what engines compute with."""
    return _scaled(_blocks(widen(weight)), scale.float(), *weight.shape[-2:]).to(dtype)


def quantize_bank(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` of stacked gate and up projections `[E, 2I, H]`, whose halves have blocks of their own."""
    halves = [quantize(half) for half in gate_up.chunk(2, dim=-2)]
    return torch.cat([q for q, _ in halves], dim=-2), torch.cat([s for _, s in halves], dim=-2)


def dequantize_bank(gate_up: Tensor, scale: Tensor) -> Tensor:
    """`dequantize` of stacked gate and up projections."""
    halves = zip(gate_up.chunk(2, dim=-2), scale.chunk(2, dim=-2), strict=True)
    return torch.cat([dequantize(weight, part) for weight, part in halves], dim=-2)
