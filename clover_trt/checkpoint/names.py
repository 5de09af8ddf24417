"""Names, shapes and layouts of a checkpoint's tensors.

The published names of Clover's added Gated DeltaNet tensors are not public. `ADDED_TENSORS` is the one
place that says what this project calls them; a tensor map (json, `{our name: checkpoint name}`) overrides it.
"""

from __future__ import annotations

import re
from pathlib import Path

from clover_trt.config import ModelConfig, read_json
from clover_trt.errors import CheckpointError

Shape = tuple[int, ...]

# Added by Clover to `model.layers.N.linear_attn.`; shapes in terms of channels C, taps and value heads.
ADDED_TENSORS = ("right_conv1d.weight", "block_temperature", "memory_bias", "memory_slope")
# Parts of the model that text needs none of, and scales of activations that were found once: engines scale them as they come.
IGNORED = re.compile(r"(^|\.)(mtp|visual)\.|\.input_scale$")
EXPERT = re.compile(r"^(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of the model, experts stacked, in the order of the layers."""
    c, H = config, config.hidden_size
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": (c.vocab_size, H)}
    for i, kind in enumerate(config.layer_types):
        at = f"model.layers.{i}."
        mixer = _attention(config) if kind == "full_attention" else _gated_delta_net(config)
        tensors |= {at + name: shape for name, shape in mixer.items()}
        width, shared = c.moe_intermediate_size, c.shared_expert_intermediate_size
        tensors |= {
            f"{at}mlp.gate.weight": (c.num_experts, H),
            f"{at}mlp.experts.gate_up_proj": (c.num_experts, 2 * width, H),
            f"{at}mlp.experts.down_proj": (c.num_experts, H, width),
            f"{at}mlp.shared_expert.gate_proj.weight": (shared, H),
            f"{at}mlp.shared_expert.up_proj.weight": (shared, H),
            f"{at}mlp.shared_expert.down_proj.weight": (H, shared),
            f"{at}mlp.shared_expert_gate.weight": (1, H),
            f"{at}input_layernorm.weight": (H,),
            f"{at}post_attention_layernorm.weight": (H,),
        }
    tensors["model.norm.weight"] = (H,)
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = (c.vocab_size, H)
    return tensors


def _attention(c: ModelConfig) -> dict[str, Shape]:
    H, D = c.hidden_size, c.head_dim
    return {
        "self_attn.q_proj.weight": (2 * c.num_attention_heads * D, H),
        "self_attn.k_proj.weight": (c.num_key_value_heads * D, H),
        "self_attn.v_proj.weight": (c.num_key_value_heads * D, H),
        "self_attn.o_proj.weight": (H, c.num_attention_heads * D),
        "self_attn.q_norm.weight": (D,),
        "self_attn.k_norm.weight": (D,),
    }


def _gated_delta_net(c: ModelConfig) -> dict[str, Shape]:
    H, heads = c.hidden_size, c.linear_num_value_heads
    return {
        "linear_attn.in_proj_qkv.weight": (c.conv_dim, H),
        "linear_attn.in_proj_z.weight": (c.value_dim, H),
        "linear_attn.in_proj_a.weight": (heads, H),
        "linear_attn.in_proj_b.weight": (heads, H),
        "linear_attn.out_proj.weight": (H, c.value_dim),
        "linear_attn.norm.weight": (c.linear_value_head_dim,),
        "linear_attn.conv1d.weight": (c.conv_dim, 1, c.linear_conv_kernel_dim),
        "linear_attn.right_conv1d.weight": (c.conv_dim, 1, c.linear_right_conv_kernel_dim),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.block_temperature": (heads,),
        "linear_attn.memory_bias": (heads,),
        "linear_attn.memory_slope": (heads,),
    }


def is_added(name: str) -> bool:
    """Whether `name` is one of Clover's added tensors."""
    return name.endswith(tuple(f".linear_attn.{added}" for added in ADDED_TENSORS))


def expert_parts(name: str, config: ModelConfig) -> dict[str, Shape]:
    """The per-expert tensors, as `save_pretrained` writes them, that make up the stacked tensor `name`."""
    bank, _, kind = name.rpartition(".")
    H, width = config.hidden_size, config.moe_intermediate_size
    parts = {"gate_proj": (width, H), "up_proj": (width, H)} if kind == "gate_up_proj" else {"down_proj": (H, width)}
    return {f"{bank}.{e}.{part}.weight": shape for e in range(config.num_experts) for part, shape in parts.items()}


def canonical(name: str) -> str | None:
    """Our form of a published tensor name, without the optional `language_model.`; None for one to be ignored."""
    if IGNORED.search(name):
        return None
    for prefix in ("model.language_model.", "language_model.model.", "language_model."):
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
    return name


def read_tensor_map(path: Path | None) -> dict[str, str]:
    """Read `{our name: checkpoint name}`; `N` in both stands for every layer number.

    Raises:
        CheckpointError: a key is not the name of an added tensor, or a value is not a string.
    """
    if path is None:
        return {}
    mapping = read_json(path)
    allowed = [f"model.layers.N.linear_attn.{name}" for name in ADDED_TENSORS]
    for ours, theirs in mapping.items():
        if ours not in allowed:
            raise CheckpointError(f"{path}: unknown tensor {ours!r}; expected one of {', '.join(allowed)}")
        if not isinstance(theirs, str) or ".N." not in theirs:
            raise CheckpointError(f"{path}: {ours}: expected a name with '.N.' for the layer number, found {theirs!r}")
    return {str(ours): str(theirs) for ours, theirs in mapping.items()}
