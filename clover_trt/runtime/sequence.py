"""One request from prompt to answer: which tokens its row commits and denoises next, and what a pass filled.

A sequence knows no session. `plan` says what its row of the next block step holds, `apply` takes the candidates
of that step. Any scheduler can drive it.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clover_trt.config import GenerationConfig, ModelConfig
from clover_trt.errors import NumericsError, RequestError
from clover_trt.runtime.controls import ControlState, RowControls
from clover_trt.runtime.sampling import choose
from clover_trt.runtime.session import Floats, Ints
from clover_trt.runtime.unmask import low_confidence

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class RowPlan:
    """A row of the next block step: tokens to commit, then tokens of the noisy block (mask where unresolved)."""

    commit: list[int]
    noisy: list[int]


@dataclass(frozen=True)
class Filled:
    """A position of the response that a pass filled."""

    position: int
    token: int
    confidence: float


@dataclass
class Counts:
    """Work that a sequence took part in. Forwards are all block steps, prefill and commit included."""

    forwards: int = 0
    denoise_passes: int = 0
    commits: int = 0
    prefill_tokens: int = 0


@dataclass
class Sequence:
    """State of one request.

    Args:
        prompt: token ids, committed whole.
        settings: decoding settings.
        model: geometry, block size and mask token.
        max_len: longest prompt and response together.
        prefill_chunk: prompt tokens committed in one step at most.
        think_end_id: id of `</think>`, if the vocabulary has it.
        thinking: whether the response starts inside a thinking part.
        fused: whether the pass that commits a block also makes the first pass over the next one.

    Raises:
        RequestError: the request breaks a limit; nothing has been computed.
    """

    prompt: Ids[int]
    settings: GenerationConfig
    model: ModelConfig
    max_len: int
    valid_tokens: int
    prefill_chunk: int = 512
    think_end_id: int | None = None
    thinking: bool = False
    fused: bool = True
    response: list[int] = field(default_factory=list, init=False)
    counts: Counts = field(default_factory=Counts, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._validate()
        assert self.model.mask_token_id is not None
        self.mask: int = self.model.mask_token_id
        eos = () if self.settings.ignore_eos else self.settings.eos_token_id
        self.end_ids = frozenset((*eos, *self.settings.stop_token_ids))
        self.controls = ControlState(self.settings, eos, self.think_end_id, self.thinking)
        self._rng = np.random.Generator(np.random.Philox(self.settings.seed))
        self._pending = list(self.prompt)
        self._block: list[int] = []
        self._masked: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._plan: RowPlan | None = None

    def _validate(self) -> None:
        size, prompt = self.settings.block_size, len(self.prompt)
        if self.model.mask_token_id is None:
            raise RequestError("this model has no mask token (a plain Qwen3.5-MoE checkpoint): it can't denoise blocks")
        if size > self.model.block_size:
            raise RequestError(
                f"block_size = {size} is not possible: the engine was built for blocks of up to {self.model.block_size}"
            )
        if not prompt:
            raise RequestError("the prompt is empty: expected at least one token")
        for position, token in enumerate(self.prompt):
            if not 0 <= token < self.valid_tokens:
                raise RequestError(f"prompt token {position} is {token}: expected 0 to {self.valid_tokens - 1}")
            if token == self.model.mask_token_id:
                raise RequestError(f"prompt token {position} is the mask token, which a prompt can't hold; remove it")
        room = -(-self.settings.max_new_tokens // size) * size
        if prompt + room > self.max_len:
            raise RequestError(
                f"the prompt has {prompt} tokens and max_new_tokens = {self.settings.max_new_tokens} needs room for {room} "
                f"(whole blocks of {size}): {prompt + room} in all, the limit is {self.max_len}; "
                "shorten the prompt or lower max_new_tokens"
            )

    @property
    def block_start(self) -> int:
        """Position in the response where the current block begins."""
        return len(self.response)

    @property
    def block(self) -> list[int]:
        """Tokens of the current block, the mask token where unresolved."""
        return list(self._block)

    @property
    def next_commit(self) -> int:
        """Tokens that the next step commits."""
        return min(len(self._pending), max(self.prefill_chunk, self.settings.block_size))

    def plan(self) -> RowPlan:
        """What the row of the next block step holds."""
        assert self.finish_reason is None
        assert self._plan is None
        chunk, rest = self._pending[: self.next_commit], self._pending[self.next_commit :]
        with_block = not rest and (self.fused or not chunk)
        if with_block and not self._block:
            self._block = [self.mask] * self.settings.block_size
            self._masked = np.ones(self.settings.block_size, np.bool_)
        self._plan = RowPlan(chunk, list(self._block) if with_block else [])
        return self._plan

    def row_controls(self) -> RowControls:
        """Logit controls for the positions of the current block."""
        return self.controls.row(np.arange(len(self._block), dtype=np.int64) + self.block_start)

    def apply(self, ids: Ints, logprobs: Floats) -> list[Filled]:
        """Take the candidates of the planned step and fill what the unmasking rule allows.

        Args:
            ids, logprobs: `[block, k]`; ignored when the plan had no noisy tokens.

        Returns:
            the positions filled, in order.

        Raises:
            NumericsError: the candidates of an unresolved position are not numbers.
        """
        plan, self._plan = self._plan, None
        assert plan is not None
        self.counts.forwards += 1
        if plan.commit:
            self.counts.commits += 1
            self.counts.prefill_tokens += len(plan.commit)
            self._pending = self._pending[len(plan.commit) :]
        if not plan.noisy:
            return []
        self.counts.denoise_passes += 1
        size = len(plan.noisy)
        if not np.isfinite(logprobs[:size, 0][self._masked]).all():
            raise NumericsError(
                f"the model's output at response position {self.block_start} is not a number; this request has no answer"
            )
        tokens, confidence = choose(ids[:size], logprobs[:size], self.settings, self._rng)
        fill = low_confidence(confidence, self._masked, self.settings.threshold)
        filled = []
        for i in np.flatnonzero(fill).tolist():
            self._block[i], self._masked[i] = int(tokens[i]), False
            self.controls.add(int(tokens[i]))
            filled.append(Filled(self.block_start + i, int(tokens[i]), float(confidence[i])))
        self._close()
        return filled

    def resolved(self) -> list[int]:
        """Response tokens with nothing unresolved before them; they never change."""
        if not self._block:
            return list(self.response)
        return self.response + self._block[: self._resolved_in_block()]

    def _resolved_in_block(self) -> int:
        return int(np.argmax(self._masked)) if self._masked.any() else len(self._block)

    def _close(self) -> None:
        """End the request or the block when enough of the block is resolved."""
        done = self._block[: self._resolved_in_block()]
        left = self.settings.max_new_tokens - len(self.response)
        ends = [i for i, token in enumerate(done[:left]) if token in self.end_ids]
        if ends:
            self.response += done[: ends[0] + 1]
            self.finish_reason = "stop"
        elif len(done) >= left:
            self.response += done[:left]
            self.finish_reason = "length"
        elif len(done) == len(self._block):
            self.response += self._block
            self._pending = self._block
        else:
            return
        self._block = []

    def text_ids(self) -> list[int]:
        """Resolved response tokens that belong to the text: all but the token that ended it."""
        ids = self.resolved()
        return ids[:-1] if self.finish_reason == "stop" and ids[-1:] and ids[-1] in self.end_ids else ids

    def finish(self, reason: FinishReason) -> None:
        """End the request from outside, with the tokens resolved so far."""
        self.response, self._block = self.resolved(), []
        self.finish_reason = reason
