"""The OpenAI-compatible front over the real server, through OpenAI's own client."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from clover_trt.serving.client import Client, Piece, ServingError
from clover_trt.serving.guard import RateLimit, StatusError, authorised
from clover_trt.serving.openai_replies import ChatReply
from clover_trt.serving.openai_types import ChatRequest, CompletionRequest
from tests.serving.conftest import Served, get, start_front, wait

REVERSE: list[Any] = [{"role": "user", "content": 'Reverse "stone".'}]


@pytest.fixture
def client(front: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0)


def test_models_and_health(client: openai.OpenAI, front: str) -> None:
    assert [model.id for model in client.models.list()] == ["clover"]
    assert get(f"{front}/health") == (200, "ok\n")


def test_a_chat_completion(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="clover", messages=REVERSE, max_completion_tokens=64, seed=1, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("enots", "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    first = choice.logprobs.content[0]
    assert first.top_logprobs[0].token == first.token == "e"
    assert first.bytes == [101]


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="clover", messages=REVERSE, stream=True, stream_options={"include_usage": True}, extra_body={"threshold": 0.99}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "enots"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


def test_stop_texts_and_content_parts(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": 'Reverse "stone".'}]}]
    answer = client.chat.completions.create(model="clover", messages=messages, stop=["t"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("eno", "stop")


def test_plain_completions(client: openai.OpenAI) -> None:
    one = client.completions.create(model="clover", prompt="Hello", max_tokens=8, extra_body={"ignore_eos": True}, logprobs=1)
    assert one.choices[0].finish_reason == "length"
    assert one.usage is not None
    assert one.usage.completion_tokens == 8
    assert one.choices[0].logprobs is not None
    assert len(one.choices[0].logprobs.tokens or []) == 8
    several = client.completions.create(model="clover", prompt=["Hello", "World"], max_tokens=4)
    assert [choice.index for choice in several.choices] == [0, 1]
    ids = client.completions.create(model="clover", prompt=[5, 6, 7], max_tokens=4)
    assert len(ids.choices) == 1
    streamed = client.completions.create(
        model="clover", prompt="Hello", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text


REFUSED: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
    ({"n": 2}, openai.BadRequestError, "n = 2"),
    ({"temperature": -1}, openai.BadRequestError, "temperature"),
    ({"model": "gpt"}, openai.NotFoundError, "the model 'gpt' does not exist"),
    ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
    ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice"),
    ({"messages": []}, openai.BadRequestError, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.BadRequestError, "parts of type text"),
    ({"max_tokens": 10**6}, openai.BadRequestError, "max_new_tokens"),
    ({"seed": -1}, openai.BadRequestError, "seed"),
    ({"tools": [{"type": "function", "function": {}}]}, openai.BadRequestError, r"tools\[0\]"),
    ({"stream": True, "temperature": -1}, openai.BadRequestError, "temperature"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_cannot_be_had_is_refused(
    client: openai.OpenAI, changes: dict[str, Any], kind: type[openai.APIStatusError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        client.chat.completions.create(**{"model": "clover", "messages": REVERSE, **changes})


def test_bodies_that_are_not_json(front: str) -> None:
    for body in (b"{", b"[]", b"\xff"):
        status, answer = get(f"{front}/v1/chat/completions", body)
        assert status == 400
        assert json.loads(answer)["error"]["type"] == "invalid_request_error"


def test_a_client_that_goes_frees_its_slot(front: str, served: Served) -> None:
    endless = {"messages": REVERSE, "max_tokens": 256, "ignore_eos": True, "threshold": 1.0}
    before = served.metric("clover_requests_total", outcome="cancelled")
    with httpx.stream("POST", f"{front}/v1/chat/completions", json={**endless, "stream": True}) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{front}/v1/chat/completions", json=endless, timeout=0.25)
    wait(lambda: served.metric("clover_requests_total", outcome="cancelled") == before + 2, 10)


def test_half_open_connections_do_no_harm(front: str, client: openai.OpenAI) -> None:
    host, port = front.removeprefix("http://").split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(50)]
    for each in sockets:
        each.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    assert client.chat.completions.create(model="clover", messages=REVERSE).choices[0].message.content == "enots"
    for each in sockets:
        each.close()


def test_keys_size_and_rate_are_limited(served: Served, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key\nsecond-key\n")
    process, url = start_front(served.grpc, "--api-keys", str(keys), "--max-request-bytes", "2000", "--requests-per-minute", "5")
    try:
        assert get(f"{url}/v1/models")[0] == 401
        wrong = openai.OpenAI(base_url=f"{url}/v1", api_key="third-key", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="expected a valid API key"):
            wrong.models.list()
        first = openai.OpenAI(base_url=f"{url}/v1", api_key="first-key", max_retries=0)
        assert first.chat.completions.create(model="clover", messages=REVERSE).choices[0].message.content == "enots"
        header = {"Authorization": "Bearer first-key"}
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": "x" * 3000}, headers=header).status_code == 413
        chunked = httpx.post(f"{url}/v1/chat/completions", content=(b"x" * 500 for _ in range(10)), headers=header)
        assert chunked.status_code == 413
        statuses = [httpx.get(f"{url}/v1/models", headers=header) for _ in range(6)]
        assert statuses[-1].status_code == 429
        assert int(statuses[-1].headers["Retry-After"]) >= 1
        second = openai.OpenAI(base_url=f"{url}/v1", api_key="second-key", max_retries=0)
        assert len(list(second.models.list())) == 1, "a limit of one key is not another's"
    finally:
        process.terminate()
        process.wait(20)


def test_keys_come_from_the_environment(served: Served) -> None:
    process, url = start_front(served.grpc, CLOVER_TRT_API_KEYS="a-key, b-key")
    try:
        assert get(f"{url}/v1/models")[0] == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer b-key"}).status_code == 200
    finally:
        process.terminate()
        process.wait(20)


def test_no_server_is_a_clear_error() -> None:
    with Client("127.0.0.1:9", retries=1) as client:
        with pytest.raises(ServingError) as caught:
            client.generate("x")
    assert caught.value.code == "UNAVAILABLE"


def test_every_key_is_compared() -> None:
    assert authorised("Bearer b", ("a", "b")) == "b"
    assert authorised("", ()) == ""
    for wrong in ("", "Bearer ", "Bearer c", "b\u00e9"):
        with pytest.raises(StatusError):
            authorised(wrong, ("a", "b"))


def test_the_rate_limit_is_a_bucket() -> None:
    limit = RateLimit(per_minute=2)
    assert [limit.take("a", now) for now in (0.0, 0.0)] == [0.0, 0.0]
    assert limit.take("a", 0.0) == pytest.approx(30.0)
    assert limit.take("b", 0.0) == 0.0
    assert limit.take("a", 15.0) == pytest.approx(15.0)
    assert limit.take("a", 31.0) == 0.0


def test_tool_calls_and_reasoning_become_openais_fields() -> None:
    body = ChatRequest(messages=REVERSE, tools=[{"type": "function", "function": {"name": "timer"}}], stream=True)
    piece = Piece(reasoning_content="hm", tool_calls=[{"name": "timer", "arguments": {"minutes": 5}}], finish_reason="stop")
    chunk = ChatReply("clover", body).chunk(piece, is_first=True)
    choice = chunk["choices"][0]
    assert choice["delta"]["reasoning_content"] == "hm"
    assert choice["delta"]["tool_calls"][0]["function"] == {"name": "timer", "arguments": '{"minutes": 5}'}
    assert choice["finish_reason"] == "tool_calls"
    whole = ChatReply("clover", ChatRequest(messages=REVERSE)).whole([piece])
    assert whole["choices"][0]["message"]["content"] is None
    assert CompletionRequest(prompt=[[1, 2], [3]]).prompts() == [[1, 2], [3]]


def test_many_at_once_get_their_own_answers(client: openai.OpenAI) -> None:
    words = ["stone", "river", "cloud", "green", "house", "apple"]
    found: list[tuple[str, str | None]] = []

    def ask(word: str) -> None:
        messages: list[Any] = [{"role": "user", "content": f'Reverse "{word}".'}]
        answer = client.with_options(max_retries=8).chat.completions.create(model="clover", messages=messages)
        found.append((word[::-1], answer.choices[0].message.content))

    threads = [threading.Thread(target=ask, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == len(words)
    assert all(expected == answer for expected, answer in found)
