"""What an engine will need and how fast it can be at best, from geometry and profile alone, without building."""

from __future__ import annotations

import math
from dataclasses import dataclass

from clover_trt.checkpoint import fp8
from clover_trt.checkpoint.inspect import part_of
from clover_trt.checkpoint.names import expected_tensors
from clover_trt.config import ModelConfig
from clover_trt.engine.build import build_settings
from clover_trt.engine.profiles import GpuProfile, Precision
from clover_trt.errors import EngineError
from clover_trt.graph.contract import cache_names, cache_shape

GB = 1e9
ELEMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0}
EXPERT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0 + 2 / fp8.BLOCK**2, "nvfp4": 0.5 + 1 / 16}  # with their scales
STATED = {"h200": 515.0, "gb300": 680.0}  # tokens/s that the model's vendor states, batch 1, bfloat16
TPF = (3.0, 4.0, 5.0)
SHARES = (0.25, 0.375, 0.5, 0.625, 0.75, 1.0)  # of a layer's experts that a pass touches


@dataclass(frozen=True)
class PassFloor:
    """The least time of one denoising pass of one row that touches `distinct_experts` of each layer."""

    distinct_experts: int
    bytes_moved: float
    milliseconds: float
    bound_by: str
    tokens_per_second: dict[float, float]  # by TPF


@dataclass(frozen=True)
class Capacity:
    """Bytes by part, whether they fit, and the floor of a pass."""

    memory_bytes: float
    parts: dict[str, float]
    slot_bytes: float
    slots: int
    most_slots: int
    floors: tuple[PassFloor, ...]
    stated_tokens_per_second: float | None

    @property
    def total_bytes(self) -> float:
        """Everything together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the asked number of slots fits."""
        return self.slots <= self.most_slots


def weight_bytes(model: ModelConfig, precision: Precision) -> dict[str, float]:
    """Bytes of the weights by part of the model, in the precision that each part has."""
    parts: dict[str, float] = {}
    plain = 4.0 if precision == "float32" else 2.0
    for name, shape in expected_tensors(model).items():
        element = plain
        if fp8.is_quantized(name) and precision in ("fp8", "nvfp4"):
            element = EXPERT_BYTES[precision if ".experts." in name else "fp8"]
        part = part_of(name)
        parts[part] = parts.get(part, 0.0) + math.prod(shape) * element
    return parts


def slot_bytes(model: ModelConfig, profile: GpuProfile, cache_len: int) -> tuple[float, float]:
    """Bytes of one slot: keys and values of `cache_len` rows, and Gated DeltaNet states."""
    keys_values = states = 0.0
    for name in (name for pair in cache_names(model) for name in pair):
        size = math.prod(cache_shape(model, name, cache_len))
        if name.startswith("recurrent_state"):
            states += size * ELEMENT_BYTES[profile.state_dtype]
        elif name.startswith("conv_state"):
            states += size * ELEMENT_BYTES[profile.kv_dtype]
        else:
            keys_values += size * ELEMENT_BYTES[profile.kv_dtype]
    return keys_values, states


def capacity(model: ModelConfig, profile: GpuProfile, precision: Precision, context: int, slots: int) -> Capacity:
    """Plan an engine.

    Args:
        model: geometry.
        profile: the GPU; needs memory and bandwidth.
        precision: of the weights.
        context: longest prompt and response together, tokens.
        slots: requests in flight.

    Raises:
        EngineError: the profile has no memory or bandwidth, or the context is out of range.
    """
    if profile.memory_gb is None or profile.bandwidth_gb_s is None:
        raise EngineError(f"profile {profile.name} says neither memory nor bandwidth; expected a GPU's, as h200")
    settings = build_settings(profile, model, precision, context)
    weights = weight_bytes(model, precision)
    keys_values, states = slot_bytes(model, profile, settings.cache_len or context)
    each = keys_values + states
    fixed = sum(weights.values()) + profile.workspace_mb * 2**20
    memory = profile.memory_gb * GB
    parts = {
        **weights,
        "keys and values": keys_values * slots,
        "gated delta net states": states * slots,
        "workspace": float(profile.workspace_mb * 2**20),
    }
    floors = tuple(_floor(model, profile, precision, weights, states, round(share * model.num_experts)) for share in SHARES)
    most = max(0, int((memory - fixed) // each))
    return Capacity(memory, parts, each, slots, most, floors, STATED.get(profile.name))


def _floor(
    model: ModelConfig, profile: GpuProfile, precision: Precision, weights: dict[str, float], states: float, distinct: int
) -> PassFloor:
    """Bytes over bandwidth, or operations over the peak rate, whichever is longer; an empty prefix, states read only."""
    assert profile.bandwidth_gb_s is not None
    experts = weights["experts"] * distinct / model.num_experts
    rest = sum(size for part, size in weights.items() if part not in ("experts", "embedding"))
    moved = experts + rest + states
    dense = sum(
        math.prod(shape) for name, shape in expected_tensors(model).items() if len(shape) == 2 and "embed_tokens" not in name
    )
    expert_size = 3 * model.moe_intermediate_size * model.hidden_size
    active = dense + model.num_hidden_layers * model.num_experts_per_tok * expert_size
    seconds = {"bandwidth": moved / (profile.bandwidth_gb_s * GB)}
    computed_in = "bfloat16" if precision == "nvfp4" else precision  # the kernels widen NVFP4 weights
    peak = profile.peak_tflops.get(computed_in) or max(profile.peak_tflops.values(), default=0.0)
    if peak:
        seconds["arithmetic"] = 2 * active * model.block_size / (peak * 1e12)
    bound_by = max(seconds, key=lambda name: seconds[name])
    longest = seconds[bound_by]
    return PassFloor(distinct, moved, longest * 1e3, bound_by, {tpf: tpf / longest for tpf in TPF})
