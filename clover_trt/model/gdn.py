"""Gated DeltaNet: a causal gated delta rule for committed tokens, block softmax over noisy ones.

Sources: the gated delta rule is https://arxiv.org/abs/2412.06464, its chunked form
https://arxiv.org/abs/2406.06484; the treatment of noisy tokens (rule `softmax_memory`) is this
project's reading of what Clover's authors state, see docs/block-step.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clover_trt.model.lengths import Lengths
from clover_trt.model.norm import GatedRMSNorm, l2_norm
from clover_trt.model.ops import BlockOps

if TYPE_CHECKING:
    from clover_trt.config import ModelConfig

CHUNK = 32


class GdnCache(NamedTuple):
    """State after the prefix: the last inputs of the convolution `[B, C, kernel - 1]` and the recurrent
    memory `[B, v_heads, k_dim, v_dim]`, always float32."""

    conv: Tensor
    recurrent: Tensor


class GdnWeights(NamedTuple):
    """Weights that act inside the scan: convolutions `[C, 1, kernel]` and `[C, 1, right_kernel]`, the rest `[v_heads]`."""

    conv: Tensor
    right_conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    temperature: Tensor
    memory_bias: Tensor
    memory_slope: Tensor


def block_convolution(x: Tensor, conv_state: Tensor, weights: GdnWeights, lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Depthwise convolution: left over state and row, right over the noisy block only, then SiLU.

    Args:
        x: `[B, T, C]`.
        conv_state: `[B, C, kernel - 1]`, inputs before the row.
        weights: `conv` is ordered oldest input first; column j of `right_conv` weighs position i + 1 + j.
        lengths: the row lengths.

    Returns:
        `[B, T, C]` in the dtype of `x`, and the state after the committed tokens.
    """
    left_taps, right_taps = weights.conv[:, 0].float().unbind(1), weights.right_conv[:, 0].float().unbind(1)
    T, kernel = x.shape[1], len(left_taps)
    _, noisy = lengths.masks(T)
    history = torch.cat((conv_state.transpose(1, 2).to(x.dtype), x), dim=1)  # [B, kernel - 1 + T, C]
    wide = history.float()
    left = sum(wide[:, j : j + T] * tap for j, tap in enumerate(left_taps))
    block = F.pad(x.float() * noisy[..., None], (0, 0, 0, len(right_taps)))
    right = sum(block[:, j : j + T] * tap for j, tap in enumerate(right_taps, start=1))
    out = F.silu((left + right * noisy[..., None]).to(x.dtype))
    window = lengths.commit_len[:, None].long() + torch.arange(kernel - 1, device=x.device)  # [B, kernel - 1]
    state = history.gather(1, window[..., None].expand(-1, -1, x.shape[2]))
    return out, state.transpose(1, 2).to(conv_state.dtype)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gated delta rule in chunks:
    `S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T`, `o_t = S_t^T q_t`.

    A token with `g = 0` and `beta = 0` leaves the state alone and reads it.

    Args:
        q, k: `[B, heads, T, k_dim]`, normed, the scale already in `q`.
        v: `[B, heads, T, v_dim]`.
        g, beta: `[B, heads, T]`, log decay and write strength.
        state: `[B, heads, k_dim, v_dim]`.

    Returns:
        o `[B, heads, T, v_dim]` and the state after the last token.
    """
    T, k_dim, v_dim = q.shape[2], q.shape[3], v.shape[3]
    pad = -T % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))  # [B, h, chunks, CHUNK, D]
    g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, CHUNK)) for x in (g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()  # [.., t, s], s <= t
    write = (beta[..., None] * decay * (k @ k.transpose(-1, -2))).tril(-1)
    targets = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(write + torch.eye(CHUNK, device=q.device, dtype=q.dtype), targets, upper=False)
    from_value, from_state = solved.split((v_dim, k_dim), dim=-1)
    read = decay * (q @ k.transpose(-1, -2))
    outs = []
    for c in range(q.shape[2]):
        update = from_value[:, :, c] - from_state[:, :, c] @ state  # [B, h, CHUNK, v]
        outs.append(total[:, :, c].exp()[..., None] * (q[:, :, c] @ state) + read[:, :, c] @ update)
        last = total[:, :, c, -1]
        carry = (last[..., None] - total[:, :, c]).exp()[..., None] * k[:, :, c]
        state = last.exp()[..., None, None] * state + carry.transpose(-1, -2) @ update
    return torch.cat(outs, dim=2)[:, :, :T], state


def block_softmax(q: Tensor, k: Tensor, v: Tensor, memory: Tensor, weights: GdnWeights, lengths: Lengths) -> Tensor:
    """In-block softmax with the recurrent memory as one more entry (rule `softmax_memory`).

    `logit_ij = temperature * (q_i . k_j)` over the block, `logit_i,mem = memory_bias + memory_slope *
    log(1 + n)` with n = prefix_len + commit_len; the memory entry is left out when n = 0.

    Args:
        q, k: `[B, v_heads, T, k_dim]`, normed, unscaled.
        v, memory: `[B, v_heads, T, v_dim]`; `memory` is `S^T q / sqrt(k_dim)`.
        weights: the per-head controls.
        lengths: the row lengths; only noisy tokens take part.

    Returns:
        `[B, v_heads, T, v_dim]`, meaningful at noisy tokens only.
    """
    _, noisy = lengths.masks(q.shape[2])
    logits = weights.temperature.float()[None, :, None, None] * (q @ k.transpose(-1, -2))  # [B, h, T, T]
    logits = logits.masked_fill(~noisy[:, None, None], torch.finfo(torch.float32).min)
    n = (lengths.prefix_len + lengths.commit_len).float()[:, None]  # [B, 1]
    memory_logit = weights.memory_bias.float() + weights.memory_slope.float() * torch.log1p(n)  # [B, h]
    memory_logit = memory_logit.masked_fill(n == 0, -torch.inf)[:, :, None, None].expand(-1, -1, q.shape[2], -1)
    mix = torch.softmax(torch.cat((memory_logit, logits), dim=-1), dim=-1)
    return mix[..., :1] * memory + mix[..., 1:] @ v


def gdn_block_scan(
    qkv: Tensor, a: Tensor, b: Tensor, weights: GdnWeights, cache: GdnCache, lengths: Lengths
) -> tuple[Tensor, GdnCache]:
    """Reference of `clover::GdnBlockScan`: everything between the input projections and the gated norm.

    Args:
        qkv: `[B, T, C]`, C = 2 * k_heads * k_dim + v_heads * v_dim.
        a, b: `[B, T, v_heads]`, inputs of the decay `g = -exp(A_log) softplus(a + dt_bias)` and of the
            write strength `beta = sigmoid(b)`.
        weights: weights inside the scan.
        cache: state after the prefix.
        lengths: the row lengths.

    Returns:
        `[B, T, v_heads, v_dim]` in the dtype of `qkv`, and the state advanced by `commit_len`.
    """
    B, T, C = qkv.shape
    v_heads, k_dim, v_dim = cache.recurrent.shape[1:]
    key_dim = (C - v_heads * v_dim) // 2
    mixed, conv_state = block_convolution(qkv, cache.conv, weights, lengths)
    q, k, v = mixed.float().split((key_dim, key_dim, v_heads * v_dim), dim=-1)
    q, k = (l2_norm(x.view(B, T, -1, k_dim)).transpose(1, 2) for x in (q, k))  # [B, k_heads, T, k_dim]
    q, k = (x.repeat_interleave(v_heads // x.shape[1], dim=1) for x in (q, k))
    v = v.view(B, T, v_heads, v_dim).transpose(1, 2)
    committed, noisy = (mask[..., None] for mask in lengths.masks(T))
    g = -weights.A_log.float().exp() * F.softplus(a.float() + weights.dt_bias.float()) * committed
    beta = b.sigmoid().float() * committed
    scanned, state = gated_delta_rule(q * k_dim**-0.5, k, v, g.transpose(1, 2), beta.transpose(1, 2), cache.recurrent)
    mixed_block = block_softmax(q, k, v, scanned, weights, lengths)
    out = torch.where(noisy[:, None], mixed_block, scanned)
    return out.transpose(1, 2).to(qkv.dtype), GdnCache(conv_state, state)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet layer with Clover's added right convolution and block softmax controls."""

    def __init__(self, config: ModelConfig, ops: BlockOps) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        self.heads, self.v_dim = heads, config.linear_value_head_dim
        self.in_proj_qkv = nn.Linear(hidden, config.conv_dim, bias=False)
        self.in_proj_z = nn.Linear(hidden, config.value_dim, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.out_proj = nn.Linear(config.value_dim, hidden, bias=False)
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.conv1d = nn.Conv1d(
            config.conv_dim, config.conv_dim, config.linear_conv_kernel_dim, groups=config.conv_dim, bias=False
        )
        self.right_conv1d = nn.Conv1d(
            config.conv_dim, config.conv_dim, config.linear_right_conv_kernel_dim, groups=config.conv_dim, bias=False
        )
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16).log())
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.block_temperature = nn.Parameter(torch.full((heads,), config.linear_key_head_dim**0.5))
        self.memory_bias = nn.Parameter(torch.zeros(heads))
        self.memory_slope = nn.Parameter(torch.zeros(heads))
        self.ops = ops

    def weights(self) -> GdnWeights:
        """The weights that act inside the scan."""
        return GdnWeights(
            self.conv1d.weight,
            self.right_conv1d.weight,
            self.A_log,
            self.dt_bias,
            self.block_temperature,
            self.memory_bias,
            self.memory_slope,
        )

    def forward(self, x: Tensor, cache: GdnCache, lengths: Lengths) -> tuple[Tensor, GdnCache]:
        """`x` `[B, T, H]` to `[B, T, H]`, and the state advanced by `commit_len`."""
        qkv, z, a, b = self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_a(x), self.in_proj_b(x)
        out, cache = self.ops.gdn_block_scan(qkv, a, b, self.weights(), cache, lengths)
        out = self.norm(out, z.view(*z.shape[:2], self.heads, self.v_dim))
        return self.out_proj(out.flatten(2)), cache
