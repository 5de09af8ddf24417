"""The block step: one forward that prefills, denoises and commits, see docs/block-step.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from clover_trt.model.attention import Attention, AttentionCache, block_attention
from clover_trt.model.gdn import GatedDeltaNet, GdnCache, gdn_block_scan
from clover_trt.model.head import Controls, HeadOutput, confidence_head, vocabulary_mask
from clover_trt.model.lengths import Lengths
from clover_trt.model.moe import SparseMoe, expert_subset_moe
from clover_trt.model.norm import RMSNorm
from clover_trt.model.ops import BlockOps
from clover_trt.model.rotary import rotary_angles

if TYPE_CHECKING:
    from clover_trt.config import ModelConfig

LayerCache = AttentionCache | GdnCache
REFERENCE_OPS = BlockOps(
    block_attention=block_attention,
    gdn_block_scan=gdn_block_scan,
    expert_subset_moe=expert_subset_moe,
    confidence_head=confidence_head,
)


class StepOutput(NamedTuple):
    """Result of one step."""

    head: HeadOutput  # candidates of the wanted positions
    caches: list[LayerCache]  # advanced by commit_len
    distinct_experts: Tensor  # [layers] int64
    hidden: list[Tensor]  # [B, T, H] after the embedding and after each layer


class DecoderLayer(nn.Module):
    """Mixer (attention or Gated DeltaNet) and mixture of experts, each behind a norm and a residual."""

    def __init__(self, config: ModelConfig, index: int, ops: BlockOps) -> None:
        super().__init__()
        self.is_attention = config.layer_types[index] == "full_attention"
        if self.is_attention:
            self.self_attn = Attention(config, ops)
        else:
            self.linear_attn = GatedDeltaNet(config, ops)
        self.mlp = SparseMoe(config, ops)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cache: LayerCache, lengths: Lengths, angles: tuple[Tensor, Tensor], mass: Tensor
    ) -> tuple[Tensor, LayerCache, Tensor]:
        """`x` `[B, T, H]` to `[B, T, H]`; also the advanced cache and the distinct experts used."""
        x, cache = self.mix(x, cache, lengths, angles)
        routed, distinct = self.mlp(self.post_attention_layernorm(x), lengths, mass)
        return x + routed, cache, distinct

    def mix(self, x: Tensor, cache: LayerCache, lengths: Lengths, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, LayerCache]:
        """The layer's first half: attention or Gated DeltaNet, and its residual."""
        normed = self.input_layernorm(x)
        if self.is_attention:
            mixed, cache = self.self_attn(normed, cache, lengths, angles)
        else:
            mixed, cache = self.linear_attn(normed, cache, lengths)
        return x + mixed, cache


class Backbone(nn.Module):
    """Embedding, layers and last norm, under the names a published checkpoint uses."""

    def __init__(self, config: ModelConfig, ops: BlockOps) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, ops) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CloverModel(nn.Module):
    """Reference model of the block step.

    Args:
        config: geometry.
        valid_tokens: vocabulary rows the tokenizer knows; later rows are padding and never candidates.
        ops: implementations of the four operations.
    """

    def __init__(self, config: ModelConfig, valid_tokens: int | None = None, ops: BlockOps = REFERENCE_OPS) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.model = Backbone(config, ops)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        mask = vocabulary_mask(config, config.vocab_size if valid_tokens is None else valid_tokens)
        self.register_buffer("vocab_mask", mask, persistent=False)

    def hidden(
        self, input_ids: Tensor, lengths: Lengths, mass: Tensor, caches: list[LayerCache]
    ) -> tuple[list[Tensor], list[LayerCache], Tensor]:
        """Run the layers.

        Returns:
            the hidden states `[B, T, H]` after the embedding and after each layer, the advanced caches, and
            the distinct experts per layer `[layers]`.
        """
        x = self.model.embed_tokens(input_ids)
        positions = lengths.prefix_len[:, None].long() + torch.arange(input_ids.shape[1], device=x.device)
        angles = rotary_angles(positions, self.config)
        states, advanced, distinct = [x], [], []
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x, cache, count = layer(x, cache, lengths, angles, mass)
            states.append(x)
            advanced.append(cache)
            distinct.append(count)
        return states, advanced, torch.cat(distinct)

    def forward(
        self,
        input_ids: Tensor,
        lengths: Lengths,
        logit_index: Tensor,
        mass: Tensor,
        controls: Controls,
        caches: list[LayerCache],
        candidates: int | Tensor = 1,
    ) -> StepOutput:
        """One block step.

        Args:
            input_ids: `[B, T]` int64; the mask token at unresolved positions.
            lengths: row lengths; `commit_len + noisy_len <= T`, the rest of a row is padding.
            logit_index: `[B, L]` int64, positions within the row that get candidates.
            mass: `[B]` float32, expert-subset mass of the noisy tokens.
            controls: logit controls.
            caches: one per layer, see `new_caches`.
            candidates: k, candidates per position; a tensor `[1]` while tracing.
        """
        states, advanced, distinct = self.hidden(input_ids, lengths, mass, caches)
        wanted = logit_index[..., None].expand(-1, -1, states[-1].shape[-1])
        last = self.model.norm(states[-1].gather(1, wanted))
        head = self.ops.confidence_head(last, self.lm_head.weight, self.vocab_mask, controls, candidates)
        return StepOutput(head, advanced, distinct, states)


def new_caches(config: ModelConfig, rows: int, max_len: int, dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    """Empty caches for `rows` slots of up to `max_len` tokens; the recurrent memory is float32 in any dtype."""
    return [new_cache(config, index, rows, max_len, dtype) for index in range(config.num_hidden_layers)]


def new_cache(config: ModelConfig, index: int, rows: int, max_len: int, dtype: torch.dtype) -> LayerCache:
    """The empty cache of one layer, as `new_caches` has it."""
    if config.layer_types[index] == "full_attention":
        shape = (rows, config.num_key_value_heads, max_len, config.head_dim)
        return AttentionCache(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
    conv = torch.zeros(rows, config.conv_dim, config.linear_conv_kernel_dim - 1, dtype=dtype)
    memory = (rows, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    return GdnCache(conv, torch.zeros(memory))


def no_controls(rows: int, positions: int) -> Controls:
    """Controls that change nothing."""
    return Controls(
        history_ids=torch.zeros(rows, 0, dtype=torch.int64),
        history_counts=torch.zeros(rows, 0),
        repetition_penalty=torch.ones(rows),
        presence_penalty=torch.zeros(rows),
        frequency_penalty=torch.zeros(rows),
        bias_ids=torch.zeros(rows, 0, dtype=torch.int64),
        bias_values=torch.zeros(rows, positions, 0),
    )
