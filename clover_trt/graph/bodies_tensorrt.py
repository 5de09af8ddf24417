"""Bodies of the `clover::` operations in standard operators alone, for TensorRT-RTX, which takes no plugins.

They build in bfloat16 (or float32, in which ONNX Runtime runs them: that is how they are tested), accumulate in float32
and read each used expert once: a loop over the distinct experts of the call, every token against that expert.
"""

from __future__ import annotations

import onnx

from clover_trt.checkpoint.fp8 import BLOCK
from clover_trt.config import ModelConfig
from clover_trt.graph import bodies_shared as shared
from clover_trt.graph.bodies_shared import FLOAT, cast

SCALES = ("gate_up_scale", "down_scale")
CHUNK = 32  # tokens of one chunk of the gated delta rule


def function_bodies(config: ModelConfig, compute: int, *, quantized: bool = False) -> list[onnx.FunctionProto]:
    """One function for each operation of the contract, for this geometry.

    Args:
        config: geometry.
        compute: ONNX element type of activations and weights.
        quantized: expert banks are e4m3, and `gate_up_scale` and `down_scale` follow the inputs of the contract.
    """
    bodies = {
        "BlockAttention": _block_attention(config),
        "GdnBlockScan": _gdn_block_scan(config, compute),
        "ExpertSubsetMoe": _expert_subset_moe(config, compute, quantized),
        "ConfidenceHead": _confidence_head(),
    }
    more = {"ExpertSubsetMoe": SCALES} if quantized else {}
    return [shared.function(name, body, inputs=more.get(name, ())) for name, body in bodies.items()]


def _block_attention(c: ModelConfig) -> str:
    """Every token sees row 0 at least, so that no softmax is over nothing; an idle row's output is never read."""
    return f"""{shared.row_masks("query")}
    key_rows = Transpose <perm = [0, 2, 1, 3]> (key)
    value_rows = Transpose <perm = [0, 2, 1, 3]> (value)
    key_cache_out = TensorScatter <axis = -2> (key_cache, key_rows, prefix)
    value_cache_out = TensorScatter <axis = -2> (value_cache, value_rows, prefix)
    by_head = Transpose <perm = [0, 2, 1, 3]> (query)
    {shared.visible_cache()}
    is_first = Equal (positions, i0)
    is_attended = Or (is_seen, is_first)
    mixed_by_head = Attention <scale = {c.head_dim**-0.5!r}>
        (by_head, key_cache_out, value_cache_out, is_attended)
    mixed_by_token = Transpose <perm = [0, 2, 1, 3]> (mixed_by_head)
    out_shape = Constant <value = int64[3] {{0, 0, {c.num_attention_heads * c.head_dim}}}> ()
    out = Reshape (mixed_by_token, out_shape)"""


def _gdn_block_scan(c: ModelConfig, compute: int) -> str:
    wide = ("qkv", "a", "b", "conv", "right_conv", "A_log", "dt_bias", "temperature", "memory_bias", "memory_slope")
    return (
        shared.row_masks("qkv")
        + shared.gdn_constants(c)
        + "".join(cast(name, f"{name}_f", FLOAT) for name in wide)
        + _gdn_committed(c, compute)
        + _delta_rule_chunks(c)
        + shared.gdn_window(c)
        + shared.gdn_block(c, compute)
        + shared.gdn_join(compute)
    )


