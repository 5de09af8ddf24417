"""The session: the one seam between decoding and whatever computes the block step.

Shapes: B rows, T tokens, L positions with candidates, k candidates, R history entries, A biases, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clover_trt.config import ModelConfig

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ControlInput:
    """Logit controls, one entry a row; see `clover_trt.model.head.Controls` for their meaning."""

    history_ids: Ints  # [B, R], distinct; unused entries hold the mask token
    history_counts: Floats  # [B, R]
    repetition_penalty: Floats  # [B]
    presence_penalty: Floats  # [B]
    frequency_penalty: Floats  # [B]
    bias_ids: Ints  # [B, A], distinct; unused entries hold the mask token
    bias_values: Floats  # [B, L, A]


@dataclass(frozen=True)
class StepInput:
    """One block step over B neighbouring slots of a session; a row with both lengths 0 is idle."""

    input_ids: Ints  # [B, T]
    commit_len: NDArray[np.int32]  # [B]
    noisy_len: NDArray[np.int32]  # [B]
    logit_index: Ints  # [B, L], positions of the row that get candidates
    expert_mass: Floats  # [B]
    controls: ControlInput
    candidates: int = 1
    want_logits: bool = False
    first_slot: int = 0

    @property
    def slots(self) -> slice:
        """The slots of the rows."""
        return slice(self.first_slot, self.first_slot + len(self.input_ids))


@dataclass(frozen=True)
class StepOutput:
    """Candidates by falling log-probability, and how many distinct experts each layer used."""

    candidate_ids: Ints  # [B, L, k]
    candidate_logprobs: Floats  # [B, L, k]
    distinct_experts: Ints  # [layers]
    logits: Floats | None = None  # [B, L, V], before any control, when asked for


@dataclass(frozen=True)
class Snapshot:
    """State of a slot after `end` tokens: key and value rows of tokens `begin` to `end`, and what recurrent layers hold."""

    begin: int
    end: int
    rows: dict[str, NDArray[Any]]  # by cache name, the row axis second: [kv_heads, end - begin, head_dim]
    states: dict[str, NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes that the snapshot takes."""
        return sum(array.nbytes for array in (*self.rows.values(), *self.states.values()))


class Session(Protocol):
    """An engine with its caches. Implementations: ONNX Runtime (CPU), TensorRT (GPU), PyTorch (the reference)."""

    config: ModelConfig
    slots: int
    max_len: int
    prefix_len: NDArray[np.int32]  # [slots], tokens in each slot's caches

    def step(self, step: StepInput) -> StepOutput:
        """Run one block step; the caches and `prefix_len` advance by `commit_len`."""
        ...

    def reset(self, slot: int) -> None:
        """Empty a slot."""
        ...

    def save(self, slot: int, begin: int) -> Snapshot:
        """Copy the state of a slot, with the key and value rows of its tokens from `begin` on."""
        ...

    def load(self, slot: int, chain: Sequence[Snapshot]) -> None:
        """Put a slot into the state of the last snapshot; the rows of all are written, those before the first stay."""
        ...

    def cache_bytes(self) -> int:
        """Bytes of the caches of all slots."""
        ...


def no_controls(rows: int, positions: int) -> ControlInput:
    """Controls that change nothing."""
    return ControlInput(
        np.zeros((rows, 0), np.int64),
        np.zeros((rows, 0), np.float32),
        np.ones(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros((rows, 0), np.int64),
        np.zeros((rows, positions, 0), np.float32),
    )


def is_row_cache(name: str) -> bool:
    """Whether a cache holds a row for each token, as keys and values do; the others hold a state."""
    return name.startswith(("key_cache", "value_cache"))


def check_step(session: Session, step: StepInput) -> None:
    """What every session assumes of a step; a broken assumption is a fault of the caller, not of a user."""
    B, T = step.input_ids.shape
    used = step.commit_len + step.noisy_len
    assert 0 <= step.first_slot < step.first_slot + B <= session.slots, f"rows {step.slots} for {session.slots} slots"
    assert (step.commit_len >= 0).all()
    assert (step.noisy_len >= 0).all()
    assert (used <= T).all()
    end = session.prefix_len[step.slots] + used
    assert (end <= session.max_len).all(), f"rows would reach {end.tolist()} of {session.max_len} tokens"
