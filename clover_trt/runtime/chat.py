"""An assistant's answer taken apart while it streams: reasoning, content and tool calls in the Qwen format."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call of the function `name` with JSON `arguments`."""

    name: str
    arguments: dict[str, Any]


@dataclass
class AnswerPart:
    """What a piece of text adds to the answer."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def __add__(self, other: AnswerPart) -> AnswerPart:
        return AnswerPart(self.reasoning + other.reasoning, self.content + other.content, self.tool_calls + other.tool_calls)


def parse_call(body: str) -> ToolCall | None:
    """The call inside `<tool_call>` … `</tool_call>`, None when it is not one JSON object with a name and arguments."""
    try:
        data = json.loads(body)
    except ValueError:
        return None
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not isinstance(data.get("arguments"), dict):
        return None
    return ToolCall(data["name"], data["arguments"])


class AnswerParser:
    """Takes text in pieces of any size; the sum of the parts does not depend on where the text was cut.

    Reasoning is what stands before `</think>`, without the line ends around it. A `<tool_call>` that is not closed or
    does not hold a valid call comes out as content, whole.

    Args:
        thinking: whether the prompt ended inside a thinking part; an answer may also open one itself.
    """

    def __init__(self, *, thinking: bool) -> None:
        self._state = "reasoning" if thinking else "start"
        self._held = ""
        self._reasoned = False

    def push(self, piece: str, *, final: bool = False) -> AnswerPart:
        """What `piece` adds; `final` flushes what was waiting for more."""
        self._held += piece
        part = AnswerPart()
        while True:
            before = (self._state, len(self._held))
            step: Callable[[bool], AnswerPart] = getattr(self, f"_{self._state}")
            part = part + step(final)
            if (self._state, len(self._held)) == before:
                return part

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _ready(self, marker: str, final: bool) -> tuple[int, bool]:
        """Characters before `marker`, and whether it is there; without it, an end that may become it is kept back."""
        at = self._held.find(marker)
        if at >= 0:
            return at, True
        size = len(self._held)
        if not final:
            for tail in range(min(len(marker) - 1, size), 0, -1):
                if marker.startswith(self._held[-tail:]):
                    return size - tail, False
        return size, False

    def _start(self, final: bool) -> AnswerPart:
        """The answer may open a thinking part, after line ends."""
        rest = self._held.lstrip("\n")
        if rest.startswith(THINK):
            self._held, self._state = rest[len(THINK) :], "reasoning"
        elif final or (rest and not THINK.startswith(rest)):
            self._state = "content"
        return AnswerPart()

    def _reasoning(self, final: bool) -> AnswerPart:
        if not self._reasoned:
            self._held = self._held.lstrip("\n")
        size, closed = self._ready(THINK_END, final)
        text = self._held[:size]
        kept = text if closed or final else text.rstrip("\n")  # line ends wait: before </think> they are dropped
        shown = kept.rstrip("\n") if closed or final else kept
        self._take(size if closed or final else len(kept))
        self._reasoned = self._reasoned or bool(shown)
        if closed:
            self._take(len(THINK_END))
            self._state = "after"
        return AnswerPart(reasoning=shown)

    def _after(self, final: bool) -> AnswerPart:
        """Line ends between the thinking part and the content are dropped."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "content"
        return AnswerPart()

    def _content(self, final: bool) -> AnswerPart:
        size, opened = self._ready(CALL, final)
        part = AnswerPart(content=self._take(size))
        if opened:
            self._state = "call"
        return part

    def _call(self, final: bool) -> AnswerPart:
        """Held from `<tool_call>` on until it closes."""
        end = self._held.find(CALL_END)
        if end < 0:
            if not final:
                return AnswerPart()
            self._state = "done"
            return AnswerPart(content=self._take(len(self._held)))
        whole = self._take(end + len(CALL_END))
        call = parse_call(whole[len(CALL) : -len(CALL_END)])
        self._state = "content"
        return AnswerPart(tool_calls=[call]) if call else AnswerPart(content=whole)

    def _done(self, final: bool) -> AnswerPart:
        return AnswerPart()


def parse_answer(text: str, *, thinking: bool) -> AnswerPart:
    """The parts of a whole answer."""
    return AnswerParser(thinking=thinking).push(text, final=True)
