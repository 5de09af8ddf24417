"""What a request's passes become: output tensors by name, as `fields.OUTPUTS` has them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clover_trt.runtime.chat import AnswerParser, AnswerPart
from clover_trt.runtime.request import PassEvent, Request
from clover_trt.runtime.text import TextCodec
from clover_trt.serving.fields import NUMPY, OUTPUT_KINDS

Tensors = dict[str, NDArray[Any]]


class ResponseMaker:
    """Turns the events of one request into responses.

    Args:
        request: the request.
        codec: the engine's tokenizer.
        stream: a response whenever there is new text, and a last one; otherwise one with everything.
        show_passes: a response for every pass.
    """

    def __init__(self, request: Request, codec: TextCodec, *, stream: bool, show_passes: bool = False) -> None:
        self._request, self._codec, self._stream, self._show = request, codec, stream, stream and show_passes
        self._parser = AnswerParser(thinking=request.sequence.thinking)
        self._part, self._text = AnswerPart(), ""
        self._told = 0  # tokens given out
        self._confidence: dict[int, float] = {}

    def push(self, event: PassEvent) -> Tensors | None:
        """The response that a pass gives rise to, if any."""
        last = event.finish_reason is not None
        self._text += event.text
        self._part = self._part + self._parser.push(event.text, final=last)
        self._confidence.update({fill.position: fill.confidence for fill in event.filled})
        if not last and not self._show and not (self._stream and self._text):
            return None
        values = self._values(last)
        if self._show:
            values["pass_event"] = [json.dumps(self._pass(event))]
        if last:
            values["finish_reason"] = [event.finish_reason]
        self._text, self._part = "", AnswerPart()
        return {name: tensor(name, value) for name, value in values.items()}

    def _values(self, last: bool) -> dict[str, list[Any]]:
        request, sequence, part = self._request, self._request.sequence, self._part
        resolved = sequence.response if last else sequence.resolved()
        fresh = resolved[self._told :]
        values: dict[str, list[Any]] = {
            "text_output": [self._text],
            "token_ids": fresh,
            "content": [part.content],
            "reasoning_content": [part.reasoning],
            "tool_calls": [json.dumps({"name": c.name, "arguments": c.arguments}, ensure_ascii=False) for c in part.tool_calls],
            "finish_reason": [""],
            "prompt_tokens": [len(sequence.prompt)],
            "cached_tokens": [sequence.counts.reused_tokens],
            "output_tokens": [len(resolved)],
            "forwards": [sequence.counts.forwards],
            "tpf": [len(resolved) / sequence.counts.forwards if sequence.counts.forwards else 0.0],
            "time_to_first_block": [(request.first_block - request.start) if request.first_block else 0.0],
        }
        if sequence.settings.logprobs is not None:
            found = sequence.logprobs_of(range(self._told, len(resolved)))
            values["output_log_probs"] = [each.logprob for each in found]
            values["log_probs"] = [
                json.dumps(
                    {**self._token(each.token, each.logprob), "top": [self._token(token, logprob) for token, logprob in each.top]}
                )
                for each in found
            ]
        self._told = len(resolved)
        return values

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._codec.tokenizer.decode([token], skip_special_tokens=False), "id": token, "logprob": logprob}

    def _pass(self, event: PassEvent) -> dict[str, Any]:
        """A pass for those who watch: the block's texts (null where unresolved) and how sure the model was of each."""
        mask, start = self._request.sequence.mask, event.block_start
        decode = self._codec.tokenizer.decode
        block = [None if token == mask else decode([token], skip_special_tokens=False) for token in event.block]
        return {
            "forward": event.forward,
            "block_start": start,
            "block": block,
            "confidence": [self._confidence.get(start + i) for i in range(len(block))],
            "filled": [fill.position for fill in event.filled],
        }


def tensor(name: str, values: list[Any]) -> NDArray[Any]:
    """One output's values as an array; text as UTF-8 bytes."""
    kind = OUTPUT_KINDS[name]
    if kind == "STRING":
        return np.array([value.encode("utf-8", "replace") for value in values], np.object_)
    return np.array(values, NUMPY[kind])
