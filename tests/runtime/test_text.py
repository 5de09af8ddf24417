from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tiny.tokenizer import build_tokenizer, save_tokenizer
from transformers import PreTrainedTokenizerFast

from clover_trt.errors import EngineError, RequestError
from clover_trt.runtime.text import PieceMaker, TextCodec


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(build_tokenizer(), folder)
    return TextCodec(folder)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40), st.integers(0, 10**6))
def test_pieces_joined_are_the_text_and_never_split_a_character(codec: TextCodec, text: str, seed: int) -> None:
    text = text.encode("utf-8", "ignore").decode()
    ids = codec.encode(text)
    rng, maker, pieces, at = random.Random(seed), PieceMaker(codec), [], 0
    while at < len(ids):
        upto = min(len(ids), at + rng.randint(0, 4))
        pieces.append(maker.push(ids[at:upto]))
        at = upto
    pieces.append(maker.push([], final=True))
    assert "".join(pieces) == codec.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_cut_character_comes_out_as_one_replacement(codec: TextCodec) -> None:
    ids = codec.encode("ab\U0001f600")[:-1]
    maker = PieceMaker(codec)
    assert maker.push(ids) == ""
    assert maker.push([], final=True) == codec.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_text_survives_the_round_trip(codec: TextCodec, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert codec.tokenizer.decode(codec.encode(text), skip_special_tokens=False) == text


def test_lone_surrogates_are_refused(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        codec.encode("a\udc80")


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "2"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_the_template_renders_as_transformers_does(codec: TextCodec, tools: list[object] | None, thinking: bool | None) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=codec.tokenizer)
    reference.chat_template = codec.template
    options = {} if thinking is None else {"enable_thinking": thinking}
    expected = reference.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True, **options)
    assert codec.chat(MESSAGES, tools=tools, enable_thinking=thinking) == expected


@pytest.mark.parametrize("messages", [[], [{"content": "x"}], ["x"], [{"role": "robot", "content": "x"}], [{"role": "user"}]])
def test_malformed_messages_are_refused(codec: TextCodec, messages: list[object]) -> None:
    with pytest.raises(RequestError):
        codec.chat(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"name": "f"}, "expected a list of objects, found dict"),
        ([1], r"tools\[0\]: expected .*, found 1"),
        ([*TOOLS, {"type": "function", "function": {}}], r"tools\[1\]: expected"),
        ([{"type": "function", "function": {"name": "f", "parameters": "object"}}], r"tools\[0\]: parameters: .* found 'object'"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"maximum": float("nan")}}}], "tools: expected JSON"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"x": {1}}}}], "tools: expected JSON .*set"),
    ],
)
def test_tools_that_are_not_json_schemas_are_refused(codec: TextCodec, tools: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        codec.chat(MESSAGES[:2], tools=tools)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}", "{{ 1 / 0 }}"]
)
def test_a_hostile_template_is_stopped(codec: TextCodec, template: str, tmp_path: Path) -> None:
    save_tokenizer(codec.tokenizer, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(RequestError, match="refused"):
        TextCodec(tmp_path).chat(MESSAGES[:2])
    assert issubclass(TemplateError, Exception)


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json: not found"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match=r"tokenizer\.json: not a valid"):
        TextCodec(tmp_path)
