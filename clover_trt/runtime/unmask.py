"""Unmasking rules: which masked positions of a block a pass fills."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def low_confidence(confidence: NDArray[np.float32], masked: NDArray[np.bool_], threshold: float) -> NDArray[np.bool_]:
    """Fill every masked position whose confidence is strictly above the threshold; when there is none, the
    single most confident one (ties: the lowest position), so that each pass makes progress.

    Args:
        confidence: `[block]` float32, probability of each position's candidate.
        masked: `[block]` bool, positions still to be filled.
        threshold: in (0, 1].

    Returns:
        `[block]` bool, a subset of `masked`, empty only when `masked` is.
    """
    fill = masked & (confidence > np.float32(threshold))
    if not fill.any() and masked.any():
        fill[int(np.argmax(np.where(masked, confidence, -np.inf)))] = True
    return fill
