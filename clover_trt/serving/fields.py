"""The tensors of the Triton models: one table from which config.pbtxt, the parser and the documentation follow.

Names are the field's: those of TensorRT-LLM's and vLLM's Triton models where they have one, Clover's own otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clover_trt.errors import RequestError

NUMPY: dict[str, type] = {
    "STRING": np.object_, "BOOL": np.bool_, "INT32": np.int32, "INT64": np.int64, "UINT64": np.uint64, "FP32": np.float32
}  # fmt: skip


@dataclass(frozen=True)
class Input:
    """An input tensor.

    `setting` is the field of `GenerationConfig` that it sets; without one, `parse` gives it a meaning of its own. `many` values
    or one. All but one of the prompt's inputs are optional.
    """

    name: str
    kind: str  # Triton's type, without TYPE_
    text: str
    setting: str | None = None
    aliases: tuple[str, ...] = ()
    many: bool = False


@dataclass(frozen=True)
class Output:
    """An output tensor, one-dimensional."""

    name: str
    kind: str
    text: str


INPUTS = (
    Input("text_input", "STRING", "the prompt, as it is: no chat template"),
    Input("messages", "STRING", "a conversation, JSON: a list of objects with role and content; the chat template is applied"),
    Input("tools", "STRING", "with messages: tools, JSON, as OpenAI's API has them"),
    Input("input_ids", "INT32", "the prompt as token ids", many=True),
    Input("enable_thinking", "BOOL", "with messages: passed to the chat template"),
    Input(
        "stream", "BOOL", "several responses with the text that each block adds; otherwise exactly one", aliases=("streaming",)
    ),
    Input("max_tokens", "INT32", "hard limit of the response", "max_new_tokens", ("sampling_param_max_tokens",)),
    Input("temperature", "FP32", "above 0: sample at it; 0: greedy, the default", "temperature", ("sampling_param_temperature",)),
    Input("top_k", "INT32", "sample among so many tokens; 0 for all", "top_k", ("sampling_param_top_k",)),
    Input("top_p", "FP32", "sample among the likeliest tokens of this mass", "top_p", ("sampling_param_top_p",)),
    Input("random_seed", "UINT64", "seed when sampling", "seed", ("sampling_param_seed",)),
    Input("repetition_penalty", "FP32", "over the response", "repetition_penalty"),
    Input("presence_penalty", "FP32", "over the response", "presence_penalty", ("sampling_param_presence_penalty",)),
    Input("frequency_penalty", "FP32", "over the response", "frequency_penalty", ("sampling_param_frequency_penalty",)),
    Input("no_repeat_ngram_size", "INT32", "over the response; 0 bans nothing", "no_repeat_ngram_size"),
    Input("stop_words", "STRING", "the response ends before any of them", "stop", ("sampling_param_stop",), many=True),
    Input("bad_words", "STRING", "texts that the response must not have", "bad_words", many=True),
    Input("ignore_eos", "BOOL", "go on after the end-of-turn token", "ignore_eos"),
    Input("return_log_probs", "BOOL", "return output_log_probs and log_probs"),
    Input("log_probs_alternatives", "INT32", "with return_log_probs: so many alternatives a token", "logprobs"),
    Input("threshold", "FP32", "confidence above which a position is filled", "threshold"),
    Input("rule", "STRING", "unmasking rule", "rule"),
    Input("block_size", "INT32", "tokens of a noisy block", "block_size"),
    Input("expert_subset_mass", "FP32", "share of the routing mass kept in a block", "expert_subset_mass"),
    Input("mode", "STRING", "diffusion, self-speculative or autoregressive", "mode"),
    Input("max_forwards", "INT32", "end the response after so many block steps", "max_forwards"),
    Input("deadline_ms", "INT32", "end the response after so many milliseconds, with what there is"),
    Input("show_passes", "BOOL", "with stream: a response a pass, with what the pass filled in pass_event"),
    Input("sampling_parameters", "STRING", "any of the settings above as one JSON object, as vLLM's model takes them"),
    Input("stop", "BOOL", "end the running request of the same request id"),
    Input("canary", "BOOL", "answer when the engine has done a pass: what health checks ask"),
)
OUTPUTS = (
    Output("text_output", "STRING", "text, new since the response before"),
    Output("token_ids", "INT32", "token ids, new since the response before"),
    Output("content", "STRING", "text without reasoning and tool calls, new"),
    Output("reasoning_content", "STRING", "text before </think>, new"),
    Output("tool_calls", "STRING", "finished tool calls, new: a JSON object with name and arguments each"),
    Output("finish_reason", "STRING", "empty until the last response: stop, length, max_forwards, cancelled or deadline"),
    Output("output_log_probs", "FP32", "log-probability of each of token_ids, when asked for"),
    Output("log_probs", "STRING", "of each of token_ids: JSON with token, id, logprob and top"),
    Output("prompt_tokens", "INT32", "tokens of the prompt"),
    Output("cached_tokens", "INT32", "of the prompt, whose state came from an earlier request"),
    Output("output_tokens", "INT32", "tokens of the response so far"),
    Output("forwards", "INT32", "block steps so far (NFE), prefill and commits included"),
    Output("tpf", "FP32", "output tokens per forward"),
    Output("time_to_first_block", "FP32", "seconds from arrival to the first finished block; 0 before"),
    Output("pass_event", "STRING", "with show_passes: JSON with forward, block_start, block and filled"),
)
OUTPUT_KINDS = {each.name: each.kind for each in OUTPUTS}
BY_NAME = {name: each for each in INPUTS for name in (each.name, *each.aliases)}


@dataclass
class ServingRequest:
    """What a request asks for, its values checked for form; their ranges are the generator's to check."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    ids: list[int] | None = None
    tools: list[Any] | None = None
    enable_thinking: bool | None = None
    stream: bool = False
    show_passes: bool = False
    deadline_ms: int | None = None
    stop: bool = False
    canary: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def parse(tensors: Mapping[str, NDArray[Any]], max_prompt_bytes: int = 1 << 22) -> ServingRequest:
    """A request from its input tensors, of any shape with the right number of values.

    Args:
        tensors: by name or alias; STRING tensors hold bytes.
        max_prompt_bytes: longest text or conversation that is taken.

    Raises:
        RequestError: names the tensor, what was expected and what was found.
    """
    values: dict[str, Any] = {}
    for name, tensor in tensors.items():
        known = BY_NAME.get(name)
        if known is None:
            raise RequestError(f"{name}: unknown input; expected one of {', '.join(each.name for each in INPUTS)}")
        if known.name in values:
            raise RequestError(f"{name}: {known.name} was given already, under another name")
        values[known.name] = _values(name, known, tensor, max_prompt_bytes)
    for name, value in _from_json(values.pop("sampling_parameters", None)).items():
        if name in values:
            raise RequestError(f"sampling_parameters: {name} is given as a tensor too")
        values[name] = value
    request = ServingRequest()
    for name in ("stream", "show_passes", "stop", "canary"):
        setattr(request, name, bool(values.pop(name, False)))
    for name in ("enable_thinking", "deadline_ms"):
        setattr(request, name, values.pop(name, None))
    request.messages, request.tools = (_json_list(name, values.pop(name, None)) for name in ("messages", "tools"))
    request.text, request.ids = values.pop("text_input", None), values.pop("input_ids", None)
    if request.deadline_ms is not None and request.deadline_ms <= 0:
        raise RequestError(f"deadline_ms = {request.deadline_ms} is out of range: expected at least 1")
    if not (request.stop or request.canary):
        given = [
            name
            for name, value in (("text_input", request.text), ("messages", request.messages), ("input_ids", request.ids))
            if value is not None
        ]
        if len(given) != 1:
            raise RequestError(
                f"expected exactly one of text_input, messages and input_ids, found {' and '.join(given) or 'none'}"
            )
    request.settings = _settings(values)
    return request


