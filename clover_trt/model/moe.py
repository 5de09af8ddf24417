"""Mixture of experts with the routing of a noisy block restricted to an expert subset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clover_trt.model.lengths import Lengths
from clover_trt.model.ops import BlockOps

if TYPE_CHECKING:
    from clover_trt.config import ModelConfig


def kept_experts(probs: Tensor, noisy: Tensor, mass: Tensor, top_k: int) -> Tensor:
    """The expert subset of each row.

    Scores of each noisy token's top-k candidates are summed per expert; experts are ranked by that sum
    (ties: lower id first) and the smallest leading set that holds `mass` of the total is kept, never fewer
    than `top_k`; mass 1 keeps every candidate.

    Args:
        probs: `[B, T, E]` float32, router softmax.
        noisy: `[B, T]` bool.
        mass: `[B]` float32 in (0, 1].
        top_k: experts per token.

    Returns:
        `[B, E]` bool.
    """
    value, index = probs.topk(top_k, dim=-1)  # [B, T, K]
    scores = torch.zeros_like(probs).scatter(2, index, value)
    scores = (scores * noisy[..., None]).sum(1)  # [B, E]
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    needed = mass[:, None] * ranked.sum(-1, keepdim=True)
    keep = (before < needed) | (mass[:, None] >= 1.0)
    keep = (keep & (ranked > 0)) | (torch.arange(probs.shape[-1], device=probs.device) < top_k)
    return torch.zeros_like(keep).scatter(1, order, keep)


def route(logits: Tensor, lengths: Lengths, mass: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Choose each token's experts; noisy tokens choose inside their row's subset.

    Args:
        logits: `[B, T, E]`, router output.
        lengths: the row lengths.
        mass: `[B]` float32.
        top_k: experts per token.

    Returns:
        weights `[B, T, K]` float32, renormalised to sum 1, and expert ids `[B, T, K]` int64.
    """
    probs = torch.softmax(logits.float(), dim=-1)
    _, noisy = lengths.masks(logits.shape[1])
    allowed = kept_experts(probs, noisy, mass, top_k)[:, None] | ~noisy[..., None]  # [B, T, E]
    weights, index = probs.masked_fill(~allowed, -1.0).topk(top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), index


def expert_outputs(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, index: Tensor) -> Tensor:
    """Weighted sum of each token's experts, `down(silu(gate) * up)`, one expert after another.

    Args:
        x: `[N, H]`.
        gate_up: `[E, 2I, H]`, gate rows first.
        down: `[E, H, I]`.
        weights, index: `[N, K]`.
    """
    out = torch.zeros_like(x)
    for expert in index.unique().tolist():
        token, slot = (index == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        part = F.linear(F.silu(gate) * up, down[expert]) * weights[token, slot, None].to(x.dtype)
        out = out.index_add(0, token, part)
    return out


def expert_subset_moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    shared: tuple[Tensor, ...],
    lengths: Lengths,
    mass: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """Reference of `clover::ExpertSubsetMoe`.

    Args:
        x: `[B, T, H]`.
        router: `[E, H]`.
        gate_up: `[E, 2I, H]`, gate rows first.
        down: `[E, H, I]`.
        shared: gate `[S, H]`, up `[S, H]`, down `[H, S]` of the shared expert and its scalar gate `[1, H]`.
        lengths: the row lengths.
        mass: `[B]` float32 in (0, 1], the subset's share of the summed routing scores.
        top_k: experts per token.

    Returns:
        `[B, T, H]`, and the number of distinct experts that this call's tokens (padding aside) use, `[1]` int64.
    """
    weights, index = route(F.linear(x, router), lengths, mass, top_k)
    committed, noisy = lengths.masks(x.shape[1])
    used = torch.zeros(router.shape[0], dtype=torch.bool, device=x.device)
    used[index[committed | noisy].flatten()] = True
    flat = x.flatten(0, 1)
    out = expert_outputs(flat, gate_up, down, weights.flatten(0, 1), index.flatten(0, 1))
    return (out + shared_expert(flat, *shared)).view_as(x), used.sum()[None]


def shared_expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, scalar_gate: Tensor) -> Tensor:
    """The expert every token uses, behind its sigmoid gate; `x` and result `[..., H]`."""
    return torch.sigmoid(F.linear(x, scalar_gate)) * F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class ExpertBank(nn.Module):
    """Routed expert weights, stacked: `gate_up_proj [E, 2I, H]`, `down_proj [E, H, I]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, H, width = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * width, H).normal_(std=0.02))
        self.down_proj = nn.Parameter(torch.empty(E, H, width).normal_(std=0.02))


class SharedExpert(nn.Module):
    """Weights of the shared expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        H, width = config.hidden_size, config.shared_expert_intermediate_size
        self.gate_proj = nn.Linear(H, width, bias=False)
        self.up_proj = nn.Linear(H, width, bias=False)
        self.down_proj = nn.Linear(width, H, bias=False)


class SparseMoe(nn.Module):
    """Router, routed experts and shared expert of one layer."""

    def __init__(self, config: ModelConfig, ops: BlockOps) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = ExpertBank(config)
        self.shared_expert = SharedExpert(config)
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)
        self.ops = ops

    def forward(self, x: Tensor, lengths: Lengths, mass: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[B, T, H]` to `[B, T, H]`, and the number of distinct experts used, `[1]` int64."""
        one = self.shared_expert
        shared = (one.gate_proj.weight, one.up_proj.weight, one.down_proj.weight, self.shared_expert_gate.weight)
        bank = self.experts
        out, distinct = self.ops.expert_subset_moe(
            x, self.gate.weight, bank.gate_up_proj, bank.down_proj, shared, lengths, mass, self.top_k
        )
        return out, distinct
