"""Unmasking rules: which of a block's unresolved positions a pass fills. A new rule is one function and its line in `RULES`.

Every rule fills at least one position, so that a block ends after `block_size` passes at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clover_trt.config import GenerationConfig
from clover_trt.errors import RequestError
from clover_trt.runtime.session import Floats

Mask = NDArray[np.bool_]


class Rule(Protocol):
    """Which positions to fill.

    Args:
        confidence: `[L]` float32, probability of the token chosen for each unresolved position, L >= 1.
        logprobs: `[L, k]` float32, log-probabilities of the candidates, falling.
        settings: the request's settings.

    Returns:
        `[L]` bool, at least one true.
    """

    def __call__(self, confidence: Floats, logprobs: Floats, settings: GenerationConfig) -> Mask:
        """Choose the positions that this pass fills."""
        ...


@dataclass(frozen=True)
class NamedRule:
    """A rule and the number of candidates a position that it looks at."""

    fill: Rule
    candidates: int = 1


def low_confidence(confidence: Floats, logprobs: Floats, settings: GenerationConfig) -> Mask:
    """Clover's own: every position whose confidence is strictly above `threshold`; when there is none, the single most
    confident one (ties: the lowest position)."""
    return _above(confidence, settings.threshold)


def tokens_per_pass(confidence: Floats, logprobs: Floats, settings: GenerationConfig) -> Mask:
    """The `tokens_per_pass` most confident positions (ties: the lowest)."""
    fill = np.zeros(len(confidence), np.bool_)
    fill[np.argsort(-confidence, kind="stable")[: settings.tokens_per_pass]] = True
    return fill


def margin(confidence: Floats, logprobs: Floats, settings: GenerationConfig) -> Mask:
    """As `low_confidence`, by the margin of the best candidate's probability over the second's."""
    probabilities = np.exp(logprobs[:, :2])
    lead = probabilities[:, 0] - (probabilities[:, 1] if logprobs.shape[1] > 1 else np.float32(0))
    return _above(lead, settings.threshold)


def entropy(confidence: Floats, logprobs: Floats, settings: GenerationConfig) -> Mask:
    """As `low_confidence`, by 1 - H / log(k + 1): H is the entropy of the best k candidates and of all others taken as one."""
    probabilities = np.exp(logprobs.astype(np.float64))
    rest = np.clip(1.0 - probabilities.sum(-1, keepdims=True), 0.0, 1.0)
    outcomes = np.concatenate((probabilities, rest), axis=-1)
    spread = -np.sum(outcomes * np.log(np.maximum(outcomes, 1e-12)), axis=-1) / np.log(outcomes.shape[1])
    return _above((1.0 - spread).astype(np.float32), settings.threshold)


def _above(score: Floats, threshold: float) -> Mask:
    fill: Mask = score > np.float32(threshold)
    if not fill.any():
        fill[int(np.argmax(score))] = True
    return fill


RULES = {
    "low_confidence": NamedRule(low_confidence),
    "tokens_per_pass": NamedRule(tokens_per_pass),
    "margin": NamedRule(margin, candidates=2),
    "entropy": NamedRule(entropy, candidates=8),
}


def find_rule(name: str) -> NamedRule:
    """The rule of a name.

    Raises:
        RequestError: there is none.
    """
    if name not in RULES:
        raise RequestError(f"rule: expected one of {', '.join(RULES)} (found {name!r})")
    return RULES[name]
