from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clover_trt.runtime.chat import AnswerParser, AnswerPart, ToolCall, parse_answer
from clover_trt.runtime.stops import StopFinder

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    "\n",
    "\n\n",
    "a",
    " ",
    "<",
    "</",
    "é\U0001f600",
    '{"name": 1}',
]
answers = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


def cut(text: str, seed: int) -> list[str]:
    rng, pieces = random.Random(seed), []
    while text:
        size = rng.randint(1, 7)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@settings(max_examples=1500, deadline=None)
@given(answers, st.booleans(), st.integers(0, 10**6))
def test_parts_do_not_depend_on_where_the_text_was_cut(text: str, thinking: bool, seed: int) -> None:
    parser, total = AnswerParser(thinking=thinking), AnswerPart()
    for piece in cut(text, seed):
        total += parser.push(piece)
    total += parser.push("", final=True)
    assert total == parse_answer(text, thinking=thinking)


@settings(max_examples=500, deadline=None)
@given(answers)
def test_nothing_but_markers_and_line_ends_is_lost(text: str) -> None:
    part = parse_answer(text, thinking=False)
    kept = part.reasoning + part.content + "".join(CALL for _ in part.tool_calls)
    for marker in ("<think>", "</think>", "\n"):
        kept, text = kept.replace(marker, ""), text.replace(marker, "")
    assert kept == text or sorted(kept) == sorted(text)


def test_reasoning_content_and_calls() -> None:
    part = parse_answer(f"\nfirst 7, then 8\n</think>\n\nHere: {CALL} done", thinking=True)
    assert part == AnswerPart("first 7, then 8", "Here:  done", [ToolCall("f", {"x": "é"})])
    assert parse_answer("<think>\n\n</think>\n\nhi", thinking=False) == AnswerPart("", "hi")
    assert parse_answer("never closed", thinking=True) == AnswerPart("never closed", "")


@pytest.mark.parametrize(
    "body", ["", "{", "[]", '{"name": "f"}', '{"name": 1, "arguments": {}}', '{"name": "f", "arguments": "x"}']
)
def test_a_malformed_call_comes_out_as_text(body: str) -> None:
    text = f"a<tool_call>{body}</tool_call>b"
    assert parse_answer(text, thinking=False) == AnswerPart("", text)
    assert parse_answer(text[:-12], thinking=False) == AnswerPart("", text[:-12])


@settings(max_examples=1500, deadline=None)
@given(st.text("abé\n", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3), st.integers(0, 10**6))
def test_text_ends_before_the_first_stop_string_wherever_it_is_cut(text: str, stops: list[str], seed: int) -> None:
    finder = StopFinder(stops)
    shown = "".join(finder.push(piece) for piece in cut(text, seed)) + finder.push("", final=True)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert finder.found == bool(ends)
    assert shown == (text[: min(ends)[1]] if ends else text)