def _gdn_committed(c: ModelConfig, compute: int) -> str:
    """Causal convolution, gates, and queries, keys and values by chunk: `[chunks, B, v_heads, CHUNK, dim]`."""
    v_heads, k_heads = c.linear_num_value_heads, c.linear_num_key_heads
    groups, k_dim, v_dim = v_heads // k_heads, c.linear_key_head_dim, c.linear_value_head_dim
    return f"""
    state_rows = Transpose <perm = [0, 2, 1]> (conv_state)
    history = Concat <axis = 1> (state_rows, qkv)
    {cast("history", "history_f", FLOAT)}
    {shared.taps("conv_f", "history_f", c.linear_conv_kernel_dim, 0, "tokens", "left")}
    {shared.silu("left", "causal", compute)}
    causal_q, causal_k, causal_v = Split <axis = -1> (causal, parts)
    {shared.heads_normed("causal_q", "query_normed")}
    {shared.heads_normed("causal_k", "key")}
    query_scale = Constant <value_float = {k_dim**-0.5!r}> ()
    query = Mul (query_normed, query_scale)
    value = Reshape (causal_v, value_shape)
    {shared.gdn_gates()}
    chunk_scalar = Constant <value = int64 {{{CHUNK}}}> ()
    chunk_less_1 = Constant <value = int64 {{{CHUNK - 1}}}> ()
    rounded = Add (tokens_scalar, chunk_less_1)
    chunks_scalar = Div (rounded, chunk_scalar)
    padded_len = Mul (chunks_scalar, chunk_scalar)
    missing_scalar = Sub (padded_len, tokens_scalar)
    missing = Unsqueeze (missing_scalar, axis_0)
    zero_4 = Constant <value = int64[4] {{0, 0, 0, 0}}> ()
    zero_1 = Constant <value = int64[1] {{0}}> ()
    zero_2 = Constant <value = int64[2] {{0, 0}}> ()
    pads_3d = Concat <axis = 0> (zero_4, missing, zero_1)
    zero_5 = Constant <value = int64[5] {{0, 0, 0, 0, 0}}> ()
    pads_4d = Concat <axis = 0> (zero_5, missing, zero_2)
    query_padded = Pad (query, pads_4d)
    key_padded = Pad (key, pads_4d)
    value_padded = Pad (value, pads_4d)
    decay_padded = Pad (decay, pads_3d)
    beta_padded = Pad (beta, pads_3d)
    key_chunk_shape = Constant <value = int64[6] {{0, -1, {CHUNK}, {k_heads}, 1, {k_dim}}}> ()
    query_6d = Reshape (query_padded, key_chunk_shape)
    key_6d = Reshape (key_padded, key_chunk_shape)
    spread = Constant <value = int64[6] {{1, 1, 1, 1, {groups}, 1}}> ()
    query_spread = Expand (query_6d, spread)
    key_spread = Expand (key_6d, spread)
    head_chunk_shape = Constant <value = int64[5] {{0, -1, {CHUNK}, {v_heads}, {k_dim}}}> ()
    query_5d = Reshape (query_spread, head_chunk_shape)
    key_5d = Reshape (key_spread, head_chunk_shape)
    value_chunk_shape = Constant <value = int64[5] {{0, -1, {CHUNK}, {v_heads}, {v_dim}}}> ()
    value_5d = Reshape (value_padded, value_chunk_shape)
    gate_chunk_shape = Constant <value = int64[4] {{0, -1, {CHUNK}, {v_heads}}}> ()
    decay_4d = Reshape (decay_padded, gate_chunk_shape)
    beta_4d = Reshape (beta_padded, gate_chunk_shape)
    q = Transpose <perm = [1, 0, 3, 2, 4]> (query_5d)
    k = Transpose <perm = [1, 0, 3, 2, 4]> (key_5d)
    v = Transpose <perm = [1, 0, 3, 2, 4]> (value_5d)
    g = Transpose <perm = [1, 0, 3, 2]> (decay_4d)
    write_strength = Transpose <perm = [1, 0, 3, 2]> (beta_4d)"""


