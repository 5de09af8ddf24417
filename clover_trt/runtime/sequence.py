"""One request from prompt to answer: which tokens its row commits and denoises next, and what a pass filled.

A sequence knows no session. `plan` says what its row of the next block step holds, `apply` takes the candidates
of that step. Any scheduler can drive it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from clover_trt.config import GenerationConfig, ModelConfig
from clover_trt.errors import NumericsError, RequestError
from clover_trt.runtime.bans import TokenBans
from clover_trt.runtime.controls import ControlState, RowControls
from clover_trt.runtime.sampling import candidates_needed, choose
from clover_trt.runtime.session import Floats, Ints
from clover_trt.runtime.unmask import find_rule

FinishReason = Literal["stop", "length", "max_forwards", "cancelled", "deadline", "error"]


@dataclass(frozen=True)
class RowPlan:
    """A row of the next block step: tokens to commit, then tokens of the noisy block (mask where unresolved).

    The `positions` of the row get candidates. A `tentative` commit may be taken back: the state before it must be kept until the
    candidates have been seen.
    """

    commit: list[int]
    noisy: list[int]
    positions: list[int] = field(default_factory=list)
    tentative: bool = False


@dataclass(frozen=True)
class Filled:
    """A position of the response that a pass filled."""

    position: int
    token: int
    confidence: float


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token of the response, and the likeliest tokens at its position with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Counts:
    """Work that a sequence took part in. Forwards are all block steps, prefill and commit included."""

    forwards: int = 0
    denoise_passes: int = 0
    commits: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, taken from a prefix cache
    accepted: list[int] = field(default_factory=list)  # drafted tokens accepted by each verification


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
        checkpoint: a prefill step ends after so many tokens of the prompt, so that a prefix cache can keep the state there:
            what follows (how a template opens the answer) is not part of the next turn's prompt. 0 for none.

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
    checkpoint: int = 0
    response: list[int] = field(default_factory=list, init=False)
    counts: Counts = field(default_factory=Counts, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    undo: bool = field(default=False, init=False)  # whether the last tentative commit must be taken back
    worth_keeping: bool = field(default=False, init=False)  # whether the last step ended at the checkpoint

    def __post_init__(self) -> None:
        self._validate()
        self._rule = find_rule(self.settings.rule)
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
        self._bans = TokenBans(self.settings.no_repeat_ngram_size, self.settings.bad_words_ids)
        self._logprobs: dict[int, TokenLogprob] = {}
        self._told = 0  # resolved tokens that `new_text_ids` has given out

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
        limit = max(self.prefill_chunk, self.settings.block_size)
        return min(len(self._pending), limit, self.checkpoint or limit)

    @property
    def tentative(self) -> bool:
        """Whether the commit of the planned step may be taken back."""
        return self._plan is not None and self._plan.tentative

    @property
    def candidates(self) -> int:
        """Candidates a position that `apply` looks at."""
        return max(candidates_needed(self.settings, self.valid_tokens), self.settings.logprobs or 1, self._rule.candidates)

    @property
    def reusable(self) -> Ids[int]:
        """Tokens of the prompt whose state may come from a prefix cache."""
        return self.prompt

    def skip(self, count: int) -> None:
        """Take the first `count` tokens of the prompt as committed: their state is in the slot already."""
        self._prefilled(count)
        self.counts.reused_tokens = count

    def _prefilled(self, count: int) -> None:
        """The first `count` pending tokens are in the caches."""
        self._pending = self._pending[count:]
        self.worth_keeping = self.checkpoint == count > 0
        self.checkpoint = max(0, self.checkpoint - count)

    def committed(self, count: int) -> list[int]:
        """The first `count` tokens of prompt and response, which a slot's caches hold."""
        return [*self.prompt[:count], *self.response[: max(0, count - len(self.prompt))]]

    def plan(self) -> RowPlan:
        """What the row of the next block step holds."""
        assert self.finish_reason is None
        assert self._plan is None
        chunk, rest = self._pending[: self.next_commit], self._pending[self.next_commit :]
        with_block = not rest and (self.fused or not chunk)
        if with_block and not self._block:
            self._block = [self.mask] * self.settings.block_size
            self._masked = np.ones(self.settings.block_size, np.bool_)
        noisy = list(self._block) if with_block else []
        self._plan = RowPlan(chunk, noisy, (len(chunk) + self._unresolved()).tolist() if noisy else [])
        return self._plan

    def row_controls(self) -> RowControls:
        """Logit controls for the unresolved positions of the current block."""
        unresolved = self._unresolved()
        return self.controls.row(unresolved + self.block_start).under(self._bans, len(unresolved))

    def _unresolved(self) -> Ints:
        """Positions of the current block that are still to be filled."""
        return np.flatnonzero(self._masked)

    def apply(self, ids: Ints, logprobs: Floats) -> list[Filled]:
        """Take the candidates of the planned step and fill what the unmasking rule allows.

        Args:
            ids, logprobs: `[L, k]`, L the plan's positions at least; ignored when it had none.

        Returns:
            the positions filled, in order.

        Raises:
            NumericsError: the candidates are not numbers.
        """
        plan, self._plan = self._plan, None
        assert plan is not None
        self.counts.forwards += 1
        if plan.commit:
            self.counts.commits += 1
            self.counts.prefill_tokens += len(plan.commit)
            self._prefilled(len(plan.commit))
        if not plan.noisy:
            return []
        self.counts.denoise_passes += 1
        unresolved = self._unresolved()
        ids, logprobs = ids[: len(unresolved)], logprobs[: len(unresolved)]
        if not np.isfinite(logprobs[:, 0]).all():
            raise NumericsError(
                f"the model's output at response position {self.block_start} is not a number; this request has no answer"
            )
        tokens, confidence = choose(ids, logprobs, self.settings, self._rng)
        filled = []
        for i in self._in_order(self._rule.fill(confidence, logprobs, self.settings), tokens):
            at, token = int(unresolved[i]), int(tokens[i])
            self._block[at], self._masked[at] = token, False
            self._take(self.block_start + at, token, float(confidence[i]), ids[i], logprobs[i])
            filled.append(Filled(self.block_start + at, token, float(confidence[i])))
        self._close()
        self._check_budget()
        return filled

    def _in_order(self, fill: NDArray[np.bool_], tokens: Ints) -> list[int]:
        """Which of the unresolved positions to fill. Under a ban that looks back, a block fills from left to right, so that what
        stands before a position is known: the first always (its ban was in the logits), then on while the rule agrees and
        nothing is banned."""
        if not self._bans.ordered:
            return [int(i) for i in np.flatnonzero(fill)]
        chosen: list[int] = []
        for i in range(len(fill)):
            token = int(tokens[i])
            if chosen and (not fill[i] or token in self._bans.banned()):
                break
            chosen.append(i)
            self._bans.add(token)
        return chosen

    def _take(self, position: int, token: int, confidence: float, ids: Ints, logprobs: Floats) -> None:
        """Note a token of the response for the controls and the log-probabilities."""
        self.controls.add(token)
        if self.settings.logprobs is not None:
            top = list(zip(ids.tolist(), logprobs.tolist(), strict=True))[: self.settings.logprobs]
            self._logprobs[position] = TokenLogprob(token, float(np.log(max(confidence, 1e-45))), top)

    def _check_budget(self) -> None:
        if self.finish_reason is None and self.counts.forwards >= (self.settings.max_forwards or self.counts.forwards + 1):
            self.finish("max_forwards")

    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities of the tokens of the response, when they were asked for."""
        return None if self.settings.logprobs is None else self.logprobs_of(range(len(self.response)))

    def logprobs_of(self, positions: Iterable[int]) -> list[TokenLogprob]:
        """Log-probabilities at resolved positions of the response."""
        return [self._logprobs[i] for i in positions]

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

    def new_text_ids(self) -> list[int]:
        """Resolved tokens that belong to the text and were not given out before; the token that ended it does not."""
        ended = self.finish_reason == "stop" and self.response and self.response[-1] in self.end_ids
        fresh = self.response[self._told : len(self.response) - bool(ended)]
        if self._block:
            fresh += self._block[max(0, self._told - len(self.response)) : self._resolved_in_block()]
        self._told += len(fresh)
        return fresh

    def finish(self, reason: FinishReason) -> None:
        """End the request from outside, with the tokens resolved so far."""
        self.response, self._block = self.resolved(), []
        self.finish_reason = reason
