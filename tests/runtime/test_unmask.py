from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clover_trt.config import GenerationConfig
from clover_trt.runtime import unmask


def low_confidence(confidence: np.ndarray, masked: np.ndarray, threshold: float) -> np.ndarray:
    return unmask.low_confidence(confidence, confidence[:, None], masked, GenerationConfig(threshold=threshold))


blocks = st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=32)


@given(blocks, st.floats(0.01, 1.0))
def test_fills_what_is_above_the_threshold_or_the_single_best(block: list[tuple[float, bool]], threshold: float) -> None:
    confidence = np.array([c for c, _ in block], np.float32)
    masked = np.array([m for _, m in block])
    fill = low_confidence(confidence, masked, threshold)
    above = masked & (confidence > np.float32(threshold))
    if above.any():
        assert (fill == above).all()
    elif masked.any():
        best = max(confidence[masked])
        assert fill.sum() == 1
        assert int(np.argmax(fill)) == min(i for i in range(len(block)) if masked[i] and confidence[i] == best)
    else:
        assert not fill.any()


def test_the_threshold_itself_does_not_fill() -> None:
    half = np.full(3, 0.5, np.float32)
    assert low_confidence(half, np.ones(3, bool), 0.5).tolist() == [True, False, False]


def test_all_and_one_left() -> None:
    sure = np.full(4, 0.99, np.float32)
    assert low_confidence(sure, np.ones(4, bool), 0.95).all()
    assert low_confidence(sure * 0, np.array([0, 0, 1, 0], bool), 0.95).tolist() == [False, False, True, False]
