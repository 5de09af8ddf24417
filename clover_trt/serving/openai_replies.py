"""Replies of OpenAI's API from the pieces of an answer, streamed and whole."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from clover_trt.serving.client import Piece
from clover_trt.serving.openai_types import ChatRequest, CompletionRequest, finish_reason


def usage(pieces: list[Piece]) -> dict[str, Any]:
    """`usage` of OpenAI's API, with Clover's figures beside it."""
    prompt, output = sum(piece.prompt_tokens for piece in pieces), sum(piece.output_tokens for piece in pieces)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(piece.cached_tokens for piece in pieces)},
        "clover": _figures(pieces[0]),
    }


def _figures(piece: Piece) -> dict[str, Any]:
    return {"forwards": piece.forwards, "tpf": piece.tpf, "time_to_first_block": piece.time_to_first_block}


class Reply:
    """What both kinds of reply have in common."""

    prefix, kind = "", ""

    def __init__(self, model: str, body: ChatRequest | CompletionRequest) -> None:
        self.id, self.created, self.model = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time()), model
        self.wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.shows_passes = bool(body.show_passes)

    def head(self) -> dict[str, Any]:
        """What every chunk begins with."""
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model}

    def chunk(self, piece: Piece, is_first: bool = False) -> dict[str, Any]:
        """A stream's chunk for a piece."""
        raise NotImplementedError

    def _with_pass(self, chunk: dict[str, Any], piece: Piece) -> dict[str, Any]:
        if self.shows_passes:
            chunk["clover"] = {**_figures(piece), "output_tokens": piece.output_tokens, "pass_event": piece.pass_event}
        return chunk


class ChatReply(Reply):
    """Of a chat completion."""

    prefix = "chatcmpl"

    def __init__(self, model: str, body: ChatRequest) -> None:
        super().__init__(model, body)
        self.kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._calls = 0

    def _tool_calls(self, piece: Piece, streamed: bool) -> list[dict[str, Any]]:
        found = []
        for call in piece.tool_calls:
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
            entry = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            found.append({"index": self._calls, **entry} if streamed else entry)
            self._calls += 1
        return found

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The reply to a request that was not streamed."""
        piece = pieces[0]
        calls = self._tool_calls(piece, streamed=False)
        message: dict[str, Any] = {"role": "assistant", "content": piece.content if piece.content or not calls else None}
        if piece.reasoning_content:
            message["reasoning_content"] = piece.reasoning_content
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": finish_reason(piece.finish_reason, bool(calls)),
            "logprobs": _logprobs(piece),
        }
        return {**self.head(), "choices": [choice], "usage": usage(pieces)}

    def chunk(self, piece: Piece, is_first: bool = False) -> dict[str, Any]:
        """A stream's chunk for a piece."""
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        if piece.content:
            delta["content"] = piece.content
        if piece.reasoning_content:
            delta["reasoning_content"] = piece.reasoning_content
        calls = self._tool_calls(piece, streamed=True)
        if calls:
            delta["tool_calls"] = calls
        reason = finish_reason(piece.finish_reason, self._calls > 0)
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": _logprobs(piece)}
        return self._with_pass({**self.head(), "choices": [choice]}, piece)


class TextReply(Reply):
    """Of a plain completion."""

    prefix, kind = "cmpl", "text_completion"

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """The reply to a request that was not streamed."""
        choices = [self._choice(piece, index) for index, piece in enumerate(pieces)]
        return {**self.head(), "choices": choices, "usage": usage(pieces)}

    def chunk(self, piece: Piece, is_first: bool = False) -> dict[str, Any]:
        """A stream's chunk for a piece."""
        return self._with_pass({**self.head(), "choices": [self._choice(piece, 0)]}, piece)

    def _choice(self, piece: Piece, index: int) -> dict[str, Any]:
        found, logprobs = piece.log_probs, None
        if found:
            ends = [0]
            for each in found:
                ends.append(ends[-1] + len(each["token"]))
            logprobs = {
                "tokens": [each["token"] for each in found],
                "token_logprobs": [each["logprob"] for each in found],
                "top_logprobs": [{top["token"]: top["logprob"] for top in each["top"]} for each in found],
                "text_offset": ends[:-1],
            }
        return {
            "index": index,
            "text": piece.text,
            "finish_reason": finish_reason(piece.finish_reason, False),
            "logprobs": logprobs,
        }


def _logprobs(piece: Piece) -> dict[str, Any] | None:
    def entry(each: dict[str, Any]) -> dict[str, Any]:
        return {"token": each["token"], "logprob": each["logprob"], "bytes": list(each["token"].encode("utf-8", "replace"))}

    if not piece.log_probs:
        return None
    return {
        "content": [{**entry(each), "top_logprobs": [entry(top) for top in each["top"]]} for each in piece.log_probs],
        "refusal": None,
    }
