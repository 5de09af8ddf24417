from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clover_trt.config import GenerationConfig
from clover_trt.runtime import unmask


def low_confidence(confidence: np.ndarray, threshold: float) -> np.ndarray:
    return unmask.low_confidence(confidence, confidence[:, None], GenerationConfig(threshold=threshold))


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=32), st.floats(0.01, 1.0))
def test_fills_what_is_above_the_threshold_or_the_single_best(scores: list[float], threshold: float) -> None:
    confidence = np.array(scores, np.float32)
    fill = low_confidence(confidence, threshold)
    above = confidence > np.float32(threshold)
    if above.any():
        assert (fill == above).all()
    else:
        assert np.flatnonzero(fill).tolist() == [scores.index(max(scores))]


def test_the_threshold_itself_does_not_fill() -> None:
    assert low_confidence(np.full(3, 0.5, np.float32), 0.5).tolist() == [True, False, False]


def test_all_and_one_left() -> None:
    assert low_confidence(np.full(4, 0.99, np.float32), 0.95).all()
    assert low_confidence(np.zeros(1, np.float32), 0.95).tolist() == [True]
