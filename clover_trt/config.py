"""Validated, frozen configurations, read from the json files that checkpoints and engines publish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from clover_trt.errors import ConfigError

BACKBONE_TYPES = ("qwen3_5_moe_text", "qwen3_5_moe")
CLOVER_TYPES = ("clover_moe",)

LayerType = Literal["linear_attention", "full_attention"]
T = TypeVar("T", bound=BaseModel)


class Frozen(BaseModel):
    """Base of the configurations: frozen, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def read_json(path: Path) -> dict[str, Any]:
    """Read a json object from `path`.

    Raises:
        ConfigError: the file is missing, is not valid JSON, or is not an object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; expected a json file written by the checkpoint's author") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON, line {error.lineno} column {error.colno}: {error.msg}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def validated(kind: type[T], data: dict[str, Any], where: str) -> T:
    """Build `kind` from `data`; a failure names every field, what was found and what was expected."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            field = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            found = f" (found {item['input']!r})" if field and item["type"] != "missing" else ""
            lines.append(f"{field}: {message}{found}" if field else message)
        raise ConfigError(f"{where}: " + "; ".join(lines)) from None


class ModelConfig(Frozen):
    """Geometry of the model; field names are those of the published `config.json`.

    Fields that only Clover has: `block_size` (tokens per noisy block), `mask_token_id`,
    `linear_right_conv_kernel_dim` (width of the right convolution) and `block_rule` (how noisy
    tokens of a Gated DeltaNet layer see each other).
    """

    model_type: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10_000.0, gt=0)
    partial_rotary_factor: float = Field(default=0.25, gt=0, le=1)
    max_position_embeddings: int = Field(gt=0)
    linear_conv_kernel_dim: int = Field(ge=2)
    linear_key_head_dim: int = Field(gt=0)
    linear_value_head_dim: int = Field(gt=0)
    linear_num_key_heads: int = Field(gt=0)
    linear_num_value_heads: int = Field(gt=0)
    num_experts: int = Field(gt=0)
    num_experts_per_tok: int = Field(gt=0)
    moe_intermediate_size: int = Field(gt=0)
    shared_expert_intermediate_size: int = Field(gt=0)
    layer_types: tuple[LayerType, ...]
    tie_word_embeddings: bool = False
    block_size: int = Field(default=32, gt=0)
    mask_token_id: int | None = Field(default=None, ge=0)
    linear_right_conv_kernel_dim: int = Field(default=3, ge=1)
    block_rule: Literal["softmax_memory"] = "softmax_memory"

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.model_type not in BACKBONE_TYPES + CLOVER_TYPES:
            raise ValueError(f"model_type must be one of {', '.join(CLOVER_TYPES + BACKBONE_TYPES)}, found {self.model_type!r}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        for many, few in (
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, many) % getattr(self, few):
                raise ValueError(f"{many} = {getattr(self, many)} is not a multiple of {few} = {getattr(self, few)}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok = {self.num_experts_per_tok} exceeds num_experts = {self.num_experts}")
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError(f"head_dim * partial_rotary_factor must be even and positive, found {self.rotary_dim}")
        if self.mask_token_id is not None and self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id = {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")
        if self.model_type in CLOVER_TYPES and self.mask_token_id is None:
            raise ValueError(f"mask_token_id is required for model_type {self.model_type}")
        return self

    @property
    def rotary_dim(self) -> int:
        """Channels of each attention head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        """Channels of all Gated DeltaNet key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all Gated DeltaNet value heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels under the Gated DeltaNet convolution: query, key and value."""
        return 2 * self.key_dim + self.value_dim

    @property
    def is_backbone_only(self) -> bool:
        """Whether this is a plain Qwen3.5-MoE configuration, without Clover's fields."""
        return self.model_type in BACKBONE_TYPES

    @classmethod
    def from_hf(cls, data: dict[str, Any], where: str) -> ModelConfig:
        """Read a published `config.json` (or its `text_config`); fields of no use to inference are ignored.

        Raises:
            ConfigError: a field is missing, out of range, or asks for something not implemented.
        """
        data = {**data, **data["text_config"]} if isinstance(data.get("text_config"), dict) else dict(data)
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ConfigError(f"{where}: rope_parameters: expected an object, found {rope!r}")
        rope_type = rope.get("rope_type", "default")
        if rope_type != "default":
            raise ConfigError(f"{where}: rope_type {rope_type!r} is not supported; expected 'default'")
        for field, needed in (("hidden_act", "silu"), ("attention_bias", False)):
            if data.get(field, needed) != needed:
                raise ConfigError(f"{where}: {field} = {data[field]!r} is not supported; expected {needed!r}")
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in rope:
                data[name] = rope[name]
        if data.get("layer_types") is None and isinstance(data.get("num_hidden_layers"), int):
            every = int(data.get("full_attention_interval", 4))
            data["layer_types"] = [
                "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(data["num_hidden_layers"])
            ]
        known = {name: data[name] for name in cls.model_fields if data.get(name) is not None}
        return validated(cls, known, where)

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` form, which `from_hf` reads back to an equal object."""
        data = self.model_dump(mode="json")
        theta, factor = data.pop("rope_theta"), data.pop("partial_rotary_factor")
        data["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": factor}
        data["architectures"] = ["CloverForBlockDiffusion" if not self.is_backbone_only else "Qwen3_5MoeForCausalLM"]
        data["hidden_act"] = "silu"
        data["attention_bias"] = False
        return data

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `folder/config.json`."""
        path = Path(folder) / "config.json"
        return cls.from_hf(read_json(path), str(path))


class OptimizationProfile(Frozen):
    """Smallest, usual and largest size of each dynamic axis of the step, by the axis' name in the graph."""

    name: str
    axes: dict[str, tuple[int, int, int]]

    @model_validator(mode="after")
    def _ordered(self) -> OptimizationProfile:
        for axis, (low, usual, high) in self.axes.items():
            if not 1 <= low <= usual <= high:
                raise ValueError(f"{self.name}: {axis}: expected 1 <= min <= opt <= max, found {low}, {usual}, {high}")
        return self


class BuildConfig(Frozen):
    """How an engine was built; written to the package's `config.json` as `build_config`.

    The fields from `max_seq_len` to `strongly_typed` are those of TensorRT-LLM's engine folders, see
    docs/tensorrt-llm.md. `cache_len` is the number of rows of a slot's key and value buffers when they are of fixed size.
    """

    gpu: str = "cpu"
    backend: Literal["onnxruntime", "tensorrt", "tensorrt-rtx"] = "onnxruntime"
    precision: Literal["float32", "bfloat16", "fp8", "nvfp4"] = "float32"
    max_seq_len: int = Field(gt=0)
    max_input_len: int = Field(gt=0)
    max_batch_size: int = Field(default=64, gt=0)
    opt_batch_size: int = Field(default=1, gt=0)
    max_num_tokens: int = Field(gt=0)
    opt_num_tokens: int = Field(gt=0)
    max_beam_width: Literal[1] = 1
    strongly_typed: Literal[True] = True
    block_size: int = Field(gt=0)
    prefill_chunk: int = Field(default=512, gt=0)
    compute_capability: str | None = None
    operations: Literal["functions", "plugins"] = "functions"
    workspace_mb: int = 0
    cache_len: int | None = None
    optimization_profiles: tuple[OptimizationProfile, ...] = ()


class GenerationConfig(Frozen):
    """Decoding settings: defaults from `generation_config.json`, overridable per request.

    `mode` says how the response is made: blocks denoised in parallel (what the model was trained for), drafted by one denoising
    pass and verified by the causal model, or one token after another. `rule` names the unmasking rule (runtime/unmask.py),
    `tokens_per_pass` belongs to the rule of that name. `logprobs` asks for the log-probability of each token and that many
    alternatives; `max_forwards` ends a response after so many block steps. A `no_repeat_ngram_size` above 0 bans n-grams that
    the response already has, `bad_words_ids` bans token sequences; with either (sequences of one token aside) a block fills from
    left to right.

    All penalties and biases act on the response only. `dllm_length_penalty_strength` and
    `dllm_think_end_strength`, the logit bias at full strength, are this project's names: the published
    fields say where the ramps are, not how high.
    """

    mode: Literal["diffusion", "self-speculative", "autoregressive"] = "diffusion"
    rule: str = "low_confidence"
    threshold: float = Field(default=0.95, gt=0, le=1)
    tokens_per_pass: int = Field(default=4, ge=1)
    block_size: int = Field(default=32, ge=1)
    max_new_tokens: int = Field(default=1024, ge=1)
    do_sample: bool = False
    temperature: float = Field(default=1.0, gt=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)
    repetition_penalty: float = Field(default=1.0, gt=0)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    bad_words_ids: tuple[Annotated[tuple[int, ...], Field(min_length=1)], ...] = ()
    dllm_length_penalty_start: int = Field(default=8192, ge=0)
    dllm_length_penalty_window: int = Field(default=8192, ge=1)
    dllm_length_penalty_strength: float = Field(default=10.0, ge=0)
    dllm_think_end_start: int = Field(default=4096, ge=0)
    dllm_think_end_window: int = Field(default=4096, ge=1)
    dllm_think_end_strength: float = Field(default=10.0, ge=0)
    expert_subset_mass: float = Field(default=1.0, gt=0, le=1)
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    max_forwards: int | None = Field(default=None, ge=1)
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    eos_token_id: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path) -> GenerationConfig:
        """Read `folder/generation_config.json`; fields for other programs are ignored, a missing file gives defaults."""
        path = Path(folder) / "generation_config.json"
        data = read_json(path) if path.exists() else {}
        known = {name: value for name, value in data.items() if name in cls.model_fields and value is not None}
        if isinstance(known.get("eos_token_id"), int):
            known["eos_token_id"] = [known["eos_token_id"]]
        return validated(cls, known, str(path))

    def override(self, changes: dict[str, Any]) -> GenerationConfig:
        """A copy with `changes`; None leaves a field as it is.

        Raises:
            ConfigError: an unknown field or a value out of range, named with its value.
        """
        given = {name: value for name, value in changes.items() if value is not None}
        return validated(type(self), {**self.model_dump(), **given}, "generation settings")
