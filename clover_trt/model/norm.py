"""Root-mean-square norms of the backbone, computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last axis, the form Gated DeltaNet uses for queries and keys."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """Zero-centred norm: `x / rms(x) * (1 + weight)`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm over the last axis; same shape and dtype as `x`."""
        return F.rms_norm(x.float(), x.shape[-1:], 1.0 + self.weight.float(), self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """`x / rms(x) * weight * silu(gate)`; the weight is not zero-centred."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x`, `gate` of one shape, normed over the last axis; the result has the dtype of `x`."""
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)
        return (self.weight * normed * F.silu(gate.float())).to(x.dtype)
