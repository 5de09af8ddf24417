"""What the function bodies of all backends have in common, in ONNX's textual form: standard operators, float32."""

from __future__ import annotations

import onnx
import onnx.parser

from clover_trt.config import ModelConfig
from clover_trt.graph.contract import DOMAIN, OPS, OPSET

FLOOR = "-3.0e38"  # below any score, yet finite: a softmax over nothing but floors stays a number
FLOAT = onnx.TensorProto.FLOAT


def function(name: str, body: str, *, inputs: tuple[str, ...] = (), domains: tuple[str, ...] = ()) -> onnx.FunctionProto:
    """The operation `name` of the contract with this body; `inputs` follow those of the contract."""
    op = OPS[name]
    attributes = f"<{', '.join(op.attributes)}>" if op.attributes else ""
    imports = ", ".join([f'"" : {OPSET}', *(f'"{domain}" : 1' for domain in domains)])
    text = (
        f'<domain: "{DOMAIN}", opset_import: [{imports}]>\n'
        f"{name} {attributes} ({', '.join((*op.inputs, *inputs))}) => ({', '.join(op.outputs)})\n{{\n{body}\n}}"
    )
    return onnx.parser.parse_function(text)


def row_masks(data: str) -> str:
    """Row lengths as int64, and masks over the T tokens; `data` is any `[B, T, ...]` tensor."""
    return f"""
    i0 = Constant <value = int64 {{0}}> ()
    i1 = Constant <value = int64 {{1}}> ()
    axis_0 = Constant <value = int64[1] {{0}}> ()
    axis_1 = Constant <value = int64[1] {{1}}> ()
    axis_last = Constant <value = int64[1] {{-1}}> ()
    prefix = Cast <to = 7> (prefix_len)
    commit = Cast <to = 7> (commit_len)
    noisy = Cast <to = 7> (noisy_len)
    prefix_col = Unsqueeze (prefix, axis_1)
    commit_col = Unsqueeze (commit, axis_1)
    noisy_col = Unsqueeze (noisy, axis_1)
    end_col = Add (commit_col, noisy_col)
    tokens = Shape <start = 1, end = 2> ({data})
    tokens_scalar = Squeeze (tokens, axis_0)
    index = Range (i0, tokens_scalar, i1)
    is_committed = Less (index, commit_col)
    is_valid = Less (index, end_col)
    is_noisy = Xor (is_committed, is_valid)"""


def visible_cache() -> str:
    """`is_seen` `[B, 1, T, M]`: cache rows that each token sees, this call's own rows (already written) among them."""
    return """
    after = Add (index, i1)
    own = Where (is_committed, after, end_col)
    limit = Add (prefix_col, own)
    limit_axes = Constant <value = int64[2] {1, 3}> ()
    limit_4d = Unsqueeze (limit, limit_axes)
    cache_len = Shape <start = 2, end = 3> (key_cache)
    cache_len_scalar = Squeeze (cache_len, axis_0)
    positions = Range (i0, cache_len_scalar, i1)
    is_seen = Less (positions, limit_4d)"""


def cast(source: str, target: str, kind: int) -> str:
    """`target` is `source` in another element type."""
    return f"\n    {target} = Cast <to = {kind}> ({source})"


def silu(source: str, target: str, compute: int) -> str:
    """`target = SiLU(source)`, float32, rounded to the compute type before and after as the reference does."""
    if compute == FLOAT:
        return f"""
    {target}_gate = Sigmoid ({source})
    {target} = Mul ({source}, {target}_gate)"""
    return f"""
    {target}_in_low = Cast <to = {compute}> ({source})
    {target}_in = Cast <to = 1> ({target}_in_low)
    {target}_gate = Sigmoid ({target}_in)
    {target}_exact = Mul ({target}_in, {target}_gate)
    {target}_low = Cast <to = {compute}> ({target}_exact)
    {target} = Cast <to = 1> ({target}_low)"""


def heads_normed(source: str, target: str) -> str:
    """L2 norm over each key head of `source` `[B, n, key_dim]`, as `[B, n, k_heads, k_dim]`."""
    return f"""
    {target}_split = Reshape ({source}, key_shape)
    {target}_sq = ReduceSumSquare <keepdims = 1> ({target}_split, axis_last)
    {target}_eps = Add ({target}_sq, norm_eps)
    {target}_rms = Sqrt ({target}_eps)
    {target} = Div ({target}_split, {target}_rms)"""


