"""A request in flight: its sequence, its text as it grows, and its figures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from clover_trt.errors import NumericsError
from clover_trt.runtime.chat import ToolCall, parse_answer
from clover_trt.runtime.sequence import Filled, FinishReason, Sequence, TokenLogprob
from clover_trt.runtime.session import StepOutput
from clover_trt.runtime.stops import StopFinder
from clover_trt.runtime.text import PieceMaker, TextCodec

PERCENTILES = {"median": 50, "p95": 95, "p99": 99}


@dataclass(frozen=True)
class PassEvent:
    """What one block step did for one request."""

    request: Request
    forward: int  # number of the step in this request, from 1
    filled: list[Filled]
    block_start: int  # position in the response of `block`
    block: list[int]  # after the pass, the mask token where unresolved; empty while the prompt is committed
    text: str  # newly finished text, whole characters only
    finish_reason: FinishReason | None


@dataclass
class Result:
    """A finished request. Token counts include the end-of-turn token, text does not."""

    text: str
    reasoning: str  # the part of the text before </think>
    content: str  # the rest, tool calls taken out
    tool_calls: list[ToolCall]
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    forwards: int  # NFE: block steps, prefill and commits included
    denoise_passes: int
    commits: int  # steps that committed tokens, of the prompt or of a block
    cached_tokens: int  # of the prompt, whose state came from a prefix cache
    tpf: float  # generated tokens per forward, prefill and commits included
    tpf_denoise: float  # generated tokens per denoise pass
    seconds: float
    seconds_to_first_block: float
    inter_block_seconds: dict[str, float]  # median, p95 and p99 of the time between finished blocks; empty for one block
    tokens_per_second: float
    distinct_experts: list[float]  # mean per layer over the forwards
    accepted_per_verification: float | None = None  # drafted tokens, in self-speculative mode
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None


class Request:
    """A sequence on its way through a scheduler, with its text, times and expert counts."""

    def __init__(self, sequence: Sequence, codec: TextCodec) -> None:
        self.sequence = sequence
        self.start = time.perf_counter()
        self.first_block: float | None = None
        self.end = self.start
        self.gaps: list[float] = []  # seconds between finished blocks
        self._last_block: float | None = None
        self._experts: np.ndarray[Any, np.dtype[np.int64]] | None = None  # sum over the forwards
        self._text: list[str] = []
        self.error: str | None = None
        self._pieces, self._stops = PieceMaker(codec), StopFinder(sequence.settings.stop)

    def apply(self, output: StepOutput, index: int) -> PassEvent:
        """Take row `index` of a step's output."""
        sequence = self.sequence
        block_start = sequence.block_start
        filled: list[Filled] = []
        try:
            filled = sequence.apply(output.candidate_ids[index], output.candidate_logprobs[index])
        except NumericsError as failure:
            self.error = str(failure)
            sequence.finish("error")
        text = self._new_text()
        self.end = time.perf_counter()
        self._experts = output.distinct_experts + (0 if self._experts is None else self._experts)
        if sequence.block_start > block_start or self.ended:
            if self._last_block is None:
                self.first_block = self.end
            else:
                self.gaps.append(self.end - self._last_block)
            self._last_block = self.end
        block = sequence.block or sequence.response[block_start:]
        forward = sequence.counts.forwards
        return PassEvent(self, forward, filled, block_start, block, text, sequence.finish_reason)

    def end_early(self, reason: FinishReason) -> PassEvent:
        """End the request from outside, cancelled or past its deadline."""
        self.sequence.finish(reason)
        self.end = time.perf_counter()
        text = self._new_text()
        return PassEvent(self, self.sequence.counts.forwards, [], len(self.sequence.response), [], text, reason)

    def _new_text(self) -> str:
        piece = self._pieces.push(self.sequence.new_text_ids(), final=self.ended)
        text = self._stops.push(piece, final=self.ended)
        if self._stops.found and self.sequence.finish_reason != "stop":
            self.sequence.finish("stop")
        self._text.append(text)
        return text

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._text)

    @property
    def ended(self) -> bool:
        """Whether no further step is needed."""
        return self.sequence.finish_reason is not None

    def result(self) -> Result:
        """Answer and figures."""
        counts, tokens, seconds = self.sequence.counts, len(self.sequence.response), self.end - self.start
        text = self.text
        parts = parse_answer(text, thinking=self.sequence.thinking)
        return Result(
            text=text,
            reasoning=parts.reasoning,
            content=parts.content,
            tool_calls=parts.tool_calls,
            token_ids=list(self.sequence.response),
            prompt_tokens=len(self.sequence.prompt),
            finish_reason=self.sequence.finish_reason or "unfinished",
            forwards=counts.forwards,
            denoise_passes=counts.denoise_passes,
            commits=counts.commits,
            cached_tokens=counts.reused_tokens,
            tpf=tokens / counts.forwards if counts.forwards else 0.0,
            tpf_denoise=tokens / counts.denoise_passes if counts.denoise_passes else 0.0,
            seconds=seconds,
            seconds_to_first_block=(self.first_block or self.end) - self.start,
            inter_block_seconds=dict(zip(PERCENTILES, np.percentile(self.gaps, list(PERCENTILES.values())).tolist(), strict=True))
            if self.gaps
            else {},
            tokens_per_second=tokens / seconds if seconds else 0.0,
            distinct_experts=(self._experts / counts.forwards).tolist() if self._experts is not None else [],
            accepted_per_verification=float(np.mean(counts.accepted)) if counts.accepted else None,
            logprobs=self.sequence.logprobs(),
            error=self.error,
        )
