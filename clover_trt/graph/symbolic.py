"""The four operations as symbols: tracing the model with these emits one `clover::` node for each call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from clover_trt.config import ModelConfig
from clover_trt.graph.contract import DOMAIN, OPS, VERSION
from clover_trt.model.gdn import GdnCache, GdnWeights
from clover_trt.model.head import Controls, HeadOutput
from clover_trt.model.lengths import Lengths
from clover_trt.model.ops import BlockOps


def _emit(
    name: str,
    inputs: Sequence[Tensor],
    attributes: dict[str, int],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
) -> Sequence[Tensor]:
    contract = OPS[name]
    assert len(inputs) == len(contract.inputs)
    assert tuple(attributes) == contract.attributes
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}", list(inputs), dict(attributes), dtypes=dtypes, shapes=shapes, version=VERSION
    )


def symbolic_ops(config: ModelConfig) -> BlockOps:
    """Symbolic forms with the signatures of the reference functions."""

    def block_attention(
        query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Lengths
    ) -> Sequence[Tensor]:
        B, T, heads, head_dim = query.shape
        return _emit(
            "BlockAttention",
            (query, key, value, key_cache, value_cache, *lengths),
            {"heads": heads, "kv_heads": key.shape[2], "head_dim": head_dim},
            (query.dtype, key_cache.dtype, value_cache.dtype),
            ((B, T, heads * head_dim), key_cache.shape, value_cache.shape),
        )

    def gdn_block_scan(
        qkv: Tensor, a: Tensor, b: Tensor, weights: GdnWeights, cache: GdnCache, lengths: Lengths
    ) -> tuple[Tensor, GdnCache]:
        attributes = {
            "k_heads": config.linear_num_key_heads,
            "v_heads": config.linear_num_value_heads,
            "k_dim": config.linear_key_head_dim,
            "v_dim": config.linear_value_head_dim,
            "kernel": config.linear_conv_kernel_dim,
            "right_kernel": config.linear_right_conv_kernel_dim,
        }
        out, conv, recurrent = _emit(
            "GdnBlockScan",
            (qkv, a, b, *weights, *cache, *lengths),
            attributes,
            (qkv.dtype, cache.conv.dtype, cache.recurrent.dtype),
            (
                (*qkv.shape[:2], config.linear_num_value_heads, config.linear_value_head_dim),
                cache.conv.shape,
                cache.recurrent.shape,
            ),
        )
        return out, GdnCache(conv, recurrent)

    def expert_subset_moe(
        x: Tensor,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        shared: tuple[Tensor, ...],
        lengths: Lengths,
        mass: Tensor,
        top_k: int,
    ) -> Sequence[Tensor]:
        return _emit(
            "ExpertSubsetMoe",
            (x, router, gate_up, down, *shared, *lengths, mass),
            {"num_experts": config.num_experts, "top_k": top_k},
            (x.dtype, torch.int64),
            (x.shape, (1,)),
        )

    def confidence_head(hidden: Tensor, weight: Tensor, vocab_mask: Tensor, controls: Controls, candidates: Tensor) -> HeadOutput:
        B, L, _ = hidden.shape
        shapes = ((B, L, 1), (B, L, 1), (B, L, weight.shape[0]))  # the last axis of the first two is num_candidates
        dtypes = (torch.int64, torch.float32, torch.float32)
        return HeadOutput(*_emit("ConfidenceHead", (hidden, weight, vocab_mask, *controls, candidates), {}, dtypes, shapes))

    return BlockOps(
        block_attention=block_attention,
        gdn_block_scan=gdn_block_scan,
        expert_subset_moe=expert_subset_moe,
        confidence_head=confidence_head,
    )