def taps(weight: str, source: str, count: int, first: int, width: str, target: str) -> str:
    """`target = sum_j source[:, first + j : first + j + width] * weight[:, 0, j]`."""
    lines = [f"{target}_taps = Transpose <perm = [2, 1, 0]> ({weight})"]  # [taps, 1, C]
    for j in range(count):
        lines += [
            f"{target}_begin{j} = Constant <value = int64[1] {{{first + j}}}> ()",
            f"{target}_end{j} = Add ({target}_begin{j}, {width})",
            f"{target}_x{j} = Slice ({source}, {target}_begin{j}, {target}_end{j}, axis_1)",
            f"{target}_at{j} = Constant <value = int64 {{{j}}}> ()",
            f"{target}_w{j} = Gather <axis = 0> ({target}_taps, {target}_at{j})",
            f"{target if count == 1 else f'{target}_p{j}'} = Mul ({target}_x{j}, {target}_w{j})",
        ]
    sums = [f"{target}_p0", *(f"{target}_s{j}" for j in range(1, count - 1)), target]
    for j in range(1, count):  # ONNX Runtime's Sum runs on one thread, Add on all
        lines.append(f"{sums[j]} = Add ({sums[j - 1]}, {target}_p{j})")
    return "\n    " + "\n    ".join(lines)


def gdn_constants(c: ModelConfig) -> str:
    """Shapes and axes that the parts of the scan use."""
    return f"""
    parts = Constant <value = int64[3] {{{c.key_dim}, {c.key_dim}, {c.value_dim}}}> ()
    key_shape = Constant <value = int64[4] {{0, 0, {c.linear_num_key_heads}, {c.linear_key_head_dim}}}> ()
    value_shape = Constant <value = int64[4] {{0, 0, {c.linear_num_value_heads}, {c.linear_value_head_dim}}}> ()
    norm_eps = Constant <value_float = 1.0e-6> ()
    last_axes_2 = Constant <value = int64[2] {{2, 3}}> ()"""


def gdn_gates(committed: str = "is_committed") -> str:
    """Decay and write strength `[B, T, v_heads]` float32 of `a_f` and `b_f`, 0 where `committed` `[B, T]` is false."""
    return f"""
    committed_2d = Cast <to = 1> ({committed})
    committed_3d = Unsqueeze (committed_2d, axis_last)
    a_biased = Add (a_f, dt_bias_f)
    step = Softplus (a_biased)
    rate = Exp (A_log_f)
    pull = Mul (step, rate)
    decay_all = Neg (pull)
    decay = Mul (decay_all, committed_3d)
    strength = Sigmoid (b_f)
    beta = Mul (strength, committed_3d)"""


def gdn_window(c: ModelConfig) -> str:
    """The convolution state after the committed tokens; inputs and left convolution of the noisy block, which is
    `block_size` positions wide, fewer only when the row of tokens is shorter."""
    left = c.linear_conv_kernel_dim - 1
    return f"""
    left_scalar = Constant <value = int64 {{{left}}}> ()
    state_index = Range (i0, left_scalar, i1)
    state_at = Add (commit_col, state_index)
    state_at_3d = Unsqueeze (state_at, axis_last)
    state_rows_out = GatherND <batch_dims = 1> (history, state_at_3d)
    conv_state_out = Transpose <perm = [0, 2, 1]> (state_rows_out)
    block_width = Constant <value = int64 {{{c.block_size}}}> ()
    width_scalar = Min (tokens_scalar, block_width)
    width = Unsqueeze (width_scalar, axis_0)
    block_index = Range (i0, width_scalar, i1)
    in_block = Less (block_index, noisy_col)
    block_raw = Add (commit_col, block_index)
    last_index = Sub (tokens_scalar, i1)
    block_at = Min (block_raw, last_index)
    block_at_3d = Unsqueeze (block_at, axis_last)
    block_left = GatherND <batch_dims = 1> (left, block_at_3d)
    block_x_raw = GatherND <batch_dims = 1> (qkv_f, block_at_3d)"""


