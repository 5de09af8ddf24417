"""What stands before the OpenAI front: API keys, a limit of request size, a limit of requests a minute."""

from __future__ import annotations

import hmac
import math
import time
from dataclasses import dataclass, field

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
GUARDED = "/v1/"


class StatusError(Exception):
    """An error with its HTTP status, as OpenAI's clients read it."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}

    def response(self) -> JSONResponse:
        """The response."""
        kind = KINDS.get(self.status, "server_error")
        body = {"error": {"message": str(self), "type": kind, "param": None, "code": self.status}}
        return JSONResponse(body, self.status, self.headers)


@dataclass
class RateLimit:
    """A token bucket for each client."""

    per_minute: int
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)  # tokens left, when

    def take(self, who: str, now: float) -> float:
        """Take one request; seconds to wait for the next one when there is none left, else 0."""
        left, then = self._buckets.get(who, (float(self.per_minute), now))
        left = min(float(self.per_minute), left + (now - then) * self.per_minute / 60)
        if len(self._buckets) > 10_000:  # those that are full again need not be remembered
            self._buckets = {
                k: v for k, v in self._buckets.items() if v[0] + (now - v[1]) * self.per_minute / 60 < self.per_minute
            }
        if left < 1:
            self._buckets[who] = (left, now)
            return (1 - left) * 60 / self.per_minute
        self._buckets[who] = (left - 1, now)
        return 0.0


def authorised(header: str, keys: tuple[str, ...]) -> str:
    """The key that a request came with, empty when none is needed. Every key is compared, in constant time.

    Raises:
        StatusError: 401.
    """
    given = header.removeprefix("Bearer ").encode()
    matches = [hmac.compare_digest(given, key.encode()) for key in keys]
    if keys and not any(matches):
        raise StatusError(401, "expected a valid API key: Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})
    return keys[matches.index(True)] if keys else ""


class Guard:
    """ASGI middleware; only paths under /v1/ are guarded.

    Args:
        app: what it stands before.
        keys: API keys that are let in; empty lets everyone in.
        limit: requests a minute of each key, or of each address when there are no keys.
        max_bytes: longest body.
    """

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...], limit: RateLimit | None, max_bytes: int) -> None:
        self._app, self._keys, self._limit, self._max_bytes = app, keys, limit, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with what is wrong."""
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED):
            await self._app(scope, receive, send)
            return
        try:
            has_length = self._let_in(scope)
            body = receive if has_length else await self._read(receive)
        except StatusError as failure:
            await failure.response()(scope, receive, send)
            return
        await self._app(scope, body, send)

    def _let_in(self, scope: Scope) -> bool:
        """Whether the request says how long it is."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        key = authorised(headers.get("authorization", ""), self._keys)
        length = headers.get("content-length")
        if length is not None and (not length.isdigit() or int(length) > self._max_bytes):
            raise self._too_long()
        if self._limit is not None:
            address = scope["client"][0] if scope.get("client") else ""
            wait = self._limit.take(key or address, time.monotonic())
            if wait:
                retry = {"Retry-After": str(math.ceil(wait))}
                raise StatusError(429, f"more than {self._limit.per_minute} requests a minute; try again later", retry)
        return length is not None or scope["method"] == "GET"

    def _too_long(self) -> StatusError:
        return StatusError(413, f"the request is longer than {self._max_bytes:,} bytes")

    async def _read(self, receive: Receive) -> Receive:
        """A body that comes in chunks and says no length beforehand: read whole, up to the limit, and given out again."""
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                break
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                raise self._too_long()
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        return again
