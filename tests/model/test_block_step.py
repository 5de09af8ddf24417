"""Oracles 2 to 7 of the block step, on the reference model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_trt.model.attention import AttentionCache
from clover_trt.model.block_step import CloverModel, LayerCache, StepOutput, new_caches, no_controls
from clover_trt.model.gdn import GatedDeltaNet, GdnCache, GdnWeights, gdn_block_scan
from clover_trt.model.head import Controls, apply_controls, confidence_head, vocabulary_mask
from clover_trt.model.lengths import Lengths
from clover_trt.model.moe import kept_experts, route
from tests.oracles.naive import expert_subset, gdn_row
from tests.small import SMALL

BLOCK, VOCAB = SMALL.block_size, SMALL.vocab_size


def lengths(prefix: list[int], commit: list[int], noisy: list[int]) -> Lengths:
    return Lengths(*(torch.tensor(x, dtype=torch.int32) for x in (prefix, commit, noisy)))


@torch.no_grad()
def run(model: CloverModel, ids: torch.Tensor, rows: Lengths, caches: list[LayerCache], mass: float = 1.0) -> StepOutput:
    B, T = ids.shape
    index = torch.arange(T)[None].expand(B, -1)
    return model(ids, rows, index, torch.full((B,), mass), no_controls(B, T), caches, candidates=3)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))


def assert_same_caches(a: list[LayerCache], b: list[LayerCache], valid: list[int], bound: float) -> None:
    for x, y in zip(a, b, strict=True):
        for left, right in zip(x, y, strict=True):
            for row, n in enumerate(valid):
                cut = (slice(None), slice(0, n)) if isinstance(x, AttentionCache) else (slice(None),)
                assert (left[row][cut] - right[row][cut]).abs().max() < bound


@pytest.mark.parametrize("cut", [1, 3, 31, 32, 33, 69])
def test_splitting_a_commit_gives_the_same_caches(small_model: CloverModel, cut: int) -> None:
    ids = tokens(1, 70)
    whole = run(small_model, ids, lengths([0], [70], [0]), new_caches(SMALL, 1, 80))
    first = run(small_model, ids[:, :cut], lengths([0], [cut], [0]), new_caches(SMALL, 1, 80))
    second = run(small_model, ids[:, cut:], lengths([cut], [70 - cut], [0]), first.caches)
    assert_same_caches(whole.caches, second.caches, [70], 1e-5)
    assert (whole.head.logits[:, cut:] - second.head.logits).abs().max() < 1e-4


def test_a_denoise_pass_leaves_the_caches_untouched(small_model: CloverModel) -> None:
    before = run(small_model, tokens(1, 20), lengths([0], [20], [0]), new_caches(SMALL, 1, 64)).caches
    after = run(small_model, tokens(1, BLOCK, seed=1), lengths([20], [0], [BLOCK]), before).caches
    for x, y in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(x, y, strict=True))


def test_a_fused_pass_equals_commit_then_denoise(small_model: CloverModel) -> None:
    prompt, block, noisy = tokens(1, 25), tokens(1, BLOCK, seed=1), tokens(1, BLOCK, seed=2)
    start = run(small_model, prompt, lengths([0], [25], [0]), new_caches(SMALL, 1, 96)).caches
    commit = run(small_model, block, lengths([25], [BLOCK], [0]), start)
    denoise = run(small_model, noisy, lengths([25 + BLOCK], [0], [BLOCK]), commit.caches, mass=0.6)
    fused = run(small_model, torch.cat((block, noisy), 1), lengths([25], [BLOCK], [BLOCK]), start, mass=0.6)
    assert (fused.head.logits[:, BLOCK:] - denoise.head.logits).abs().max() < 1e-4
    assert_same_caches(fused.caches, denoise.caches, [25 + BLOCK], 1e-5)


def test_a_row_does_not_depend_on_the_others_on_padding_or_on_width(small_model: CloverModel) -> None:
    commit, noisy = [30, 0, 7, 0], [0, BLOCK, BLOCK, 0]
    ids = tokens(4, 40)
    start = [12, 5, 0, 3]
    caches = run(small_model, tokens(4, 12, seed=3), lengths([0] * 4, start, [0] * 4), new_caches(SMALL, 4, 64)).caches
    together = run(small_model, ids, lengths(start, commit, noisy), caches, mass=0.7)
    other = tokens(4, 40, seed=9)
    for row in range(3):
        used = commit[row] + noisy[row]
        alone = torch.cat((ids[row : row + 1, :used], other[row : row + 1, : 3 + row]), 1)
        single = [type(c)(*(t[row : row + 1] for t in c)) for c in caches]
        out = run(small_model, alone, lengths([start[row]], [commit[row]], [noisy[row]]), single, mass=0.7)
        assert (out.head.logits[0, :used] - together.head.logits[row, :used]).abs().max() < 1e-4
        end = [start[row] + commit[row]]
        rows = [type(c)(*(t[row : row + 1] for t in c)) for c in together.caches]
        assert_same_caches(out.caches, rows, end, 1e-5)
    assert torch.isfinite(together.head.logits).all(), "an idle row must stay finite"


def gdn_inputs(B: int, T: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, GdnWeights, GdnCache]:
    g = torch.Generator().manual_seed(seed)
    heads, C = SMALL.linear_num_value_heads, SMALL.conv_dim
    per_head = [torch.randn(heads, generator=g) for _ in range(5)]
    weights = GdnWeights(torch.randn(C, 1, 4, generator=g), torch.randn(C, 1, 3, generator=g), *per_head)
    cache = GdnCache(
        torch.randn(B, C, 3, generator=g),
        torch.randn(B, heads, SMALL.linear_key_head_dim, SMALL.linear_value_head_dim, generator=g),
    )
    return (
        torch.randn(B, T, C, generator=g),
        torch.randn(B, T, heads, generator=g),
        torch.randn(B, T, heads, generator=g),
        weights,
        cache,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 70), st.integers(0, 40), st.integers(0, 3), st.sampled_from([0, 1, 100]), st.integers(0, 1000))
def test_gdn_block_scan_equals_the_formulas_in_double_precision(
    commit: int, noisy: int, pad: int, prefix: int, seed: int
) -> None:
    if commit + noisy == 0:
        return
    T = commit + noisy + pad
    qkv, a, b, weights, cache = gdn_inputs(1, T, seed)
    if prefix == 0:
        cache = GdnCache(torch.zeros_like(cache.conv), torch.zeros_like(cache.recurrent))
    out, after = gdn_block_scan(qkv, a, b, weights, cache, lengths([prefix], [commit], [noisy]))
    exact = {name: value.double().numpy().reshape(len(value), -1).squeeze() for name, value in weights._asdict().items()}
    args = (x[0].double().numpy() for x in (qkv, a, b))
    expected, conv, memory = gdn_row(
        *args, exact, cache.conv[0].double().numpy(), cache.recurrent[0].double().numpy(), prefix, commit, noisy
    )
    np.testing.assert_allclose(out[0, : commit + noisy].numpy(), expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(after.conv[0].numpy(), conv, rtol=1e-6)
    np.testing.assert_allclose(after.recurrent[0].numpy(), memory, rtol=2e-4, atol=2e-4)


def test_without_convolutions_permuted_noisy_tokens_give_permuted_outputs() -> None:
    qkv, a, b, weights, cache = gdn_inputs(1, BLOCK, 4)
    zero = weights._replace(conv=torch.zeros_like(weights.conv), right_conv=torch.zeros_like(weights.right_conv))
    zero.conv[:, 0, -1] = 1.0  # the token itself
    order = torch.randperm(BLOCK, generator=torch.Generator().manual_seed(0))
    rows = lengths([9], [0], [BLOCK])
    plain, _ = gdn_block_scan(qkv, a, b, zero, cache, rows)
    permuted, _ = gdn_block_scan(qkv[:, order], a[:, order], b[:, order], zero, cache, rows)
    assert (plain[:, order] - permuted).abs().max() < 1e-5
    mixed, _ = gdn_block_scan(qkv[:, order], a[:, order], b[:, order], weights, cache, rows)
    normal, _ = gdn_block_scan(qkv, a, b, weights, cache, rows)
    assert (normal[:, order] - mixed).abs().max() > 1e-2, "with convolutions the order matters"


def test_right_neighbours_reach_only_the_noisy_block(small_model: CloverModel) -> None:
    layer = small_model.model.layers[0].linear_attn
    assert isinstance(layer, GatedDeltaNet)
    qkv, a, b, weights, cache = gdn_inputs(1, 24, 5)
    rows = lengths([3], [10], [10])
    out, _ = gdn_block_scan(qkv, a, b, weights, cache, rows)
    changed = qkv.clone()
    changed[:, 10:] += 1.0
    other, _ = gdn_block_scan(changed, a, b, weights, cache, rows)
    assert torch.equal(out[:, :10], other[:, :10]), "committed tokens see nothing to their right"
    assert (out[:, 10:20] - other[:, 10:20]).abs().max() > 1e-3


probabilities = st.integers(0, 10_000).map(
    lambda seed: torch.softmax(2 * torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(seed)), -1)
)


@settings(max_examples=60, deadline=None)
@given(probabilities, st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_kept_experts_are_minimal_and_grow_with_mass(probs: torch.Tensor, one: float, two: float) -> None:
    low, high = sorted((one, two))
    noisy = torch.ones(1, 9, dtype=torch.bool)
    small, large = (kept_experts(probs, noisy, torch.tensor([mass]), 4)[0] for mass in (low, high))
    assert (small <= large).all()
    assert small.sum() >= 4
    assert set(small.nonzero().flatten().tolist()) == expert_subset(probs[0].double().numpy(), float(np.float32(low)), 4)


def test_ties_keep_the_lower_expert() -> None:
    probs = torch.full((1, 2, 8), 0.05)
    probs[0, 0, [0, 1]] = 0.35
    probs[0, 1, [2, 3]] = 0.35
    kept = kept_experts(probs, torch.ones(1, 2, dtype=torch.bool), torch.tensor([0.1]), 2)
    assert kept[0].nonzero().flatten().tolist() == [0, 1]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_full_mass_is_unrestricted_routing(seed: int) -> None:
    logits = 3 * torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(seed))
    free_weights, free = route(logits, lengths([0], [12], [0]), torch.ones(1), 4)
    weights, index = route(logits, lengths([0], [0], [12]), torch.ones(1), 4)
    assert torch.equal(free, index)
    assert torch.equal(free_weights, weights)


def test_noisy_tokens_stay_in_their_rows_subset_and_committed_ones_do_not() -> None:
    logits = 3 * torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    rows = lengths([0, 0], [10, 0], [10, 20])
    weights, index = route(logits, rows, torch.tensor([0.3, 0.5]), 4)
    probs = torch.softmax(logits, -1).double().numpy()
    assert set(index[0, 10:].flatten().tolist()) <= expert_subset(probs[0, 10:], 0.3, 4)
    assert set(index[1].flatten().tolist()) <= expert_subset(probs[1], 0.5, 4)
    assert torch.equal(index[0, :10], logits[0, :10].topk(4, -1).indices)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 20))


def controls(**changes: torch.Tensor) -> Controls:
    return no_controls(1, 2)._replace(**changes)


def test_the_mask_id_and_padded_rows_never_come_out() -> None:
    weight = torch.zeros(VOCAB, 4)
    weight[120] = weight[125] = 100.0
    hidden = torch.ones(1, 2, 4)
    mask = vocabulary_mask(SMALL, valid_tokens=124)
    biased = controls(bias_ids=torch.tensor([[120]]), bias_values=torch.full((1, 2, 1), 1e6))
    for each in (controls(), biased):
        out = confidence_head(hidden, weight, mask, each, VOCAB)
        real = out.candidate_ids[..., : VOCAB - 5]
        assert not torch.isin(real, torch.tensor([120, 124, 125, 126, 127])).any()
        assert torch.isinf(out.candidate_logprobs[..., -5:]).all()
        total = out.candidate_logprobs.exp().sum(-1)
        assert torch.allclose(total, torch.ones_like(total))


def test_penalties_follow_transformers_and_the_openai_api() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(0))
    seen, counts = torch.tensor([[3, 9, 60]]), torch.tensor([[1.0, 2.0, 5.0]])
    none = torch.zeros(VOCAB)
    found = apply_controls(
        logits, none, controls(history_ids=seen, history_counts=counts, repetition_penalty=torch.tensor([1.7]))
    )
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    for position in range(2):
        assert torch.equal(found[0, position], processor(seen, logits[:, position].clone())[0])
    found = apply_controls(
        logits,
        none,
        controls(
            history_ids=seen,
            history_counts=counts,
            presence_penalty=torch.tensor([0.5]),
            frequency_penalty=torch.tensor([0.25]),
        ),
    )
    expected = logits.clone()
    expected[..., [3, 9, 60]] -= 0.5 + 0.25 * counts
    assert torch.allclose(found, expected, atol=1e-6)


def test_controls_that_are_off_change_nothing() -> None:
    logits = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(0))
    off = controls(
        history_ids=torch.tensor([[1, 2]]),
        history_counts=torch.ones(1, 2),
        bias_ids=torch.tensor([[4]]),
        bias_values=torch.zeros(1, 2, 1),
    )
    assert torch.equal(apply_controls(logits, torch.zeros(VOCAB), off), logits)


def test_not_a_number_is_seen_in_the_log_probabilities() -> None:
    weight = torch.ones(VOCAB, 4)
    hidden = torch.ones(1, 2, 4)
    hidden[0, 1, 0] = torch.nan
    out = confidence_head(hidden, weight, torch.zeros(VOCAB), controls(), 1)
    assert torch.isfinite(out.candidate_logprobs[0, 0, 0])
    assert not torch.isfinite(out.candidate_logprobs[0, 1, 0])