def gdn_block(c: ModelConfig, compute: int) -> str:
    """Both convolutions, then softmax over the memory entry and the block, for the noisy tokens alone."""
    k_heads, v_heads = c.linear_num_key_heads, c.linear_num_value_heads
    k_dim, v_dim = c.linear_key_head_dim, c.linear_value_head_dim
    groups, right = v_heads // k_heads, c.linear_right_conv_kernel_dim
    return f"""
    in_block_f = Cast <to = 1> (in_block)
    in_block_3d = Unsqueeze (in_block_f, axis_last)
    block_x = Mul (block_x_raw, in_block_3d)
    pads = Constant <value = int64[6] {{0, 0, 0, 0, {right}, 0}}> ()
    block_padded = Pad (block_x, pads)
    {taps("right_conv_f", "block_padded", right, 1, "width", "block_right")}
    both = Add (block_left, block_right)
    {silu("both", "block_c", compute)}
    block_q_flat, block_k_flat, block_v_flat = Split <axis = -1> (block_c, parts)
    {heads_normed("block_q_flat", "block_q")}
    {heads_normed("block_k_flat", "block_k")}
    block_v = Reshape (block_v_flat, value_shape)
    bq = Transpose <perm = [0, 2, 1, 3]> (block_q)
    bk = Transpose <perm = [0, 2, 3, 1]> (block_k)
    bv = Transpose <perm = [0, 2, 1, 3]> (block_v)
    similarity = MatMul (bq, bk)
    axis_2 = Constant <value = int64[1] {{2}}> ()
    similarity_5d = Unsqueeze (similarity, axis_2)
    heads_4d = Constant <value = int64[4] {{{k_heads}, {groups}, 1, 1}}> ()
    temperature_4d = Reshape (temperature_f, heads_4d)
    scaled = Mul (similarity_5d, temperature_4d)
    keep_heads = Constant <value = int64[2] {{0, {v_heads}}}> ()
    logit_shape = Concat <axis = 0> (keep_heads, width, width)
    block_logits = Reshape (scaled, logit_shape)
    key_axes = Constant <value = int64[2] {{1, 2}}> ()
    in_block_keys = Unsqueeze (in_block, key_axes)
    floor = Constant <value_float = {FLOOR}> ()
    block_masked = Where (in_block_keys, block_logits, floor)
    seen_tokens = Add (prefix_col, commit_col)
    seen_f = Cast <to = 1> (seen_tokens)
    one_f = Constant <value_float = 1.0> ()
    seen_plus = Add (seen_f, one_f)
    seen_log = Log (seen_plus)
    slope = Mul (seen_log, memory_slope_f)
    memory_raw = Add (slope, memory_bias_f)
    has_memory = Greater (seen_tokens, i0)
    memory_or_floor = Where (has_memory, memory_raw, floor)
    memory_4d = Unsqueeze (memory_or_floor, last_axes_2)
    one_1d = Constant <value = int64[1] {{1}}> ()
    memory_shape = Concat <axis = 0> (one_1d, one_1d, width, one_1d)
    memory_logits = Expand (memory_4d, memory_shape)
    logits = Concat <axis = -1> (memory_logits, block_masked)
    mix = Softmax <axis = -1> (logits)
    mix_parts = Concat <axis = 0> (one_1d, width)
    mix_memory, mix_block = Split <axis = -1> (mix, mix_parts)
    key_scale = Constant <value_float = {k_dim**-0.5!r}> ()
    bq_scaled = Mul (bq, key_scale)
    bq_5d = Unsqueeze (bq_scaled, axis_2)
    state_shape = Constant <value = int64[5] {{0, {k_heads}, {groups}, {k_dim}, {v_dim}}}> ()
    state_5d = Reshape (recurrent_state_out, state_shape)
    read_5d = MatMul (bq_5d, state_5d)
    value_1d = Constant <value = int64[1] {{{v_dim}}}> ()
    read_shape = Concat <axis = 0> (keep_heads, width, value_1d)
    read = Reshape (read_5d, read_shape)
    from_memory = Mul (mix_memory, read)
    from_block = MatMul (mix_block, bv)
    block_out_heads = Add (from_memory, from_block)
    block_out = Transpose <perm = [0, 2, 1, 3]> (block_out_heads)"""


def gdn_join(compute: int) -> str:
    """Committed tokens take the scan, noisy tokens their block's output."""
    return f"""
    offset = Sub (index, commit_col)
    offset_low = Max (offset, i0)
    width_last = Sub (width_scalar, i1)
    offset_clipped = Min (offset_low, width_last)
    offset_3d = Unsqueeze (offset_clipped, axis_last)
    block_rows = GatherND <batch_dims = 1> (block_out, offset_3d)
    is_noisy_4d = Unsqueeze (is_noisy, last_axes_2)
    joined = Where (is_noisy_4d, block_rows, scanned)
    out = Cast <to = {compute}> (joined)"""


