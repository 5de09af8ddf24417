"""Facts of a checkpoint, from its json files and headers alone."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import ModelConfig

GEOMETRY = (
    "model_type", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "max_position_embeddings", "block_size", "mask_token_id", "block_rule",
)  # fmt: skip


def part_of(name: str) -> str:
    """The part of the model that a tensor belongs to."""
    for marker, part in (
        (".experts.", "experts"),
        (".shared_expert", "shared expert"),
        (".mlp.gate.", "router"),
        (".linear_attn.", "gated delta net"),
        (".self_attn.", "attention"),
        ("embed_tokens", "embedding"),
        ("lm_head", "language-model head"),
    ):
        if marker in name:
            return part
    return "norms"


def geometry(config: ModelConfig) -> dict[str, Any]:
    """The model's sizes, by their published names."""
    facts = {name: getattr(config, name) for name in GEOMETRY}
    kinds = Counter(config.layer_types)
    return {**facts, "layers": f"{kinds['linear_attention']} linear_attention, {kinds['full_attention']} full_attention"}


def describe_checkpoint(folder: str | Path, tensor_map: Path | None = None) -> dict[str, Any]:
    """Geometry, parameters and bytes by part, dtypes and files of a checkpoint.

    Raises:
        CheckpointError, ConfigError: the checkpoint is not usable.
    """
    checkpoint = Checkpoint(folder, tensor_map)
    parameters: Counter[str] = Counter()
    stored_bytes: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for name, info in checkpoint.stored.items():
        parameters[part_of(name)] += math.prod(info.shape)
        stored_bytes[part_of(name)] += info.nbytes
        dtypes[info.dtype] += 1
    return {
        "checkpoint": {
            "folder": str(checkpoint.folder),
            "files": len({info.path for info in checkpoint.stored.values()}),
            "tensors": ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items()),
            "block_tensors": "none: a plain Qwen3.5-MoE checkpoint" if checkpoint.neutral else "present",
            "parameters": parameters.total(),
            "bytes": stored_bytes.total(),
        },
        "geometry": geometry(checkpoint.config),
        "parameters by part": dict(parameters.most_common()),
        "bytes by part": dict(stored_bytes.most_common()),
    }
