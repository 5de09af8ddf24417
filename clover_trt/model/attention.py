"""Full attention: causal over committed tokens, bidirectional inside the noisy block."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from clover_trt.model.lengths import Lengths
from clover_trt.model.norm import RMSNorm
from clover_trt.model.ops import BlockOps
from clover_trt.model.rotary import rotate

if TYPE_CHECKING:
    from clover_trt.config import ModelConfig


class AttentionCache(NamedTuple):
    """Keys and values of the prefix, each `[B, kv_heads, M, head_dim]`; rows at and past `prefix_len` are free."""

    key: Tensor
    value: Tensor


def visible_keys(lengths: Lengths, cached: int, tokens: int) -> Tensor:
    """Which keys each query sees.

    A committed token sees the prefix and committed tokens up to itself; a noisy token sees the prefix,
    all committed tokens of the call and all noisy tokens of its block.

    Returns:
        `[B, T, M + T]` bool, the M cache rows first, then the T tokens of this call.
    """
    committed, noisy = lengths.masks(tokens)
    index = torch.arange(tokens, device=committed.device)
    causal = index[:, None] >= index[None, :]  # [T, T]
    to_committed = committed[:, None, :] & (causal[None] | noisy[:, :, None])
    to_noisy = noisy[:, None, :] & noisy[:, :, None]
    in_prefix = torch.arange(cached, device=committed.device)[None] < lengths.prefix_len[:, None]  # [B, M]
    return torch.cat((in_prefix[:, None].expand(-1, tokens, -1), to_committed | to_noisy), dim=-1)


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Lengths
) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of `clover::BlockAttention`.

    Args:
        query: `[B, T, heads, head_dim]`, normed and rotated.
        key, value: `[B, T, kv_heads, head_dim]`, of this call's tokens.
        key_cache, value_cache: `[B, kv_heads, M, head_dim]`.
        lengths: the row lengths.

    Returns:
        out `[B, T, heads * head_dim]` and the two caches with the committed rows written.
    """
    B, T, heads, head_dim = query.shape
    groups = heads // key.shape[2]
    key, value = key.transpose(1, 2), value.transpose(1, 2)  # [B, kv, T, D]
    keys = torch.cat((key_cache, key), dim=2).repeat_interleave(groups, dim=1)
    values = torch.cat((value_cache, value), dim=2).repeat_interleave(groups, dim=1)
    scores = query.transpose(1, 2) @ keys.transpose(2, 3) * head_dim**-0.5  # [B, heads, T, M + T]
    seen = visible_keys(lengths, key_cache.shape[2], T)[:, None]
    # Padding sees nothing; a finite floor keeps its softmax a number.
    scores = scores.float().masked_fill(~seen, torch.finfo(torch.float32).min)
    out = torch.softmax(scores, dim=-1).to(query.dtype) @ values  # [B, heads, T, D]
    caches = (_append(key_cache, key, lengths), _append(value_cache, value, lengths))
    return out.transpose(1, 2).reshape(B, T, heads * head_dim), *caches


def _append(cache: Tensor, rows: Tensor, lengths: Lengths) -> Tensor:
    """A copy of `cache` with the committed `rows` `[B, kv, T, D]` written behind each row's prefix."""
    committed, _ = lengths.masks(rows.shape[2])
    batch, token = committed.nonzero(as_tuple=True)
    cache = cache.clone()
    cache[batch, :, lengths.prefix_len[batch].long() + token] = rows[batch, :, token]
    return cache


class Attention(nn.Module):
    """Gated grouped-query attention with normed queries and keys and partial rotary embedding."""

    def __init__(self, config: ModelConfig, ops: BlockOps) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim * 2, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.ops = ops

    def forward(
        self, x: Tensor, cache: AttentionCache, lengths: Lengths, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, AttentionCache]:
        """`x` `[B, T, H]` to `[B, T, H]`, and the cache advanced by `commit_len`."""
        B, T, _ = x.shape
        query, gate = self.q_proj(x).view(B, T, self.heads, 2 * self.head_dim).chunk(2, dim=-1)
        key = self.k_proj(x).view(B, T, self.kv_heads, self.head_dim)
        value = self.v_proj(x).view(B, T, self.kv_heads, self.head_dim)
        query, key = rotate(self.q_norm(query), *angles), rotate(self.k_norm(key), *angles)
        out, key_cache, value_cache = self.ops.block_attention(query, key, value, cache.key, cache.value, lengths)
        return self.o_proj(out * torch.sigmoid(gate.reshape(B, T, -1))), AttentionCache(key_cache, value_cache)
