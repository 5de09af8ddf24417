"""The table of tensors: parsing, and what follows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clover_trt.config import GenerationConfig
from clover_trt.errors import ConfigError, RequestError
from clover_trt.serving.fields import BY_NAME, INPUTS, NUMPY, OUTPUTS, config_io, markdown, parse
from clover_trt.serving.options import ServeOptions
from clover_trt.serving.repository import MODELS, render_repository, repository_source


def text(*values: str | bytes) -> np.ndarray:
    return np.array([v.encode() if isinstance(v, str) else v for v in values], np.object_)


def test_names_are_unique_and_settings_are_the_generators() -> None:
    assert len(BY_NAME) == sum(1 + len(each.aliases) for each in INPUTS)
    assert len({each.name for each in OUTPUTS}) == len(OUTPUTS)
    settings = {each.setting for each in INPUTS if each.setting}
    assert settings - {"bad_words"} <= set(GenerationConfig.model_fields)


@pytest.mark.parametrize("model", MODELS)
def test_configurations_of_the_repository_follow_the_table(model: str) -> None:
    config = (repository_source() / model / "config.pbtxt").read_text()
    assert config.endswith(config_io(rank_one=model != "tensorrt_llm")), f"write {model}/config.pbtxt again from the table"


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_values_of_any_shape_become_settings(shape: tuple[int, ...]) -> None:
    asked = parse({
        "text_input": text("hello").reshape(shape),
        "sampling_param_max_tokens": np.full(shape, 7, np.int32),
        "temperature": np.full(shape, 0.7, np.float32),
        "random_seed": np.full(shape, 2**63, np.uint64),
        "streaming": np.full(shape, True),
        "stop_words": text("a", "b"),
        "return_log_probs": np.full(shape, True),
    })  # fmt: skip
    assert (asked.text, asked.stream) == ("hello", True)
    assert asked.settings == {
        "max_new_tokens": 7, "temperature": 0.7, "do_sample": True, "seed": 2**63, "stop": ["a", "b"], "logprobs": 0
    }  # fmt: skip


def test_temperature_zero_is_greedy() -> None:
    assert parse({"text_input": text("x"), "temperature": np.zeros(1, np.float32)}).settings == {"do_sample": False}


def test_sampling_parameters_are_the_same_settings() -> None:
    given = {"temperature": "0.5", "max_tokens": "12", "stop": "END", "seed": 3, "top_p": 0.9, "logprobs": 2}
    asked = parse({"text_input": text("x"), "sampling_parameters": text(json.dumps(given))})
    assert asked.settings == {
        "temperature": 0.5, "do_sample": True, "max_new_tokens": 12, "stop": ["END"], "seed": 3, "top_p": 0.9, "logprobs": 2
    }  # fmt: skip


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of text_input, messages and input_ids, found none"),
    ({"text_input": text("a"), "input_ids": np.ones(2, np.int32)}, "found text_input and input_ids"),
    ({"text_input": text("a"), "max_tokens": np.ones(1, np.int64)}, "max_tokens: expected INT32, found int64"),
    ({"text_input": text("a"), "max_tokens": np.ones(2, np.int32)}, r"max_tokens: expected one value, found shape \[2\]"),
    ({"text_input": text(b"\xff\xfe")}, "text_input: not valid UTF-8: invalid start byte at byte 0"),
    ({"text_input": text("x" * 101)}, "text_input: 101 bytes, the server takes 100"),
    ({"prompt": text("x")}, "prompt: unknown input; expected one of text_input"),
    ({"text_input": text("a"), "stream": np.ones(1, bool), "streaming": np.ones(1, bool)}, "stream was given already"),
    ({"messages": text("{")}, "messages: not valid JSON"),
    ({"messages": text("{}")}, "messages: expected a JSON list, found dict"),
    ({"text_input": text("a"), "sampling_parameters": text('{"x": 1}')}, "unknown setting 'x'"),
    ({"text_input": text("a"), "sampling_parameters": text('{"top_k": "many"}')}, "top_k: expected a number, found 'many'"),
    ({"text_input": text("a"), "sampling_parameters": text("[]")}, "expected a JSON object, found list"),
    ({"text_input": text("a"), "top_k": np.ones(1, np.int32), "sampling_parameters": text('{"top_k": 1}')}, "as a tensor too"),
    ({"text_input": text("a"), "deadline_ms": np.zeros(1, np.int32)}, "deadline_ms = 0 is out of range"),
]


@pytest.mark.parametrize(("tensors", "message"), BAD, ids=[message for _, message in BAD])
def test_what_is_wrong_is_named(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse(tensors, max_prompt_bytes=100)


ARRAYS = st.one_of(
    st.lists(st.binary(max_size=8), max_size=3).map(lambda values: np.array(values, np.object_)),
    st.lists(st.integers(-5, 5), max_size=3).flatmap(
        lambda values: st.sampled_from([np.int32, np.int64, np.float32, np.bool_, np.uint64]).map(
            lambda t: np.array(values).astype(t)
        )
    ),
)


@given(st.dictionaries(st.sampled_from([*BY_NAME, "unknown"]), ARRAYS, max_size=6))
def test_any_tensors_are_taken_or_refused_with_a_reason(tensors: dict[str, np.ndarray]) -> None:
    try:
        asked = parse(tensors)
    except RequestError:
        return
    assert asked.stop or asked.canary or sum(x is not None for x in (asked.text, asked.messages, asked.ids)) == 1


def test_the_documentation_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    assert markdown() in page, "python -m clover_trt.serving.fields prints the tables"


def test_every_type_of_the_table_has_a_dtype() -> None:
    assert {each.kind for each in (*INPUTS, *OUTPUTS)} <= set(NUMPY)


def test_options_come_from_a_file_and_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("engine: /engines/a\nslots: 3\nmax_queue: 5\n")
    options = ServeOptions.read(file, {"slots": 4, "max_queue": None})
    assert (str(options.engine), options.slots, options.max_queue, options.host) == ("/engines/a", 4, 5, "127.0.0.1")
    for content, message in (
        ("slots: 0\nengine: a", "slots: Input should be greater than or equal to 1"),
        ("port: 1\nengine: a", "port: Extra inputs"),
        ("- 1", "expected a mapping"),
        ("a: [", "not a readable YAML"),
        ("slots: 1", "expected an engine"),
        ("engine: a\nhttp_port: 9\ngrpc_port: 9", "expected four different ones"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            ServeOptions.read(file, {})


def test_a_repository_is_rendered_with_odd_paths(tmp_path: Path) -> None:
    engine = tmp_path / 'a "quoted" $folder\\x'
    render_repository(tmp_path / "models", ServeOptions(engine=engine, slots=3), tmp_path / "drain")
    config = (tmp_path / "models" / "clover" / "config.pbtxt").read_text()
    assert 'a \\"quoted\\" $folder\\\\x' in config
    assert "${" not in config
    assert {path.name for path in (tmp_path / "models").iterdir()} == set(MODELS)
