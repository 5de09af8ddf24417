"""Requests of OpenAI's API as far as they mean something here, and what they ask of the Triton model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from clover_trt.errors import RequestError


class StreamOptions(BaseModel):
    """`stream_options`."""

    include_usage: bool = False


class _Common(BaseModel):
    """Fields of both kinds of completion. Unknown fields are ignored, as other servers do; those of OpenAI that would change the
    answer and can't be had are refused. Clover's own settings are extensions.
    """

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    threshold: float | None = None
    block_size: int | None = None
    expert_subset_mass: float | None = None
    mode: str | None = None
    rule: str | None = None
    max_forwards: int | None = None
    show_passes: bool | None = None  # with stream: what each pass filled, in `clover.pass_event` of the chunks

    def common_settings(self) -> dict[str, Any]:
        """Inputs of the Triton model.

        Raises:
            RequestError: something that can't be had is asked for.
        """
        if self.n not in (None, 1):
            raise RequestError(f"n = {self.n}: one choice a request; send the request again for another")
        if self.logit_bias:
            raise RequestError("logit_bias is not supported; bad_words rules texts out")
        same = (
            "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
            "bad_words", "threshold", "block_size", "expert_subset_mass", "mode", "rule", "max_forwards", "max_tokens",
        )  # fmt: skip
        settings = {name: getattr(self, name) for name in same}
        settings["stop_words"] = [self.stop] if isinstance(self.stop, str) else self.stop
        settings["random_seed"] = self.seed
        settings["show_passes"] = self.show_passes if self.stream else None
        if self.seed is not None and self.seed < 0:
            raise RequestError(f"seed = {self.seed} is out of range: expected 0 or more")
        return settings


class ChatRequest(_Common):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def settings(self) -> dict[str, Any]:
        """Inputs of the Triton model."""
        if self.response_format is not None and self.response_format.get("type", "text") != "text":
            raise RequestError(f"response_format: only text is supported, found {self.response_format!r:.100}")
        if self.tool_choice not in (None, "auto", "none"):
            raise RequestError(f"tool_choice: expected auto or none, found {self.tool_choice!r:.100}")
        extra = self.chat_template_kwargs or {}
        if set(extra) - {"enable_thinking"}:
            raise RequestError(f"chat_template_kwargs: expected enable_thinking, found {', '.join(sorted(extra))}")
        found = self.common_settings()
        if self.max_completion_tokens is not None:
            found["max_tokens"] = self.max_completion_tokens
        found |= {"messages": [_flat(message) for message in self.messages]}
        found |= {"tools": self.tools if self.tools and self.tool_choice != "none" else None}
        found |= {"enable_thinking": self.enable_thinking if self.enable_thinking is not None else extra.get("enable_thinking")}
        if self.logprobs or self.top_logprobs is not None:
            found |= {"return_log_probs": True, "log_probs_alternatives": self.top_logprobs or 0}
        return found


class CompletionRequest(_Common):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt: expected at least one")
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt]]
        return list(self.prompt)

    def settings(self) -> dict[str, Any]:
        """Inputs of the Triton model."""
        for name, neutral in (("echo", False), ("suffix", None), ("best_of", None)):
            if getattr(self, name) not in (neutral, 1):
                raise RequestError(f"{name} is not supported")
        if self.stream and len(self.prompts()) > 1:
            raise RequestError("stream: expected one prompt")
        found = self.common_settings()
        if self.logprobs is not None:
            found |= {"return_log_probs": True, "log_probs_alternatives": self.logprobs}
        return found


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text: parts of type text are joined.

    Raises:
        RequestError: a part is not text.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"messages: expected content parts of type text, found {part!r:.100}")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


FinishReason = Literal["stop", "length", "tool_calls"]


def finish_reason(found: str, called_tools: bool) -> FinishReason | None:
    """OpenAI's name of a finish reason."""
    if not found:
        return None
    if found in ("stop", "cancelled"):
        return "tool_calls" if called_tools else "stop"
    return "length"
