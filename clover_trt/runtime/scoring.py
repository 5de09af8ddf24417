"""Logits of a plain, committed text: what a causal language model would say at each position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clover_trt.errors import RequestError
from clover_trt.runtime.session import Floats, Session, StepInput, no_controls


def commit_logits(session: Session, ids: Sequence[int], chunk: int = 512) -> Floats:
    """Commit `ids` into slot 0, emptied first, and return the logits of every position.

    Args:
        ids: token ids, at most `session.max_len`.
        chunk: tokens committed in one step at most.

    Returns:
        `[len(ids), V]` float32.

    Raises:
        RequestError: no ids, an id outside the vocabulary, or too many ids.
    """
    vocab = session.config.vocab_size
    if not ids or len(ids) > session.max_len:
        raise RequestError(f"expected 1 to {session.max_len} ids, found {len(ids)}")
    outside = [token for token in ids if not 0 <= token < vocab]
    if outside:
        raise RequestError(f"id {outside[0]} is outside the vocabulary: expected 0 to {vocab - 1}")
    session.reset(0)
    parts = []
    for begin in range(0, len(ids), chunk):
        part = np.array([ids[begin : begin + chunk]], np.int64)
        T = part.shape[1]
        lengths = np.array([T], np.int32), np.zeros(1, np.int32)
        index = np.arange(T, dtype=np.int64)[None]
        out = session.step(StepInput(part, *lengths, index, np.ones(1, np.float32), no_controls(1, T), want_logits=True))
        assert out.logits is not None
        parts.append(out.logits[0])
    return np.concatenate(parts)
