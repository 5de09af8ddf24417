"""Partial rotary position embedding (https://arxiv.org/abs/2104.09864), half-rotation form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from clover_trt.config import ModelConfig


def rotary_angles(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotation of each position.

    Args:
        positions: `[B, T]` int64, absolute positions.
        config: gives `rope_theta` and the number of rotated channels R.

    Returns:
        cos, sin: `[B, T, R]` float32, the half of frequencies repeated twice.
    """
    exponent = torch.arange(0, config.rotary_dim, 2, device=positions.device).float() / config.rotary_dim
    inv_freq = 1.0 / (config.rope_theta**exponent)  # [R/2]
    angles = positions.float()[..., None] * inv_freq  # [B, T, R/2]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of every head.

    Args:
        x: `[B, T, heads, head_dim]`.
        cos, sin: `[B, T, R]`, cast to the dtype of `x` first, as the published model does.
    """
    cos, sin = cos.to(x.dtype)[:, :, None], sin.to(x.dtype)[:, :, None]
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned[..., : width // 2], turned[..., width // 2 :]
    swapped = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos + swapped * sin, rest), dim=-1)
