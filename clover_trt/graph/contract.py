"""The contract of the `clover::` operations: one table that the exporter, the function bodies and the plugins follow.

Shapes: B rows, T tokens, L positions with logits, H hidden, V vocabulary, E experts, C convolution channels,
M cache length, R history entries, A biases, k candidates. Lengths are `[B]` int32; what an operation computes
is said by its reference function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clover_trt.config import ModelConfig


DOMAIN = "clover"
VERSION = 1
OPSET = 25  # of the default domain


@dataclass(frozen=True)
class OpContract:
    """Inputs, outputs and attributes of one operation, in order."""

    name: str
    reference: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]


_LENGTHS = ("prefix_len", "commit_len", "noisy_len")
OPS = {
    op.name: op
    for op in (
        OpContract(
            "BlockAttention",
            "clover_trt.model.attention.block_attention",
            # [B, T, heads, head_dim], 2 x [B, T, kv_heads, head_dim], 2 x [B, kv_heads, M, head_dim]
            ("query", "key", "value", "key_cache", "value_cache", *_LENGTHS),
            # [B, T, heads * head_dim]; cache rows past prefix_len + commit_len have no defined content
            ("out", "key_cache_out", "value_cache_out"),
            ("heads", "kv_heads", "head_dim"),
        ),
        OpContract(
            "GdnBlockScan",
            "clover_trt.model.gdn.gdn_block_scan",
            # [B, T, C], 2 x [B, T, v_heads], [C, 1, kernel], [C, 1, right_kernel], 5 x [v_heads], states
            (
                "qkv", "a", "b", "conv", "right_conv", "A_log", "dt_bias", "temperature", "memory_bias",
                "memory_slope", "conv_state", "recurrent_state", *_LENGTHS,
            ),
            # [B, T, v_heads, v_dim] and the states advanced by commit_len
            ("out", "conv_state_out", "recurrent_state_out"),
            ("k_heads", "v_heads", "k_dim", "v_dim", "kernel", "right_kernel"),
        ),
        OpContract(
            "ExpertSubsetMoe",
            "clover_trt.model.moe.expert_subset_moe",
            # [B, T, H], [E, H], [E, 2I, H], [E, H, I], 2 x [S, H], [H, S], [1, H], ..., [B]; when the banks are quantized,
            # scales follow. e4m3: gate_up_scale, down_scale (checkpoint/fp8.py, bank_scale_shape). NVFP4, int8 banks
            # [E, 2I, H / 2] and [E, H, I / 2] of interleaved values (checkpoint/nvfp4.py): e4m3 scales [E, 2I, H / 16] and
            # [E, H, I / 16], and those of whole matrices, gate_up_scale_2 [E, 2] and down_scale_2 [E, 1] float32
            (
                "x", "router", "gate_up", "down", "shared_gate", "shared_up", "shared_down", "shared_scalar_gate",
                *_LENGTHS, "expert_mass",
            ),
            ("out", "distinct_experts"),  # [B, T, H], [1] int64
            ("num_experts", "top_k"),
        ),
        OpContract(
            "ConfidenceHead",
            "clover_trt.model.head.confidence_head",
            # [B, L, H], [V, H], [V], [B, R] x 2, [B] x 3, [B, A], [B, L, A], [1] int64
            (
                "hidden", "weight", "vocab_mask", "history_ids", "history_counts", "repetition_penalty",
                "presence_penalty", "frequency_penalty", "bias_ids", "bias_values", "num_candidates",
            ),
            ("candidate_ids", "candidate_logprobs", "logits"),  # [B, L, k] int64 and float32, [B, L, V] float32
            (),
        ),
    )
}  # fmt: skip

# Operations that a TensorRT plugin computes, with the attributes its node has beside those above.
PLUGINS = {"GdnBlockScan": (), "ExpertSubsetMoe": (), "ConfidenceHead": ("emit_logits",)}

STEP_INPUTS = ("input_ids", "prefix_len", "commit_len", "noisy_len", "logit_index", "expert_mass", "num_candidates")
CONTROL_INPUTS = OPS["ConfidenceHead"].inputs[3:10]
STEP_OUTPUTS = ("candidate_ids", "candidate_logprobs", "logits", "distinct_experts")


def cache_names(config: ModelConfig) -> list[tuple[str, str]]:
    """Graph input names of each layer's two caches."""
    attention, gdn = ("key_cache", "value_cache"), ("conv_state", "recurrent_state")
    kinds = (attention if kind == "full_attention" else gdn for kind in config.layer_types)
    return [(f"{first}.{i}", f"{second}.{i}") for i, (first, second) in enumerate(kinds)]


def cache_shape(config: ModelConfig, name: str, rows: int) -> tuple[int, ...]:
    """Shape of a slot's part of the cache `name`, for `rows` tokens."""
    keys_values = (config.num_key_value_heads, rows, config.head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "key_cache": keys_values,
        "value_cache": keys_values,
        "conv_state": (config.conv_dim, config.linear_conv_kernel_dim - 1),
        "recurrent_state": (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim),
    }
    return shapes[name.split(".")[0]]


def advanced_name(cache: str) -> str:
    """Graph output name of a cache: `key_cache.3` to `key_cache_out.3`."""
    kind, layer = cache.split(".")
    return f"{kind}_out.{layer}"


def expert_names(layer: int) -> tuple[str, str]:
    """Graph input names of a layer's expert bank."""
    return f"experts.{layer}.gate_up", f"experts.{layer}.down"


def hidden_name(index: int) -> str:
    """Graph value name of the hidden states after layer `index - 1` (0: after the embedding)."""
    return f"hidden.{index}"