def _values(name: str, known: Input, tensor: NDArray[Any], max_bytes: int) -> Any:
    flat = tensor.reshape(-1)
    expected = NUMPY[known.kind]
    if flat.dtype != expected:
        raise RequestError(f"{name}: expected {known.kind}, found {flat.dtype}")
    if not known.many and flat.size != 1:
        raise RequestError(f"{name}: expected one value, found shape {list(tensor.shape)}")
    if known.kind != "STRING":
        return flat.tolist() if known.many else flat[0].item()
    if sum(len(item) for item in flat) > max_bytes:
        raise RequestError(f"{name}: {sum(len(item) for item in flat):,} bytes, the server takes {max_bytes:,} at most")
    texts = [_text(name, item) for item in flat]
    return texts if known.many else texts[0]


def _text(name: str, item: bytes | str) -> str:
    if isinstance(item, str):
        return item
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not valid UTF-8: {error.reason} at byte {error.start}") from None


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"{name}: not valid JSON ({error})") from None


def _json_list(name: str, text: str | None) -> list[Any] | None:
    if text is None:
        return None
    found = _json(name, text)
    if not isinstance(found, list):
        raise RequestError(f"{name}: expected a JSON list, found {type(found).__name__}")
    return found


def _from_json(text: str | None) -> dict[str, Any]:
    """Settings of `sampling_parameters` by input name; numbers may be written as strings, as vLLM's clients do."""
    if text is None:
        return {}
    data = _json("sampling_parameters", text)
    if not isinstance(data, dict):
        raise RequestError(f"sampling_parameters: expected a JSON object, found {type(data).__name__}")
    short = {"seed": "random_seed", "stop": "stop_words", "logprobs": "log_probs_alternatives"}
    found: dict[str, Any] = {}
    for key, value in data.items():
        known = BY_NAME.get(short.get(key) or key)
        if known is None or (known.setting is None and known.name not in ("stream", "return_log_probs")):
            names = ", ".join(each.name for each in INPUTS if each.setting)
            raise RequestError(f"sampling_parameters: unknown setting {key!r}; expected one of {names}")
        found[known.name] = _number(known, key, value)
    if "log_probs_alternatives" in found:
        found.setdefault("return_log_probs", True)
    return found


