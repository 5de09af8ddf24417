"""Bodies of the `clover::` operations for ONNX Runtime's CPU provider, float32.

They use `com.microsoft` kernels where those are fastest (LinearAttention, MoE, FusedMatMul).
Caches are updated in place when a session binds one buffer as input and output: TensorScatter then writes
only the new rows. The MoE kernel wants gate and up rows interleaved (g0, u0, g1, u1, …).
"""

from __future__ import annotations

import onnx

from clover_trt.config import ModelConfig
from clover_trt.graph import bodies_shared as shared
from clover_trt.graph.bodies_shared import FLOAT, FLOOR

MICROSOFT = "com.microsoft"


def function_bodies(config: ModelConfig) -> list[onnx.FunctionProto]:
    """One function for each operation of the contract, for this geometry."""
    bodies = {
        "BlockAttention": _block_attention(config),
        "GdnBlockScan": _gdn_block_scan(config),
        "ExpertSubsetMoe": _expert_subset_moe(config),
        "ConfidenceHead": _confidence_head(),
    }
    return [shared.function(name, body, domains=(MICROSOFT,)) for name, body in bodies.items()]


def _block_attention(c: ModelConfig) -> str:
    heads, kv, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    return f"""{shared.row_masks("query")}
    key_rows = Transpose <perm = [0, 2, 1, 3]> (key)
    value_rows = Transpose <perm = [0, 2, 1, 3]> (value)
    key_cache_out = TensorScatter <axis = -2> (key_cache, key_rows, prefix)
    value_cache_out = TensorScatter <axis = -2> (value_cache, value_rows, prefix)
    by_head = Transpose <perm = [0, 2, 1, 3]> (query)
    kv_shape = Constant <value = int64[4] {{0, {kv}, -1, {dim}}}> ()
    by_kv = Reshape (by_head, kv_shape)
    raw = com.microsoft.FusedMatMul <transB = 1, alpha = {dim**-0.5!r}> (by_kv, key_cache_out)
    keep_heads = Constant <value = int64[2] {{0, {heads}}}> ()
    score_shape = Concat <axis = 0> (keep_heads, tokens, axis_last)
    scores = Reshape (raw, score_shape)
    {shared.visible_cache()}
    floor = Constant <value_float = {FLOOR}> ()
    zero_f = Constant <value_float = 0.0> ()
    bias = Where (is_seen, zero_f, floor)
    masked = Add (scores, bias)
    weights = Softmax <axis = -1> (masked)
    keep_kv = Constant <value = int64[3] {{0, {kv}, -1}}> ()
    weight_shape = Concat <axis = 0> (keep_kv, cache_len)
    weights_by_kv = Reshape (weights, weight_shape)
    mixed = MatMul (weights_by_kv, value_cache_out)
    dim_1d = Constant <value = int64[1] {{{dim}}}> ()
    head_shape = Concat <axis = 0> (keep_heads, tokens, dim_1d)
    mixed_by_head = Reshape (mixed, head_shape)
    mixed_by_token = Transpose <perm = [0, 2, 1, 3]> (mixed_by_head)
    out_shape = Constant <value = int64[3] {{0, 0, {heads * dim}}}> ()
    out = Reshape (mixed_by_token, out_shape)"""


def _gdn_block_scan(c: ModelConfig) -> str:
    renamed = {"qkv_f": "qkv", "A_log_f": "A_log"}
    renamed |= {f"{name}_f": name for name in ("right_conv", "dt_bias", "temperature", "memory_bias", "memory_slope")}
    aliases = "".join(f"\n    {new} = Identity ({old})" for new, old in renamed.items())
    block = shared.gdn_window(c) + shared.gdn_block(c, FLOAT) + shared.gdn_join(FLOAT)
    return shared.row_masks("qkv") + shared.gdn_constants(c) + aliases + _gdn_committed(c) + block