def _delta_rule_chunks(c: ModelConfig) -> str:
    """The gated delta rule in chunks (https://arxiv.org/abs/2406.06484), as `clover_trt.model.gdn.gated_delta_rule`.

    The inverse of the unit lower triangle is built by doubling: with X the inverse of its diagonal blocks of size s and
    W the part under them, X - X W X is that of blocks of size 2s; every step is a product, none amplifies.
    """
    v_heads, v_dim = c.linear_num_value_heads, c.linear_value_head_dim
    levels = []
    size = 1
    while size < CHUNK:
        cells = [int(i // size % 2 == 1 and j // size == i // size - 1) for i in range(CHUNK) for j in range(CHUNK)]
        before, after = f"inverse_{size}", f"inverse_{2 * size}"
        levels.append(f"""
    under_{size} = Constant <value = float[{CHUNK}, {CHUNK}] {{{", ".join(map(str, cells))}}}> ()
    part_{size} = Mul (write, under_{size})
    right_{size} = MatMul (part_{size}, {before})
    step_{size} = MatMul ({before}, right_{size})
    {after} = Sub ({before}, step_{size})""")
        size *= 2
    lower = ", ".join(str(int(j <= i)) for i in range(CHUNK) for j in range(CHUNK))
    unit = ", ".join(str(int(j == i)) for i in range(CHUNK) for j in range(CHUNK))
    return f"""
    last_axis = Constant <value = int64 {{-1}}> ()
    summed = CumSum (g, last_axis)
    summed_t = Unsqueeze (summed, axis_last)
    before_last = Constant <value = int64[1] {{-2}}> ()
    summed_s = Unsqueeze (summed, before_last)
    between = Sub (summed_t, summed_s)
    lower = Constant <value = float[{CHUNK}, {CHUNK}] {{{lower}}}> ()
    between_low = Mul (between, lower)
    between_exp = Exp (between_low)
    passed = Mul (between_exp, lower)
    k_turned = Transpose <perm = [0, 1, 2, 4, 3]> (k)
    k_k = MatMul (k, k_turned)
    strength_t = Unsqueeze (write_strength, axis_last)
    write_decay = Mul (strength_t, passed)
    write = Mul (write_decay, k_k)
    inverse_1 = Constant <value = float[{CHUNK}, {CHUNK}] {{{unit}}}> ()
    {"".join(levels)}
    scaled_v = Mul (strength_t, v)
    from_value = MatMul (inverse_{CHUNK}, scaled_v)
    grown = Exp (summed_t)
    strength_grown = Mul (strength_t, grown)
    scaled_k = Mul (strength_grown, k)
    from_state = MatMul (inverse_{CHUNK}, scaled_k)
    q_k = MatMul (q, k_turned)
    read_weights = Mul (passed, q_k)
    q_grown = Mul (q, grown)
    last_position = Constant <value = int64[1] {{{CHUNK - 1}}}> ()
    last_sum = Gather <axis = -1> (summed, last_position)
    left_over = Sub (last_sum, summed)
    left_exp = Exp (left_over)
    left_t = Unsqueeze (left_exp, axis_last)
    carry_k = Mul (left_t, k)
    carry = Transpose <perm = [0, 1, 2, 4, 3]> (carry_k)
    last_exp = Exp (last_sum)
    last_4d = Unsqueeze (last_exp, axis_last)
    recurrent_state_out, chunk_outs = Scan <num_scan_inputs = 6, body = chunk_step (float[B, h, k_size, v_size] state,
            float[B, h, t, v_size] c_value, float[B, h, t, k_size] c_state, float[B, h, t, k_size] c_query,
            float[B, h, t, t] c_read, float[B, h, k_size, t] c_carry, float[B, h, 1, 1] c_last)
        => (float[B, h, k_size, v_size] state_next, float[B, h, t, v_size] c_out) {{
            known = MatMul (c_state, state)
            update = Sub (c_value, known)
            old = MatMul (c_query, state)
            new = MatMul (c_read, update)
            c_out = Add (old, new)
            kept = Mul (state, c_last)
            added = MatMul (c_carry, update)
            state_next = Add (kept, added)
        }}> (recurrent_state, from_value, from_state, q_grown, read_weights, carry, last_4d)
    chunk_rows = Transpose <perm = [1, 0, 3, 2, 4]> (chunk_outs)
    rows_shape = Constant <value = int64[4] {{0, -1, {v_heads}, {v_dim}}}> ()
    scanned_padded = Reshape (chunk_rows, rows_shape)
    scanned = Slice (scanned_padded, zero_1, tokens, axis_1)"""


def _swiglu(gate: str, up: str, down: str, target: str, compute: int) -> str:
    """`target = (SiLU(gate) * up) down`, with `down` as `[in, out]`."""
    return f"""
    {cast(gate, f"{target}_gate_f", FLOAT)}
    {shared.silu(f"{target}_gate_f", f"{target}_act_f", compute)}
    {cast(f"{target}_act_f", f"{target}_act", compute)}
    {target}_hidden = Mul ({target}_act, {up})
    {target} = MatMul ({target}_hidden, {down})"""


def _full_scale(source: str, target: str, halves: int, rows: int, columns: int) -> str:
    """Block scales `[halves * row blocks, column blocks]` to one an element, `[halves * rows, columns]`."""
    row_blocks, column_blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    return f"""
    {target}_blocks = Constant <value = int64[5] {{{halves}, {row_blocks}, 1, {column_blocks}, 1}}> ()
    {target}_5d = Reshape ({source}, {target}_blocks)
    {target}_spread = Constant <value = int64[5] {{1, 1, {BLOCK}, 1, {BLOCK}}}> ()
    {target}_wide = Expand ({target}_5d, {target}_spread)
    {target}_padded = Constant <value = int64[3] {{{halves}, {row_blocks * BLOCK}, {column_blocks * BLOCK}}}> ()
    {target}_3d = Reshape ({target}_wide, {target}_padded)
    {target}_begin = Constant <value = int64[2] {{0, 0}}> ()
    {target}_end = Constant <value = int64[2] {{{rows}, {columns}}}> ()
    {target}_axes = Constant <value = int64[2] {{1, 2}}> ()
    {target}_cut = Slice ({target}_3d, {target}_begin, {target}_end, {target}_axes)
    {target}_size = Constant <value = int64[2] {{{halves * rows}, {columns}}}> ()
    {target} = Reshape ({target}_cut, {target}_size)"""


def _one_expert(c: ModelConfig, quantized: bool) -> str:
    """`gate_up_2d` and `down_2d`: the weights of the expert `expert_1d`."""
    text = ""
    for name in ("gate_up", "down"):
        text += f"""
            {name}_3d = Gather <axis = 0> ({name}{"_values" if quantized else ""}, expert_1d)
            {name}_{"raw" if quantized else "2d"} = Squeeze ({name}_3d, axis_0)"""
        if quantized:
            halves, rows, columns = (
                (2, c.moe_intermediate_size, c.hidden_size) if name == "gate_up" else (1, c.hidden_size, c.moe_intermediate_size)
            )
            text += f"""
            {name}_scale_3d = Gather <axis = 0> ({name}_scale, expert_1d)
            {_full_scale(f"{name}_scale_3d", f"{name}_full", halves, rows, columns)}
            {name}_2d = Mul ({name}_raw, {name}_full)"""
    return text


def _expert_values(compute: int) -> str:
    """TensorRT reads e4m3 through DequantizeLinear only, so a bank is cast whole, with scale 1, before one is picked."""
    return f"""
    unit_f = Constant <value_float = 1.0> ()
    {cast("unit_f", "unit", compute)}
    gate_up_values = DequantizeLinear (gate_up, unit)
    down_values = DequantizeLinear (down, unit)"""


def _expert_subset_moe(c: ModelConfig, compute: int, quantized: bool) -> str:
    return f"""{shared.row_masks("x")}
    {_expert_values(compute) if quantized else ""}
    router_turned = Transpose <perm = [1, 0]> (router)
    logits_low = MatMul (x, router_turned)
    {cast("logits_low", "logits", FLOAT)}
    {shared.expert_routing(c)}
    shares = Softmax <axis = -1> (chosen)
    shares_all = ScatterElements <axis = 2> (nothing, chosen_index, shares)
    shares_valid = Mul (shares_all, valid_3d)
    flat_shares_shape = Constant <value = int64[2] {{-1, {c.num_experts}}}> ()
    shares_flat = Reshape (shares_valid, flat_shares_shape)
    flat_shape = Constant <value = int64[2] {{-1, {c.hidden_size}}}> ()
    x_flat = Reshape (x, flat_shape)
    {cast("x_flat", "x_wide", FLOAT)}
    sum_begin = Mul (x_wide, zero_f)
    used_first, use_order = TopK <axis = -1> (used_any, all_experts)
    count = Squeeze (distinct_experts, axis_0)
    go = Constant <value = bool {{1}}> ()
    sum_end = Loop <body = one_expert (int64 turn, bool going, float[N, H] sum) => (bool go_on, float[N, H] sum_next) {{
            turn_1d = Unsqueeze (turn, axis_0)
            expert_1d = Gather <axis = 0> (use_order, turn_1d)
            {_one_expert(c, quantized)}
            gate_up_turned = Transpose <perm = [1, 0]> (gate_up_2d)
            down_turned = Transpose <perm = [1, 0]> (down_2d)
            both = MatMul (x_flat, gate_up_turned)
            gate, up = Split <axis = -1, num_outputs = 2> (both)
            {_swiglu("gate", "up", "down_turned", "part", compute)}
            {cast("part", "part_f", FLOAT)}
            share = Gather <axis = 1> (shares_flat, expert_1d)
            weighted = Mul (part_f, share)
            sum_next = Add (sum, weighted)
            next_turn = Add (turn, i1)
            go_on = Less (next_turn, count)
        }}> (experts_scalar, go, sum_begin)
    shared_gate_turned = Transpose <perm = [1, 0]> (shared_gate)
    shared_up_turned = Transpose <perm = [1, 0]> (shared_up)
    shared_down_turned = Transpose <perm = [1, 0]> (shared_down)
    shared_g = MatMul (x_flat, shared_gate_turned)
    shared_u = MatMul (x_flat, shared_up_turned)
    {_swiglu("shared_g", "shared_u", "shared_down_turned", "shared_out", compute)}
    scalar_turned = Transpose <perm = [1, 0]> (shared_scalar_gate)
    scalar_raw = MatMul (x_flat, scalar_turned)
    {cast("scalar_raw", "scalar_f", FLOAT)}
    scalar = Sigmoid (scalar_f)
    {cast("shared_out", "shared_out_f", FLOAT)}
    shared_scaled = Mul (shared_out_f, scalar)
    total_out = Add (sum_end, shared_scaled)
    {cast("total_out", "total_low", compute)}
    x_shape = Shape (x)
    out = Reshape (total_low, x_shape)"""


def _confidence_head() -> str:
    return f"""
    weight_turned = Transpose <perm = [1, 0]> (weight)
    logits_low = MatMul (hidden, weight_turned)
    {cast("logits_low", "logits", FLOAT)}
    {shared.controlled_candidates()}"""
