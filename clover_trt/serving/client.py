"""Clients of the Triton model `clover` over gRPC: plain and asyncio, streamed and not.

with Client("localhost:8001") as client:
    print(client.generate(messages=[{"role": "user", "content": "What is 12 + 13?"}]).text)
    for piece in client.stream("Once", max_tokens=64):
        print(piece.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2, service_pb2_grpc

from clover_trt.errors import CloverError, RequestError
from clover_trt.serving.fields import BY_NAME, NUMPY, OUTPUT_KINDS

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
# Seconds for a stream to end after its request was stopped by id. Releases of Triton before 25.03 can crash when a gRPC call is
# cancelled at the moment it completes (server issues 7368 and 8034), so these clients cancel a call only when nothing else helps.
ENDING = 5.0
CODES = frozenset(code.name for code in grpc.StatusCode)
FIRST_WAIT = 0.1  # seconds before the first retry; doubled for each that follows


class ServingError(CloverError):
    """The server refused or lost a request.

    `code` is gRPC's status code by name, as INVALID_ARGUMENT, UNAVAILABLE or DEADLINE_EXCEEDED. An error inside a stream is text
    alone: the model `clover` begins it with the code, and what Triton itself says there is UNKNOWN.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Piece:
    """One response: what is new since the one before, and counts so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = ""
    log_probs: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    forwards: int = 0
    tpf: float = 0.0
    time_to_first_block: float = 0.0
    pass_event: dict[str, Any] | None = None


def input_tensors(prompt: str | list[int] | None, settings: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The input tensors of a request; settings that are None are left out.

    Raises:
        RequestError: an unknown setting.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    if prompt is not None:
        given["text_input" if isinstance(prompt, str) else "input_ids"] = prompt
    tensors: dict[str, NDArray[Any]] = {}
    for name, value in given.items():
        known = BY_NAME.get(name)
        if known is None:
            raise RequestError(f"{name}: unknown setting; expected one of {', '.join(sorted(BY_NAME))}")
        if name in ("messages", "tools", "sampling_parameters") and not isinstance(value, str):
            value = json.dumps(value)
        values = [value] if isinstance(value, str | bytes) or not isinstance(value, list | tuple | np.ndarray) else list(value)
        if known.kind == "STRING":
            values = [item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item for item in values]
        tensors[name] = np.array(values, NUMPY[known.kind])
    return tensors


def request_message(model: str, request_id: str, tensors: dict[str, NDArray[Any]]) -> Any:
    """The protobuf message of a request."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    for name, value in tensors.items():
        kind = BY_NAME[name].kind
        message.inputs.add(name=name, datatype="BYTES" if kind == "STRING" else kind, shape=list(value.shape))
        message.raw_input_contents.append(_packed(value) if kind == "STRING" else value.tobytes())
    return message


def _stop_message(model: str, request_id: str) -> Any:
    return request_message(model, request_id, {"stop": np.array([True])})


def _packed(texts: NDArray[Any]) -> bytes:
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def read_piece(response: Any) -> Piece:
    """A response's message as a piece."""
    found: dict[str, list[Any]] = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        kind = OUTPUT_KINDS[tensor.name]
        found[tensor.name] = _unpacked(raw) if kind == "STRING" else np.frombuffer(raw, NUMPY[kind]).tolist()
    piece = Piece(text=_one(found, "text_output", ""), token_ids=found.get("token_ids", []))
    for name in ("tool_calls", "log_probs"):
        setattr(piece, name, [json.loads(text) for text in found.get(name, [])])
    for each in fields(Piece):
        if each.name in found and each.name not in ("token_ids", "tool_calls", "log_probs", "pass_event"):
            setattr(piece, each.name, _one(found, each.name, getattr(piece, each.name)))
    event = _one(found, "pass_event", "")
    piece.pass_event = json.loads(event) if event else None
    return piece


def _unpacked(raw: bytes) -> list[str]:
    texts, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        texts.append(raw[at + 4 : at + 4 + size].decode("utf-8"))
        at += 4 + size
    return texts


def _one(found: dict[str, list[Any]], name: str, default: Any) -> Any:
    values = found.get(name)
    return values[0] if values else default


def _piece_of(message: Any) -> Piece | None:
    """A stream's message as a piece; None for the empty last one.

    Raises:
        ServingError: the message carries an error.
    """
    if message.error_message:
        code, _, text = message.error_message.partition(": ")
        raise ServingError(text, code) if code in CODES else ServingError(message.error_message, "UNKNOWN")
    return read_piece(message.infer_response) if message.infer_response.outputs else None


def _failure(error: grpc.RpcError) -> ServingError:
    code = error.code()
    return ServingError(str(error.details()), code.name)


def _joined(pieces: list[Piece]) -> Piece:
    assert pieces, "the server always sends a last response"
    return pieces[-1]


