"""What comparisons share: a fixed input with rows of every phase, and relative errors with their limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clover_trt.runtime.session import StepInput, no_controls


@dataclass(frozen=True)
class Check:
    """One compared quantity; `error` and `limit` are relative errors, or numbers of differing tokens."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the limit."""
        return bool(self.error <= self.limit)


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """`||found - expected|| / ||expected||` in double precision; 0 when both are zero."""
    difference = float(np.linalg.norm(found.astype(np.float64) - expected.astype(np.float64)))
    size = float(np.linalg.norm(expected.astype(np.float64)))
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def mixed_steps(vocab: int, block: int, seed: int = 0, longest: int = 1 << 20) -> list[StepInput]:
    """A prefill of three rows, then a step with a fused, a denoising and a committing row, under an expert subset; rows stay
    within `longest` tokens.
    """
    rng = np.random.default_rng(seed)
    prompts = np.clip((40, 7, 71), 1, max(1, longest - 2 * block))
    steps = []
    for commit, noisy, mass in ((prompts, (0, 0, 0), 1.0), ((block, 0, 19), (block, block, 0), 0.8)):
        commit_len, noisy_len = np.array(commit, np.int32), np.array(noisy, np.int32)
        T, L = int((commit_len + noisy_len).max()), block
        ids = rng.integers(0, vocab, (3, T)).astype(np.int64)
        first = np.where(noisy_len > 0, commit_len, np.maximum(commit_len - L, 0))  # the block, or the last tokens
        last = commit_len + noisy_len - 1
        index = np.minimum(first[:, None] + np.arange(L), last[:, None]).astype(np.int64)
        masses = np.full(3, mass, np.float32)
        steps.append(StepInput(ids, commit_len, noisy_len, index, masses, no_controls(3, L), want_logits=True))
    return steps
