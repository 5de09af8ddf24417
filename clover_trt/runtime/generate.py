"""Text in, text out, over an engine package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Any

from clover_trt.config import GenerationConfig
from clover_trt.engine.package import EnginePackage, open_package
from clover_trt.errors import ConfigError, RequestError
from clover_trt.runtime.causal import CausalSequence
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.prefix_cache import PrefixCache
from clover_trt.runtime.request import PassEvent, Request, Result
from clover_trt.runtime.scheduler import Scheduler
from clover_trt.runtime.sequence import Sequence
from clover_trt.runtime.session import Session
from clover_trt.runtime.text import Message, TextCodec


def open_session(
    package: EnginePackage, *, slots: int = 1, threads: int | None = None, cache_budget: int | None = None
) -> Session:
    """The session that runs this package: ONNX Runtime on the CPU, or TensorRT on a GPU; see there for the arguments."""
    if package.build.backend == "onnxruntime":
        return OrtSession(package, slots=slots, threads=threads, cache_budget=cache_budget)
    from clover_trt.runtime.trt_session import TrtSession

    return TrtSession(package, slots=slots, cache_budget=cache_budget)


class Generator:
    """Text in, text out, over an engine package.

    Args:
        package: an opened package, or its folder.
        session: the session to run on; one over the package when None.
        slots: rows in flight at once.
        threads: CPU threads, all usable cores when None.
        fused: see `Sequence`.
        cache_budget: bytes for the caches of all slots, see the sessions.
        prefix_cache: reuse of earlier turns; it stays filled from one call to the next.
    """

    def __init__(
        self,
        package: EnginePackage | str,
        session: Session | None = None,
        *,
        slots: int = 1,
        threads: int | None = None,
        fused: bool = True,
        cache_budget: int | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.package = package if isinstance(package, EnginePackage) else open_package(package)
        self.session: Session = session or open_session(self.package, slots=slots, threads=threads, cache_budget=cache_budget)
        self.codec = TextCodec(self.package.folder)
        self.fused, self.prefix_cache = fused, prefix_cache

    def sequence(self, prompt: str | Many[int], **overrides: Any) -> Sequence:
        """A request from prompt text or ids.

        Args:
            overrides: fields of `GenerationConfig`; also `bad_words`, texts that the response must not have.

        Raises:
            RequestError: the request is refused; nothing was computed.
        """
        base = self.package.generation
        words = overrides.pop("bad_words", None)
        if words:
            overrides["bad_words_ids"] = [*(overrides.get("bad_words_ids") or ()), *self._word_ids(words)]
        if "block_size" not in overrides or overrides["block_size"] is None:
            overrides["block_size"] = min(base.block_size, self.package.model.block_size)
        try:
            settings: GenerationConfig = base.override(overrides)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        ids = self.codec.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if overrides.get("max_new_tokens") is None:  # nobody asked for so many: as many whole blocks as fit
            size = settings.block_size
            fitting = (self.session.max_len - len(ids)) // size * size
            settings = settings.override({"max_new_tokens": max(1, min(settings.max_new_tokens, fitting))})
        think_end = self.codec.token_id("</think>")
        last: dict[int | None, int] = {token: i for i, token in enumerate(ids)}
        thinking = last.get(self.codec.token_id("<think>"), -1) > last.get(think_end, -1)
        kind = Sequence if settings.mode == "diffusion" else CausalSequence
        return kind(
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

    def _word_ids(self, words: Many[str]) -> list[list[int]]:
        """Token ids of bad words, at the start of a word and inside one."""
        if isinstance(words, str) or not all(isinstance(word, str) and word for word in words):
            raise RequestError(f"bad_words: expected a list of non-empty texts, found {words!r:.200}")
        return [ids for word in words for text in (word, f" {word.lstrip()}") if (ids := self.codec.encode(text))]

    def chat(
        self, messages: list[Message], *, tools: list[Any] | None = None, enable_thinking: bool | None = None, **overrides: Any
    ) -> Sequence:
        """A request from a conversation, see `TextCodec.chat`."""
        sequence = self.sequence(self.codec.chat(messages, tools=tools, enable_thinking=enable_thinking), **overrides)
        if self.prefix_cache is not None:
            known = self.codec.chat(messages, tools=tools, enable_thinking=enable_thinking, open_answer=False)
            ids = self.codec.encode(known)
            sequence.checkpoint = len(ids) if list(sequence.prompt[: len(ids)]) == ids else 0
        return sequence

    def passes(self, sequences: Many[Sequence]) -> Iterator[PassEvent]:
        """Run sequences together, as many as there are slots at a time, and yield an event for each pass of each."""
        yield from self._run([Request(sequence, self.codec) for sequence in sequences])

    def generate(self, sequences: Many[Sequence], on_pass: Callable[[PassEvent], None] = lambda _: None) -> list[Result]:
        """Run sequences together and return their answers, in order; a request that failed has `error` set.

        Args:
            on_pass: sees each event as it comes.
        """
        requests = [Request(sequence, self.codec) for sequence in sequences]
        for event in self._run(requests):
            on_pass(event)
        return [request.result() for request in requests]

    def run_one(self, sequence: Sequence, on_pass: Callable[[PassEvent], None] = lambda _: None) -> Result:
        """Run one sequence alone."""
        return self.generate([sequence], on_pass)[0]

    def _run(self, requests: Many[Request]) -> Iterator[PassEvent]:
        scheduler = Scheduler(self.session, prefix_cache=self.prefix_cache)
        for request in requests:
            scheduler.add(request)
        while not scheduler.idle:
            yield from scheduler.step()
