"""Generation over a session: batches of sequences, pass by pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np

from clover_trt.config import GenerationConfig
from clover_trt.engine.package import EnginePackage, open_package
from clover_trt.errors import ConfigError, NumericsError, RequestError
from clover_trt.runtime.chat import ToolCall, parse_answer
from clover_trt.runtime.controls import stack
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.sampling import candidates_needed
from clover_trt.runtime.sequence import Filled, RowPlan, Sequence
from clover_trt.runtime.session import Session, StepInput, StepOutput
from clover_trt.runtime.stops import StopFinder
from clover_trt.runtime.text import Message, PieceMaker, TextCodec


@dataclass(frozen=True)
class PassEvent:
    """What one block step did for one row."""

    row: int
    forward: int  # number of the step in this row, from 1
    filled: list[Filled]
    block_start: int  # position in the response of `block`
    block: list[int]  # after the pass, the mask token where unresolved; empty while the prompt is committed
    text: str  # newly finished text, whole characters only
    finish_reason: str | None
    error: str | None = None


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
    forwards: int
    denoise_passes: int
    tpf: float  # generated tokens per forward, prefill and commits included
    tpf_denoise: float  # generated tokens per denoise pass
    seconds: float
    seconds_to_first_block: float
    tokens_per_second: float
    distinct_experts: list[float]  # mean per layer over the forwards
    error: str | None = None


class _Row:
    """A sequence in flight with its text, times and expert counts."""

    def __init__(self, sequence: Sequence, codec: TextCodec) -> None:
        self.sequence, self.codec = sequence, codec
        self.start = time.perf_counter()
        self.first_block: float | None = None
        self.end = self.start
        self.experts: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self.text = ""
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
        text = self._new_text()
        self.end = time.perf_counter()
        self.experts.append(output.distinct_experts)
        if self.first_block is None and (sequence.block_start > block_start or self.ended):
            self.first_block = self.end
        block = sequence.block or sequence.response[block_start:]
        forward = sequence.counts.forwards
        return PassEvent(index, forward, filled, block_start, block, text, sequence.finish_reason, self.error)

    def _new_text(self) -> str:
        piece = self._pieces.push(self.sequence.text_ids(), final=self.ended)
        text = self._stops.push(piece, final=self.ended)
        if self._stops.found and self.sequence.finish_reason != "stop":
            self.sequence.stop()
        self.text += text
        return text

    @property
    def ended(self) -> bool:
        """Whether no further step is needed."""
        return self.sequence.finish_reason is not None or self.error is not None

    def result(self) -> Result:
        """Answer and figures."""
        counts, tokens, seconds = self.sequence.counts, len(self.sequence.response), self.end - self.start
        parts = parse_answer(self.text, thinking=self.sequence.thinking)
        return Result(
            text=self.text,
            reasoning=parts.reasoning,
            content=parts.content,
            tool_calls=parts.tool_calls,
            token_ids=list(self.sequence.response),
            prompt_tokens=len(self.sequence.prompt),
            finish_reason=self.sequence.finish_reason or "error",
            forwards=counts.forwards,
            denoise_passes=counts.denoise_passes,
            tpf=tokens / counts.forwards if counts.forwards else 0.0,
            tpf_denoise=tokens / counts.denoise_passes if counts.denoise_passes else 0.0,
            seconds=seconds,
            seconds_to_first_block=(self.first_block or self.end) - self.start,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            distinct_experts=np.mean(self.experts, axis=0).tolist() if self.experts else [],
            error=self.error,
        )


def build_step(plans: Many[RowPlan | None], sequences: Many[Sequence | None], filler: int) -> StepInput:
    """Rows of a block step; a plan of None is an idle row.

    Args:
        plans, sequences: one each a row.
        filler: id of padding and of unused control entries (the mask token).
    """
    B = len(plans)
    commit = np.array([len(plan.commit) if plan else 0 for plan in plans], np.int32)
    noisy = np.array([len(plan.noisy) if plan else 0 for plan in plans], np.int32)
    T = int((commit + noisy).max())
    L = max(1, int(noisy.max()))
    ids = np.full((B, T), filler, np.int64)
    for b, plan in enumerate(plans):
        if plan:
            ids[b, : commit[b] + noisy[b]] = plan.commit + plan.noisy
    index = np.minimum(commit[:, None] + np.arange(L), T - 1).astype(np.int64)
    mass = np.array([s.settings.expert_subset_mass if s else 1.0 for s in sequences], np.float32)
    active = [
        (s.row_controls(), s.settings) if s and plan and plan.noisy else None for s, plan in zip(sequences, plans, strict=True)
    ]
    wanted = max((candidates_needed(s.settings, s.valid_tokens) for s in sequences if s), default=1)
    return StepInput(ids, commit, noisy, index, mass, stack(active, L, filler), candidates=wanted)


class Generator:
    """Text in, text out, over an engine package.

    Args:
        package: an opened package, or its folder.
        session: the session to run on; ONNX Runtime over the package when None.
        slots: rows in flight at once.
        threads: CPU threads, all usable cores when None.
        fused: see `Sequence`.
    """

    def __init__(
        self,
        package: EnginePackage | str,
        session: Session | None = None,
        *,
        slots: int = 1,
        threads: int | None = None,
        fused: bool = True,
    ) -> None:
        self.package = package if isinstance(package, EnginePackage) else open_package(package)
        self.session: Session = session or OrtSession(self.package, slots=slots, threads=threads)
        self.codec = TextCodec(self.package.folder)
        self.fused = fused

    def sequence(self, prompt: str | Many[int], **overrides: Any) -> Sequence:
        """A request from prompt text or ids.

        Args:
            overrides: fields of `GenerationConfig`.

        Raises:
            RequestError: the request is refused; nothing was computed.
        """
        base = self.package.generation
        if "block_size" not in overrides or overrides["block_size"] is None:
            overrides["block_size"] = min(base.block_size, self.package.model.block_size)
        try:
            settings: GenerationConfig = base.override(overrides)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        ids = self.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)
        think_end = self.codec.token_id("</think>")
        last: dict[int | None, int] = {token: i for i, token in enumerate(ids)}
        thinking = last.get(self.codec.token_id("<think>"), -1) > last.get(think_end, -1)
        return Sequence(
            ids,
            settings,
            self.package.model,
            self.session.max_len,
            self.package.valid_tokens,
            prefill_chunk=self.package.build.prefill_chunk,
            think_end_id=think_end,
            thinking=thinking,
            fused=self.fused,
        )

    def chat(
        self, messages: list[Message], *, tools: list[Any] | None = None, enable_thinking: bool | None = None, **overrides: Any
    ) -> Sequence:
        """A request from a conversation, see `TextCodec.chat`."""
        return self.sequence(self.codec.chat(messages, tools=tools, enable_thinking=enable_thinking), **overrides)

    def passes(self, sequences: Many[Sequence]) -> Iterator[PassEvent]:
        """Run sequences together, one slot each, and yield an event for each row after each block step.

        Raises:
            RequestError: more sequences than slots.
        """
        yield from self._run([_Row(sequence, self.codec) for sequence in sequences])

    def generate(self, sequences: Many[Sequence]) -> list[Result]:
        """Run sequences together and return their answers, in order; a row that failed has `error` set."""
        rows = [_Row(sequence, self.codec) for sequence in sequences]
        for _ in self._run(rows):
            pass
        return [row.result() for row in rows]

    def run_one(self, sequence: Sequence, on_pass: Callable[[PassEvent], None] = lambda _: None) -> Result:
        """Run one sequence; `on_pass` sees each event as it comes."""
        row = _Row(sequence, self.codec)
        for event in self._run([row]):
            on_pass(event)
        return row.result()

    def _run(self, rows: list[_Row]) -> Iterator[PassEvent]:
        if len(rows) > self.session.slots:
            raise RequestError(f"{len(rows)} requests for {self.session.slots} slots; open the engine with more slots")
        for slot in range(len(rows)):
            self.session.reset(slot)
        filler = self.package.model.mask_token_id or 0
        while not all(row.ended for row in rows):
            active = [None if row.ended else row for row in rows]
            sequences = [row.sequence if row else None for row in active]
            output = self.session.step(build_step([s.plan() if s else None for s in sequences], sequences, filler))
            for index, row in enumerate(active):
                if row:
                    yield row.apply(output, index)
