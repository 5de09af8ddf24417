"""Text to tokens and back: tokenizer, chat template, and pieces that never split a character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from clover_trt.errors import EngineError, RequestError

Message = dict[str, Any]
REPLACEMENT = "\ufffd"


class TextCodec:
    """Tokenizer and chat template of an engine package or checkpoint folder.

    Raises:
        EngineError: `tokenizer.json` is missing or not valid.
    """

    def __init__(self, folder: Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise EngineError(f"{path}: not found; text needs the checkpoint's tokenizer.json, put it there and build again")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers library raises plain Exception
            raise EngineError(f"{path}: not a valid tokenizer file: {error}") from None
        template = Path(folder) / "chat_template.jinja"
        config = Path(folder) / "tokenizer_config.json"
        self.template: str | None = template.read_text() if template.exists() else None
        if self.template is None and config.exists():
            self.template = json.loads(config.read_text()).get("chat_template")

    def token_id(self, token: str) -> int | None:
        """Id of a token by its text, None when the vocabulary lacks it."""
        found: int | None = self.tokenizer.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it become their ids.

        Raises:
            RequestError: the text holds code points that UTF-8 cannot carry.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode: {error.reason} at character {error.start}") from None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, control tokens left out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def chat(
        self,
        messages: list[Message],
        *,
        tools: list[Any] | None = None,
        enable_thinking: bool | None = None,
        open_answer: bool = True,
    ) -> str:
        """Render a conversation with the checkpoint's own template, sandboxed, up to where the answer begins.

        Args:
            messages: objects with `role` and `content`.
            tools: `{"type": "function", "function": {"name", "description", "parameters": JSON schema}}`, passed to the template.
            enable_thinking: passed to the template; its own default when None.
            open_answer: whether the template opens the answer (its `add_generation_prompt`).

        Raises:
            RequestError: there is no template, messages or tools are malformed, or the template refuses them.
        """
        if self.template is None:
            raise RequestError("this engine has no chat template; use a plain prompt")
        if not messages or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise RequestError("messages: expected a non-empty list of objects with 'role' and 'content'")
        _check_tools(tools)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        options = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            template = environment.from_string(self.template)
            return template.render(messages=messages, tools=tools, add_generation_prompt=open_answer, **options)
        except Exception as error:  # a template is data from outside: whatever it raises is a refusal
            raise RequestError(f"the chat template refused the messages: {error}") from None


def _check_tools(tools: Any) -> None:
    """Refuse tools that are not JSON objects of the shape that templates and clients agree on."""
    if tools is None:
        return
    try:
        json.dumps(tools, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"tools: expected JSON ({error})") from None
    if not isinstance(tools, list):
        raise RequestError(f"tools: expected a list of objects, found {type(tools).__name__}")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f'tools[{i}]: expected {{"type": "function", "function": {{"name": ...}}}}, found {tool!r:.200}')
        if not isinstance(function.get("parameters", {}), dict):
            found = function["parameters"]
            raise RequestError(f"tools[{i}]: parameters: expected a JSON schema (an object), found {found!r:.200}")


def _refuse(message: str) -> None:
    raise TemplateError(message)


class PieceMaker:
    """Turns ids that arrive in parts into text pieces; an unfinished character waits for its last byte."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._context: list[int] = []  # ids whose text is out, so that spacing rules see what stands before
        self._waiting: list[int] = []

    def push(self, ids: Sequence[int], *, final: bool = False) -> str:
        """The text of `ids`, which follow those pushed before.

        Args:
            ids: the next ids.
            final: whether no more ids follow; an unfinished character then comes out as U+FFFD.
        """
        fresh = [*self._waiting, *ids]
        if not fresh:
            return ""
        known = self._codec.decode(self._context)
        text = self._codec.decode(self._context + fresh)
        if text.endswith(REPLACEMENT) and not final:
            self._waiting = fresh
            return ""
        self._context, self._waiting = fresh, []
        return text[len(known) :]
