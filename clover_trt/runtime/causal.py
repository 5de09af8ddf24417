"""Decoding with the model's causal pass: one token after another, or drafted by a denoising pass and verified.

Self-speculative decoding drafts a block with one denoising pass (fused with the commit of what was accepted last), then commits
the draft tentatively: the causal model's prediction after each drafted token says how far the draft agrees with it. The agreeing
tokens and the model's own next one are accepted; unless the whole draft was, the tentative commit is taken back, and the next
pass commits what was accepted. The response is that of greedy autoregressive decoding.
"""

from __future__ import annotations

import numpy as np

from clover_trt.errors import NumericsError, RequestError
from clover_trt.runtime.controls import RowControls
from clover_trt.runtime.sampling import choose
from clover_trt.runtime.sequence import Filled, RowPlan, Sequence
from clover_trt.runtime.session import Floats, Ints

Settled = tuple[int, float, Ints, Floats]  # a token, its confidence, and the candidates of its position


class CausalSequence(Sequence):
    """A request in mode "autoregressive" or "self-speculative"; the same life as a `Sequence`.

    Raises:
        RequestError: as `Sequence`, or self-speculative decoding is asked to sample or to penalise, which it can't.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        s = self.settings
        self._drafting = s.mode == "self-speculative"
        self._draft: list[int] = []
        if self._drafting:
            neutral = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.0, 0.0, 0.0)
            for name, wrong in (
                ("do_sample", s.do_sample),
                ("repetition, presence or frequency penalty", not neutral),
                ("no_repeat_ngram_size", s.no_repeat_ngram_size > 0),
                ("bad_words_ids", bool(s.bad_words_ids)),
            ):
                if wrong:
                    raise RequestError(f"mode self-speculative is greedy and takes no {name}; use mode autoregressive")

    @property
    def reusable(self) -> list[int]:
        """All but the last token of the prompt, whose logits give the first token of the response."""
        return list(self.prompt[:-1])

    def plan(self) -> RowPlan:
        """What the row of the next block step holds."""
        assert self.finish_reason is None
        assert self._plan is None
        if self._draft:
            self._plan = RowPlan(list(self._draft), [], list(range(len(self._draft))), tentative=True)
            return self._plan
        chunk = self._pending[: self.next_commit]
        if len(chunk) < len(self._pending):
            self._plan = RowPlan(chunk, [])
        elif self._drafting:
            size = self.settings.block_size
            self._plan = RowPlan(chunk, [self.mask] * size, list(range(len(chunk) - 1, len(chunk) + size)))
        else:
            self._plan = RowPlan(chunk, [], [len(chunk) - 1])
        return self._plan

    def row_controls(self) -> RowControls:
        """Logit controls for the positions with candidates."""
        assert self._plan is not None
        at, count = self.block_start, len(self._plan.positions)
        if self._plan.tentative:
            positions = at + 1 + np.arange(count, dtype=np.int64)
        else:  # the next token, then the block that begins at the same position
            positions = at + np.maximum(np.arange(count, dtype=np.int64) - 1, 0)
        return self.controls.row(positions).under(self._bans, count)

    def apply(self, ids: Ints, logprobs: Floats) -> list[Filled]:
        """Take the candidates of the planned step; the tokens that it settles become part of the response.

        Raises:
            NumericsError: the candidates are not numbers.
        """
        plan, self._plan = self._plan, None
        assert plan is not None
        self.undo = False
        self.counts.forwards += 1
        self.counts.denoise_passes += bool(plan.noisy)
        self.counts.commits += 1
        if not plan.tentative:
            self.counts.prefill_tokens += len(plan.commit)
            self._prefilled(len(plan.commit))
        if not plan.positions:
            return []
        ids, logprobs = ids[: len(plan.positions)], logprobs[: len(plan.positions)]
        if not np.isfinite(logprobs[:, 0]).all():
            raise NumericsError(
                f"the model's output at response position {self.block_start} is not a number; this request has no answer"
            )
        settled = self._verified(ids, logprobs) if plan.tentative else self._first(ids, logprobs)
        filled = [self._emit(*each) for each in settled if self.finish_reason is None]
        self._check_budget()
        return filled

    def _first(self, ids: Ints, logprobs: Floats) -> list[Settled]:
        """The next token; a draft that agrees with it waits for verification."""
        tokens, confidence = choose(ids[:1], logprobs[:1], self.settings, self._rng)
        token = int(tokens[0])
        self._opening = (token, float(confidence[0]), ids[0], logprobs[0])
        if self._drafting and int(ids[1, 0]) == token:
            self._draft = self._cut(ids[1:, 0].tolist())
            if len(self._draft) > 1:
                return []
            self._draft = []
        elif self._drafting:
            self.counts.accepted.append(0)
        self._pending = [token]
        return [self._opening]

    def _cut(self, draft: list[int]) -> list[int]:
        """A draft no longer than the response may be, and ending where the controls would change."""
        draft = draft[: self.settings.max_new_tokens - len(self.response)]
        for i, token in enumerate(draft):
            if token in self.end_ids or token == self.think_end_id:
                return draft[: i + 1]
        return draft

    def _verified(self, ids: Ints, logprobs: Floats) -> list[Settled]:
        """The drafted tokens that the causal model agrees with, and its own next one.

        The prediction after drafted token i is row i; the first drafted token was settled by the pass that drafted it.
        """
        predicted = ids[:, 0].tolist()
        agreed = 1
        while agreed < len(self._draft) and self._draft[agreed] == predicted[agreed - 1]:
            agreed += 1
        self.counts.accepted.append(agreed)
        self.undo = agreed < len(self._draft)
        following = [(int(predicted[i]), float(np.exp(logprobs[i, 0])), ids[i], logprobs[i]) for i in range(agreed)]
        settled = [self._opening, *following]
        self._pending = [each[0] for each in (settled if self.undo else settled[-1:])]
        self._draft = []
        return settled

    def _emit(self, token: int, confidence: float, ids: Ints, logprobs: Floats) -> Filled:
        """Append a token to the response, which may end it."""
        position = len(self.response)
        self.response.append(token)
        self._bans.add(token)
        self._take(position, token, confidence, ids, logprobs)
        if token in self.end_ids:
            self.finish_reason = "stop"
        elif len(self.response) >= self.settings.max_new_tokens:
            self.finish_reason = "length"
        return Filled(position, token, confidence)