def _gdn_committed(c: ModelConfig) -> str:
    """Convolution over the row; gated delta rule over as many tokens as the longest commit has (one at least), with decay and
    write strength 0 past a row's own.
    """
    return f"""
    key_flat = Constant <value = int64[3] {{0, 0, {c.key_dim}}}> ()
    state_rows = Transpose <perm = [0, 2, 1]> (conv_state)
    history = Concat <axis = 1> (state_rows, qkv)
    {shared.taps("conv", "history", c.linear_conv_kernel_dim, 0, "tokens", "left")}
    longest = ReduceMax <keepdims = 0> (commit)
    span_scalar = Max (longest, i1)
    span = Unsqueeze (span_scalar, axis_0)
    left_span = Slice (left, axis_0, span, axis_1)
    a_f = Slice (a, axis_0, span, axis_1)
    b_f = Slice (b, axis_0, span, axis_1)
    is_gated = Slice (is_committed, axis_0, span, axis_1)
    {shared.silu("left_span", "causal", FLOAT)}
    causal_q, causal_k, causal_v = Split <axis = -1> (causal, parts)
    {shared.heads_normed("causal_q", "query")}
    {shared.heads_normed("causal_k", "key")}
    query_flat = Reshape (query, key_flat)
    key_flat_rows = Reshape (key, key_flat)
    {shared.gdn_gates("is_gated")}
    scanned_flat, recurrent_state_out = com.microsoft.LinearAttention
        <q_num_heads = {c.linear_num_key_heads}, kv_num_heads = {c.linear_num_value_heads},
         update_rule = "gated_delta", scale = {c.linear_key_head_dim**-0.5!r}>
        (query_flat, key_flat_rows, causal_v, recurrent_state, decay, beta)
    scanned_span = Reshape (scanned_flat, value_shape)
    span_last = Sub (span_scalar, i1)
    scanned_at = Min (index, span_last)
    scanned = Gather <axis = 1> (scanned_span, scanned_at)"""


def _expert_subset_moe(c: ModelConfig) -> str:
    return f"""{shared.row_masks("x")}
    logits = com.microsoft.FusedMatMul <transB = 1> (x, router)
    {shared.expert_routing(c)}
    flat_shape = Constant <value = int64[2] {{-1, {c.num_experts}}}> ()
    routed_flat = Reshape (routed, flat_shape)
    expert_out = com.microsoft.MoE
        <k = {c.num_experts_per_tok}, activation_type = "swiglu", swiglu_fusion = 1, activation_alpha = 1.0,
         activation_beta = 0.0, normalize_routing_weights = 1>
        (x, routed_flat, gate_up, "", down)
    shared_g = com.microsoft.FusedMatMul <transB = 1> (x, shared_gate)
    {shared.silu("shared_g", "shared_a", FLOAT)}
    shared_u = com.microsoft.FusedMatMul <transB = 1> (x, shared_up)
    shared_h = Mul (shared_a, shared_u)
    shared_d = com.microsoft.FusedMatMul <transB = 1> (shared_h, shared_down)
    scalar_raw = com.microsoft.FusedMatMul <transB = 1> (x, shared_scalar_gate)
    scalar = Sigmoid (scalar_raw)
    shared_out = Mul (shared_d, scalar)
    out = Add (expert_out, shared_out)"""


def _confidence_head() -> str:
    """Banned ids are few, so they are written one by one: adding `vocab_mask` would go over all logits once more."""
    banned = """banned = NonZero (vocab_mask)
    axis_0 = Constant <value = int64[1] {0}> ()
    banned_3d = Unsqueeze (banned, axis_0)
    rows = Shape <start = 0, end = 2> (logits)
    spread_rows = Concat <axis = 0> (rows, one_1d)
    banned_at = Expand (banned_3d, spread_rows)
    never_2d = Gather (vocab_mask, banned)
    never_3d = Unsqueeze (never_2d, axis_0)
    never = Expand (never_3d, spread_rows)
    controlled = ScatterElements <axis = 2> (after_bias, banned_at, never)"""
    return "    logits = com.microsoft.FusedMatMul <transB = 1> (hidden, weight)" + shared.controlled_candidates(banned)
