"""Choosing a token among a position's candidates."""

from __future__ import annotations

import numpy as np

from clover_trt.config import GenerationConfig
from clover_trt.runtime.session import Floats, Ints

SAMPLED_CANDIDATES = 64  # candidates a session is asked for when sampling


def candidates_needed(settings: GenerationConfig, vocab_size: int) -> int:
    """How many candidates of each position `choose` wants: 1 when greedy."""
    if not settings.do_sample:
        return 1
    return min(settings.top_k or SAMPLED_CANDIDATES, vocab_size)


def choose(ids: Ints, logprobs: Floats, settings: GenerationConfig, rng: np.random.Generator) -> tuple[Ints, Floats]:
    """Pick one candidate of each position and say how sure the model is of it.

    Greedy takes the first. Sampling applies temperature, top-k and top-p to the candidates and draws; the
    confidence is the drawn token's probability under the model, before those three.

    Args:
        ids, logprobs: `[L, k]`, by falling log-probability.
        settings: `do_sample`, `temperature`, `top_k`, `top_p`.
        rng: the request's own generator; not touched when greedy.

    Returns:
        token ids `[L]` int64 and confidences `[L]` float32.
    """
    if not settings.do_sample:
        return ids[:, 0], np.exp(logprobs[:, 0])
    width = min(settings.top_k or ids.shape[1], ids.shape[1])
    scaled = logprobs[:, :width].astype(np.float64) / settings.temperature
    weights = np.exp(scaled - scaled[:, :1])
    weights /= weights.sum(-1, keepdims=True)
    before = np.cumsum(weights, axis=-1) - weights
    weights = np.where(before < settings.top_p, weights, 0.0)
    cumulative = np.cumsum(weights, axis=-1)
    drawn = (cumulative <= rng.random((len(ids), 1)) * cumulative[:, -1:]).sum(-1)
    at = np.minimum(drawn, width - 1)[:, None]
    return np.take_along_axis(ids, at, 1)[:, 0], np.exp(np.take_along_axis(logprobs, at, 1)[:, 0])