def _number(known: Input, key: str, value: Any) -> Any:
    if known.many:
        return [value] if isinstance(value, str) else value
    if isinstance(value, str) and known.kind in ("FP32", "INT32", "UINT64"):
        try:
            return float(value) if known.kind == "FP32" else int(value)
        except ValueError:
            raise RequestError(f"sampling_parameters: {key}: expected a number, found {value!r}") from None
    return value


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """Overrides of `GenerationConfig`."""
    wanted = values.pop("return_log_probs", False)
    alternatives = values.pop("log_probs_alternatives", 0)
    found: dict[str, Any] = {str(BY_NAME[name].setting): value for name, value in values.items()}
    if wanted:
        found["logprobs"] = alternatives
    if "temperature" in found:
        found["do_sample"] = found["temperature"] != 0
        if not found["do_sample"]:
            del found["temperature"]
    for name in ("temperature", "threshold", "top_p", "repetition_penalty", "expert_subset_mass"):
        if isinstance(found.get(name), float):
            found[name] = float(np.format_float_positional(np.float32(found[name])))  # 0.95, not 0.949999988079071
    return found


def config_io(rank_one: bool = True) -> str:
    """The input and output sections of a config.pbtxt; with `rank_one` false, for models with a batch dimension of their own."""
    lines = []
    for each in INPUTS:
        for name in (each.name, *each.aliases):
            dims = "-1" if each.many or rank_one else "1"
            lines.append(f'input [ {{ name: "{name}" data_type: TYPE_{each.kind} dims: [ {dims} ] optional: true }} ]')
    lines += [f'output [ {{ name: "{each.name}" data_type: TYPE_{each.kind} dims: [ -1 ] }} ]' for each in OUTPUTS]
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The tables of docs/serving.md."""
    lines = ["| input | type | meaning |", "| --- | --- | --- |"]
    for each in INPUTS:
        names = ", ".join(f"`{name}`" for name in (each.name, *each.aliases))
        lines.append(f"| {names} | {each.kind}{' [n]' if each.many else ''} | {each.text} |")
    lines += ["", "| output | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{each.name}` | {each.kind} | {each.text} |" for each in OUTPUTS]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
