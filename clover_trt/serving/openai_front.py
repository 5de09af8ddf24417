"""An OpenAI-compatible front of the Triton model: /v1/models, /v1/chat/completions, /v1/completions, /health, and a page at /."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from clover_trt.errors import RequestError
from clover_trt.serving.client import AsyncClient, Piece, ServingError
from clover_trt.serving.guard import Guard, RateLimit, StatusError
from clover_trt.serving.openai_replies import ChatReply, Reply, TextReply, usage
from clover_trt.serving.openai_types import ChatRequest, CompletionRequest

T = TypeVar("T")
STATUS = {
    "INVALID_ARGUMENT": 400,
    "NOT_FOUND": 404,
    "CANCELLED": 499,
    "DEADLINE_EXCEEDED": 504,
    "UNAVAILABLE": 503,
    "RESOURCE_EXHAUSTED": 503,
}
CONTENT_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"


@dataclass
class FrontOptions:
    """How the front behaves.

    Args:
        triton: HOST:PORT of Triton's gRPC endpoint.
        model_name: the model's name for clients.
        api_keys: keys that are let in; empty lets everyone in.
        max_request_bytes: longest body.
        requests_per_minute: of one key, or of one address when there are no keys; None for no limit.
        timeout: seconds for a whole request.
    """

    triton: str
    model_name: str = "clover"
    api_keys: tuple[str, ...] = ()
    max_request_bytes: int = 4 << 20
    requests_per_minute: int | None = None
    timeout: float = 600.0


def create_app(options: FrontOptions) -> FastAPI:
    """The application; `uvicorn` runs it."""
    front = _Front(options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await front.close()

    app = FastAPI(title="Clover", docs_url=None, redoc_url=None, lifespan=lifespan)
    limit = RateLimit(options.requests_per_minute) if options.requests_per_minute else None
    app.add_middleware(Guard, keys=options.api_keys, limit=limit, max_bytes=options.max_request_bytes)

    @app.exception_handler(StatusError)
    async def failed(_: Request, failure: StatusError) -> Response:
        return failure.response()

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> Response:
        return StatusError(error.status_code, str(error.detail)).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        lines = [f"{'.'.join(str(part) for part in each['loc'][1:]) or 'body'}: {each['msg']}" for each in error.errors()]
        return StatusError(400, "; ".join(lines)).response()

    @app.get("/", response_class=HTMLResponse)
    async def page() -> Response:
        text = (files("clover_trt.serving") / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": CONTENT_POLICY})

    @app.get("/health")
    async def health() -> Response:
        healthy = await front.healthy()
        return Response("ok\n" if healthy else "no answer from the model\n", 200 if healthy else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": options.model_name, "object": "model", "created": front.began, "owned_by": "clover-trt"}],
        }

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await front.chat(body, request)

    @app.post("/v1/completions", response_model=None)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        return await front.complete(body, request)

    return app


class _Front:
    """The handlers."""

    def __init__(self, options: FrontOptions) -> None:
        self.options, self.began = options, int(time.time())
        self._client: AsyncClient | None = None

    @property
    def client(self) -> AsyncClient:
        """The client, made inside the running event loop."""
        if self._client is None:
            self._client = AsyncClient(self.options.triton, timeout=self.options.timeout)
        return self._client

    async def close(self) -> None:
        """Give the connection back."""
        if self._client is not None:
            await self._client.close()

    async def healthy(self) -> bool:
        """Whether a canary comes back."""
        try:
            await asyncio.wait_for(self.client.generate(canary=True), 8.0)
        except (ServingError, TimeoutError):
            return False
        return True

    def _check_model(self, name: str) -> None:
        if name not in ("", self.options.model_name):
            raise StatusError(404, f"the model {name!r} does not exist; there is {self.options.model_name!r}")

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """A chat completion."""
        self._check_model(body.model)
        reply = ChatReply(self.options.model_name, body)
        settings = _checked(body.settings)
        if body.stream:
            return await self._streamed(self.client.stream(**settings), reply)
        piece = await _until_gone(request, _call(self.client.generate(**settings)))
        return JSONResponse(reply.whole([piece]))

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """A plain completion."""
        self._check_model(body.model)
        reply, prompts, settings = TextReply(self.options.model_name, body), _checked(body.prompts), _checked(body.settings)
        if body.stream:
            return await self._streamed(self.client.stream(prompts[0], **settings), reply)
        pieces = await _until_gone(request, _call(asyncio.gather(*(self.client.generate(each, **settings) for each in prompts))))
        return JSONResponse(reply.whole(list(pieces)))

    async def _streamed(self, pieces: AsyncIterator[Piece], reply: Reply) -> Response:
        first = await _call(anext(pieces))  # an error before the first piece is a status, not a broken stream

        async def events() -> AsyncIterator[str]:
            try:
                yield _event(reply.chunk(first, is_first=True))
                last = first
                async for piece in pieces:
                    last = piece
                    yield _event(reply.chunk(piece))
                if reply.wants_usage:
                    yield _event({**reply.head(), "choices": [], "usage": usage([last])})
                yield "data: [DONE]\n\n"
            except ServingError as error:
                yield _event({"error": {"message": str(error), "type": "server_error", "code": STATUS.get(error.code, 500)}})
            finally:
                await pieces.aclose()  # type: ignore[attr-defined]

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def _checked(settings: Callable[[], T]) -> T:
    try:
        return settings()
    except RequestError as error:
        raise StatusError(400, str(error)) from None


async def _call(work: Awaitable[T]) -> T:
    try:
        return await work
    except RequestError as error:
        raise StatusError(400, str(error)) from None
    except ServingError as error:
        status = STATUS.get(error.code, 500)
        raise StatusError(status, str(error), {"Retry-After": "1"} if status == 503 else None) from None


async def _until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=0.1)
            if not task.done() and await request.is_disconnected():
                raise StatusError(499, "the client has gone")
        return task.result()
    finally:
        task.cancel()
