"""Generation over a session: batches of sequences, pass by pass."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clover_trt.config import GenerationConfig
from clover_trt.engine.package import EnginePackage, open_package
from clover_trt.errors import ConfigError, NumericsError, RequestError
from clover_trt.runtime.controls import stack
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.sampling import candidates_needed
from clover_trt.runtime.sequence import Counts, Filled, RowPlan, Sequence
from clover_trt.runtime.session import Session, StepInput, StepOutput
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


@dataclass
class _Clock:
    """Times and expert counts of one row."""

    start: float
    first_block: float | None = None
    end: float = 0.0
    experts: list[np.ndarray[Any, np.dtype[np.int64]]] = field(default_factory=list)


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
        yield from self._run(sequences, [_Clock(time.perf_counter()) for _ in sequences])

    def generate(self, sequences: Many[Sequence]) -> list[Result]:
        """Run sequences together and return their answers, in order; a row that failed has `error` set."""
        clocks = [_Clock(time.perf_counter()) for _ in sequences]
        errors: dict[int, str] = {}
        for event in self._run(sequences, clocks):
            if event.error:
                errors[event.row] = event.error
        return [self.result(s, clock, errors.get(i)) for i, (s, clock) in enumerate(zip(sequences, clocks, strict=True))]

    def run_one(self, sequence: Sequence, on_pass: Any = None) -> Result:
        """Run one sequence; `on_pass` sees each event as it comes."""
        clock, error = _Clock(time.perf_counter()), None
        for event in self._run([sequence], [clock]):
            error = event.error or error
            if on_pass:
                on_pass(event)
        return self.result(sequence, clock, error)

    def _run(self, sequences: Many[Sequence], clocks: list[_Clock]) -> Iterator[PassEvent]:
        if len(sequences) > self.session.slots:
            raise RequestError(f"{len(sequences)} requests for {self.session.slots} slots; open the engine with more slots")
        pieces = [PieceMaker(self.codec) for _ in sequences]
        active: list[Sequence | None] = list(sequences)
        for slot in range(len(sequences)):
            self.session.reset(slot)
        while any(active):
            plans = [s.plan() if s else None for s in active]
            step = build_step(plans, active, self._filler)
            output = self.session.step(step)
            for row, sequence in enumerate(active):
                if sequence is not None:
                    event = self._apply(row, sequence, output, pieces[row], clocks[row])
                    if event.finish_reason or event.error:
                        active[row] = None
                    yield event

    @property
    def _filler(self) -> int:
        return self.package.model.mask_token_id or 0

    def _apply(self, row: int, sequence: Sequence, output: StepOutput, pieces: PieceMaker, clock: _Clock) -> PassEvent:
        block_start = sequence.block_start
        error: str | None = None
        filled: list[Filled] = []
        try:
            filled = sequence.apply(output.candidate_ids[row], output.candidate_logprobs[row])
        except NumericsError as failure:
            error = str(failure)
        now = time.perf_counter()
        clock.experts.append(output.distinct_experts)
        ended = sequence.finish_reason is not None or error is not None
        if clock.first_block is None and (sequence.block_start > block_start or ended):
            clock.first_block = now
        clock.end = now
        block = sequence.block or sequence.response[block_start:]
        text = pieces.push(sequence.text_ids(), final=ended)
        return PassEvent(row, sequence.counts.forwards, filled, block_start, block, text, sequence.finish_reason, error)

    def result(self, sequence: Sequence, clock: _Clock, error: str | None) -> Result:
        """Answer and figures of a finished sequence."""
        counts: Counts = sequence.counts
        tokens, seconds = len(sequence.response), clock.end - clock.start
        return Result(
            text=self.codec.decode(sequence.text_ids()),
            token_ids=list(sequence.response),
            prompt_tokens=len(sequence.prompt),
            finish_reason=sequence.finish_reason or "error",
            forwards=counts.forwards,
            denoise_passes=counts.denoise_passes,
            tpf=tokens / counts.forwards if counts.forwards else 0.0,
            tpf_denoise=tokens / counts.denoise_passes if counts.denoise_passes else 0.0,
            seconds=seconds,
            seconds_to_first_block=(clock.first_block or clock.end) - clock.start,
            tokens_per_second=tokens / seconds if seconds else 0.0,
            distinct_experts=np.mean(clock.experts, axis=0).tolist() if clock.experts else [],
            error=error,
        )
