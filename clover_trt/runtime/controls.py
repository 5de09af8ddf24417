"""Logit controls of one request: what its response so far asks of the next pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from clover_trt.config import GenerationConfig
from clover_trt.runtime.bans import TokenBans
from clover_trt.runtime.session import ControlInput, Floats, Ints

BANNED = np.float32(-1e9)  # added to a logit


def ramp(positions: Ints, start: int, window: int, strength: float) -> Floats:
    """Linear bias: 0 up to response position `start`, `strength` from `start + window` on.

    Args:
        positions: `[L]`, position of each token in the response.
    """
    share = np.clip((positions - start) / window, 0.0, 1.0)
    return (strength * share).astype(np.float32)


@dataclass(frozen=True)
class RowControls:
    """Controls of one row; lists may have any length, `stack` pads them."""

    history_ids: Ints  # `[R]`, distinct tokens of the response
    history_counts: Floats  # `[R]`
    biases: dict[int, Floats]  # token id to `[L]` values

    def under(self, bans: TokenBans, positions: int) -> RowControls:
        """The same, with what is banned ruled out: some tokens at all of the `positions`, others at the first, the next token."""
        always, banned = bans.always, bans.banned()
        return self._without(always, slice(None), positions)._without(banned - always, 0, positions)

    def _without(self, tokens: Iterable[int], index: int | slice, positions: int) -> RowControls:
        biases = dict(self.biases)
        for token in tokens:
            values = biases.get(token, np.zeros(positions, np.float32)).copy()
            values[index] = BANNED
            biases[token] = values
        return RowControls(self.history_ids, self.history_counts, biases)


class ControlState:
    """Keeps a request's token counts, so that a pass costs the same however long the response is.

    Args:
        settings: penalties and ramps.
        end_ids: end-of-turn ids, which the length ramp raises.
        think_end_id: id of `</think>`, which the thinking ramp raises while the thinking part is open.
    """

    def __init__(self, settings: GenerationConfig, end_ids: Sequence[int], think_end_id: int | None, thinking: bool) -> None:
        self.settings, self.end_ids, self.think_end_id = settings, tuple(end_ids), think_end_id
        self.thinking = thinking and think_end_id is not None
        self._places: dict[int, int] = {}  # token id to its place in the arrays below, which grow by doubling
        self._ids: Ints = np.zeros(64, np.int64)
        self._counts: Floats = np.zeros(64, np.float32)
        self._penalised = (settings.repetition_penalty, settings.presence_penalty, settings.frequency_penalty) != (1.0, 0.0, 0.0)

    def add(self, token: int) -> None:
        """Count a token that was just filled."""
        if self._penalised:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
        if token == self.think_end_id:
            self.thinking = False

    def row(self, positions: Ints) -> RowControls:
        """Controls for positions `[L]` of the response."""
        s, biases = self.settings, {}
        length = ramp(positions, s.dllm_length_penalty_start, s.dllm_length_penalty_window, s.dllm_length_penalty_strength)
        if length.any():
            biases.update(dict.fromkeys(self.end_ids, length))
        if self.thinking:
            think = ramp(positions, s.dllm_think_end_start, s.dllm_think_end_window, s.dllm_think_end_strength)
            if think.any() and self.think_end_id is not None:
                biases[self.think_end_id] = think
        used = len(self._places)
        return RowControls(self._ids[:used], self._counts[:used], biases)


def stack(rows: Sequence[tuple[RowControls, GenerationConfig] | None], positions: int, filler: int) -> ControlInput:
    """Controls of B rows as arrays; a row of None has none.

    Args:
        rows: controls and settings of each row.
        positions: L.
        filler: id of unused entries, one that never comes out (the mask token).
    """
    B = len(rows)
    present = [row for row in rows if row is not None]
    history = max((len(controls.history_ids) for controls, _ in present), default=0)
    biases = max((len(controls.biases) for controls, _ in present), default=0)
    out = ControlInput(
        np.full((B, history), filler, np.int64),
        np.zeros((B, history), np.float32),
        np.ones(B, np.float32),
        np.zeros(B, np.float32),
        np.zeros(B, np.float32),
        np.full((B, biases), filler, np.int64),
        np.zeros((B, positions, biases), np.float32),
    )
    for b, row in enumerate(rows):
        if row is None:
            continue
        controls, settings = row
        out.repetition_penalty[b] = settings.repetition_penalty
        out.presence_penalty[b] = settings.presence_penalty
        out.frequency_penalty[b] = settings.frequency_penalty
        used = len(controls.history_ids)
        out.history_ids[b, :used], out.history_counts[b, :used] = controls.history_ids, controls.history_counts
        for i, (token, values) in enumerate(controls.biases.items()):
            out.bias_ids[b, i], out.bias_values[b, : len(values), i] = token, values
    return out