def expert_routing(c: ModelConfig) -> str:
    """From `logits` `[B, T, E]` float32: `routed`, the logits with experts outside the row's subset at a floor, each
    token's `chosen` logits and `chosen_index`, `used_any` `[E]` and the number of distinct experts."""
    experts, top_k = c.num_experts, c.num_experts_per_tok
    return f"""
    probs = Softmax <axis = -1> (logits)
    top_k = Constant <value = int64[1] {{{top_k}}}> ()
    all_experts = Constant <value = int64[1] {{{experts}}}> ()
    zero_f = Constant <value_float = 0.0> ()
    one_f = Constant <value_float = 1.0> ()
    probs_shape = Shape (probs)
    nothing = Expand (zero_f, probs_shape)
    best, best_index = TopK <axis = -1> (probs, top_k)
    candidates = ScatterElements <axis = 2> (nothing, best_index, best)
    noisy_f = Cast <to = 1> (is_noisy)
    noisy_3d = Unsqueeze (noisy_f, axis_last)
    counted = Mul (candidates, noisy_3d)
    scores = ReduceSum <keepdims = 0> (counted, axis_1)
    ranked, order = TopK <axis = -1> (scores, all_experts)
    running = CumSum (ranked, i1)
    before = Sub (running, ranked)
    total = ReduceSum <keepdims = 1> (ranked, axis_1)
    mass_col = Unsqueeze (expert_mass, axis_1)
    needed = Mul (mass_col, total)
    is_below = Less (before, needed)
    is_full = GreaterOrEqual (mass_col, one_f)
    is_wanted = Or (is_below, is_full)
    is_scored = Greater (ranked, zero_f)
    is_covered = And (is_wanted, is_scored)
    experts_scalar = Constant <value = int64 {{{experts}}}> ()
    rank = Range (i0, experts_scalar, i1)
    top_k_scalar = Constant <value = int64 {{{top_k}}}> ()
    is_first = Less (rank, top_k_scalar)
    is_kept = Or (is_covered, is_first)
    kept_f = Cast <to = 1> (is_kept)
    scores_shape = Shape (scores)
    none_kept = Expand (zero_f, scores_shape)
    kept_by_id = ScatterElements <axis = 1> (none_kept, order, kept_f)
    kept_3d = Unsqueeze (kept_by_id, axis_1)
    not_noisy = Sub (one_f, noisy_3d)
    open = Max (kept_3d, not_noisy)
    is_open = Greater (open, zero_f)
    floor = Constant <value_float = -1.0e30> ()
    routed = Where (is_open, logits, floor)
    chosen, chosen_index = TopK <axis = -1> (routed, top_k)
    chosen_shape = Shape (chosen)
    ones = Expand (one_f, chosen_shape)
    used = ScatterElements <axis = 2> (nothing, chosen_index, ones)
    valid_f = Cast <to = 1> (is_valid)
    valid_3d = Unsqueeze (valid_f, axis_last)
    used_valid = Mul (used, valid_3d)
    token_axes = Constant <value = int64[2] {{0, 1}}> ()
    used_any = ReduceMax <keepdims = 0> (used_valid, token_axes)
    used_count = ReduceSum <keepdims = 1> (used_any, axis_0)
    distinct_experts = Cast <to = 7> (used_count)"""


def controlled_candidates(controlled: str = "controlled = Add (after_bias, vocab_mask)") -> str:
    """From `logits` `[B, L, V]` float32: penalties, biases, banned ids, then the candidates.

    Args:
        controlled: the lines that make `controlled` from `after_bias` and `vocab_mask`.
    """
    return f"""
    axis_1 = Constant <value = int64[1] {{1}}> ()
    axis_last = Constant <value = int64[1] {{-1}}> ()
    per_row = Constant <value = int64[2] {{1, 2}}> ()
    zero_f = Constant <value_float = 0.0> ()
    positions = Shape <start = 1, end = 2> (logits)
    one_1d = Constant <value = int64[1] {{1}}> ()
    spread = Concat <axis = 0> (one_1d, positions, one_1d)
    history_3d = Unsqueeze (history_ids, axis_1)
    history_at = Expand (history_3d, spread)
    seen = GatherElements <axis = 2> (logits, history_at)
    penalty = Unsqueeze (repetition_penalty, per_row)
    seen_times = Mul (seen, penalty)
    seen_over = Div (seen, penalty)
    is_negative = Less (seen, zero_f)
    repeated = Where (is_negative, seen_times, seen_over)
    presence = Unsqueeze (presence_penalty, per_row)
    present = Sub (repeated, presence)
    frequency = Unsqueeze (frequency_penalty, per_row)
    counts_3d = Unsqueeze (history_counts, axis_1)
    frequent = Mul (frequency, counts_3d)
    penalised = Sub (present, frequent)
    after_history = ScatterElements <axis = 2> (logits, history_at, penalised)
    bias_3d = Unsqueeze (bias_ids, axis_1)
    bias_at = Expand (bias_3d, spread)
    unbiased = GatherElements <axis = 2> (after_history, bias_at)
    biased = Add (unbiased, bias_values)
    after_bias = ScatterElements <axis = 2> (after_history, bias_at, biased)
    {controlled}
    best, candidate_ids = TopK <axis = -1> (controlled, num_candidates)
    logprobs = LogSoftmax <axis = -1> (controlled)
    candidate_logprobs = GatherElements <axis = 2> (logprobs, candidate_ids)"""