class _Settings:
    """What both clients are made with.

    Args:
        url: HOST:PORT of Triton's gRPC endpoint.
        model: name of the model.
        timeout: seconds for a whole request; None for no limit.
        retries: how often a request is sent again when the server is unavailable and nothing of the answer has come.
    """

    def __init__(
        self, url: str = "localhost:8001", *, model: str = "clover", timeout: float | None = None, retries: int = 3
    ) -> None:
        self.url, self.model, self.timeout, self.retries = url, model, timeout, retries

    def _message(self, prompt: str | list[int] | None, request_id: str, stream: bool, settings: dict[str, Any]) -> Any:
        tensors = input_tensors(prompt, {**settings, "stream": stream})
        return request_message(self.model, request_id or uuid.uuid4().hex, tensors)

    def _wait(self, attempt: int, error: ServingError, begun: bool) -> float:
        """Seconds to wait before sending again.

        Raises:
            ServingError: it is not to be sent again.
        """
        if begun or error.code != "UNAVAILABLE" or attempt >= self.retries:
            raise error
        return float(FIRST_WAIT * 2**attempt * random.uniform(0.5, 1.5))


class Client(_Settings):
    """Plain client; safe to use from several threads, any number of streams at a time."""

    def __init__(self, url: str = "localhost:8001", **options: Any) -> None:
        super().__init__(url, **options)
        self._channel = grpc.insecure_channel(url, options=OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        self._channel.close()

    def stream(self, prompt: str | list[int] | None = None, *, request_id: str = "", **settings: Any) -> Iterator[Piece]:
        """The answer as it grows; closing the iterator cancels the request.

        Args:
            prompt: text or token ids; else give `messages`.
            request_id: by which `stop` finds it.
            settings: inputs of the model, see `clover_trt.serving.fields`.

        Raises:
            RequestError: an unknown setting.
            ServingError: the server refused or lost the request.
        """
        return self._pieces(self._message(prompt, request_id, True, settings))

    def generate(self, prompt: str | list[int] | None = None, *, request_id: str = "", **settings: Any) -> Piece:
        """The whole answer; arguments and errors as of `stream`."""
        return _joined(list(self._pieces(self._message(prompt, request_id, False, settings))))

    def stop(self, request_id: str) -> None:
        """End a running request with what it has."""
        list(self._pieces(_stop_message(self.model, request_id)))

    def _pieces(self, message: Any) -> Iterator[Piece]:
        attempt, begun = 0, False
        while True:
            call, ended = self._send(message), False
            try:
                for each in call:
                    piece = _piece_of(each)
                    if piece is not None:
                        begun = True
                        yield piece
                ended = True
                return
            except ServingError as error:
                time.sleep(self._wait(attempt, error, begun))
            except grpc.RpcError as error:
                ended = True
                time.sleep(self._wait(attempt, _failure(error), begun))
            finally:
                if not ended:
                    self._end(call, message.id)
            attempt += 1

    def _send(self, message: Any, timeout: float | None = None) -> Any:
        return self._stub.ModelStreamInfer(iter([message]), timeout=timeout or self.timeout)

    def _end(self, call: Any, request_id: str) -> None:
        """End a stream that nobody reads on: by its id, and by cancelling it only when that does not help (see `ENDING`)."""
        late = threading.Timer(ENDING, call.cancel)
        late.start()
        try:
            for each in (self._send(_stop_message(self.model, request_id), ENDING), call):
                for _ in each:
                    pass
        except (grpc.RpcError, ValueError):  # ValueError: the connection was closed, and the call with it
            call.cancel()
        finally:
            late.cancel()


class AsyncClient(_Settings):
    """Client for asyncio; any number of streams at a time."""

    def __init__(self, url: str = "localhost:8001", **options: Any) -> None:
        super().__init__(url, **options)
        self._channel = grpc.aio.insecure_channel(url, options=OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connection back."""
        await self._channel.close()

    def stream(self, prompt: str | list[int] | None = None, *, request_id: str = "", **settings: Any) -> AsyncIterator[Piece]:
        """As `Client.stream`."""
        return self._pieces(self._message(prompt, request_id, True, settings))

    async def generate(self, prompt: str | list[int] | None = None, *, request_id: str = "", **settings: Any) -> Piece:
        """As `Client.generate`."""
        return _joined([piece async for piece in self._pieces(self._message(prompt, request_id, False, settings))])

    async def _pieces(self, message: Any) -> AsyncIterator[Piece]:
        attempt, begun = 0, False
        while True:
            call, ended = self._send(message), False
            try:
                async for each in call:
                    piece = _piece_of(each)
                    if piece is not None:
                        begun = True
                        yield piece
                ended = True
                return
            except ServingError as error:
                await asyncio.sleep(self._wait(attempt, error, begun))
            except grpc.RpcError as error:
                ended = True
                await asyncio.sleep(self._wait(attempt, _failure(error), begun))
            finally:
                if not ended:
                    await asyncio.shield(self._end(call, message.id))
            attempt += 1

    def _send(self, message: Any, timeout: float | None = None) -> Any:
        return self._stub.ModelStreamInfer(_once(message), timeout=timeout or self.timeout)

    async def _end(self, call: Any, request_id: str) -> None:
        """As `Client._end`."""

        async def drain() -> None:
            for each in (self._send(_stop_message(self.model, request_id), ENDING), call):
                async for _ in each:
                    pass

        try:
            await asyncio.wait_for(drain(), ENDING)
        except (grpc.RpcError, grpc.aio.UsageError, TimeoutError, asyncio.CancelledError):
            call.cancel()


async def _once(message: Any) -> AsyncIterator[Any]:
    yield message
