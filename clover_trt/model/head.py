"""The language-model head with the logit controls, and the confidence of its candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from clover_trt.config import ModelConfig


class Controls(NamedTuple):
    """Logit controls of each row, all over the response, never the prompt.

    Ids of a row are unique; unused entries hold a banned id (the mask token), whose logit is overwritten last.
    """

    history_ids: Tensor  # [B, R] int64, distinct tokens of the response
    history_counts: Tensor  # [B, R] float32, how often each occurs
    repetition_penalty: Tensor  # [B] float32, 1 = off; multiplicative, as in transformers
    presence_penalty: Tensor  # [B] float32, 0 = off; subtracted once, as in the OpenAI API
    frequency_penalty: Tensor  # [B] float32, 0 = off; subtracted per occurrence
    bias_ids: Tensor  # [B, A] int64
    bias_values: Tensor  # [B, L, A] float32, added to those ids, per position


class HeadOutput(NamedTuple):
    """Best candidates of each position, `[B, L, k]`: ids int64, log-probabilities float32; logits `[B, L, V]` float32
    before any control."""

    candidate_ids: Tensor
    candidate_logprobs: Tensor
    logits: Tensor


def vocabulary_mask(config: ModelConfig, valid_tokens: int) -> Tensor:
    """`[V]` float32: minus infinity at the mask token and at padded vocabulary rows, 0 elsewhere."""
    mask = torch.zeros(config.vocab_size)
    mask[valid_tokens:] = -torch.inf
    if config.mask_token_id is not None:
        mask[config.mask_token_id] = -torch.inf
    return mask


def apply_controls(logits: Tensor, vocab_mask: Tensor, controls: Controls) -> Tensor:
    """Penalties, then biases, then the ids that never come out; `[B, L, V]` float32 to the same."""
    ids = controls.history_ids[:, None].expand(-1, logits.shape[1], -1)  # [B, L, R]
    seen = logits.gather(2, ids)
    penalty = controls.repetition_penalty[:, None, None]
    seen = torch.where(seen < 0, seen * penalty, seen / penalty)
    seen = seen - controls.presence_penalty[:, None, None]
    seen = seen - controls.frequency_penalty[:, None, None] * controls.history_counts[:, None]
    logits = logits.scatter(2, ids, seen)
    ids = controls.bias_ids[:, None].expand(-1, logits.shape[1], -1)
    logits = logits.scatter(2, ids, logits.gather(2, ids) + controls.bias_values)
    return logits + vocab_mask


def confidence_head(hidden: Tensor, weight: Tensor, vocab_mask: Tensor, controls: Controls, candidates: int) -> HeadOutput:
    """Reference of `clover::ConfidenceHead`.

    Args:
        hidden: `[B, L, H]`, after the last norm.
        weight: `[V, H]`.
        vocab_mask: `[V]` float32, see `vocabulary_mask`.
        controls: the logit controls.
        candidates: k, how many candidates to return.

    Returns:
        Candidates by falling log-probability; the softmax is over the controlled logits, in float32.
    """
    logits = F.linear(hidden, weight).float()  # [B, L, V]
    controlled = apply_controls(logits, vocab_mask, controls)
    value, index = controlled.topk(candidates, dim=-1)
    return HeadOutput(index, value - controlled.logsumexp(-1, keepdim=True), logits)
