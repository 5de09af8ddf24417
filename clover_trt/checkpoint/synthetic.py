"""Checkpoints of true size and no meaning: sparse files, so that one of 69 GB takes next to no disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from clover_trt.checkpoint.names import expected_tensors, expert_parts
from clover_trt.checkpoint.pack import tensor_bytes
from clover_trt.checkpoint.reader import INDEX
from clover_trt.checkpoint.safetensors_file import file_head
from clover_trt.config import ModelConfig
from clover_trt.errors import CheckpointError

LAYERS = 40
# Geometry of Clover-35B-A3B-Preview as far as it is public: that of Qwen3.5-MoE 35B-A3B, with Clover's block fields.
CLOVER_35B = ModelConfig(
    model_type="clover_moe",
    vocab_size=248_320,
    hidden_size=2048,
    num_hidden_layers=LAYERS,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=256,
    rope_theta=10_000_000.0,
    partial_rotary_factor=0.25,
    max_position_embeddings=131_072,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    num_experts=256,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    layer_types=tuple("full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)),
    block_size=32,
    mask_token_id=248_319,
    linear_right_conv_kernel_dim=3,
)
SHARD_BYTES = 4 << 30
FILLED_BYTES = 64 << 10  # of each tensor: random numbers; the rest is a hole that reads as zeros


def write_synthetic(folder: Path, config: ModelConfig = CLOVER_35B, *, shard_bytes: int = SHARD_BYTES, seed: int = 0) -> None:
    """Write a bfloat16 checkpoint in shards, experts one by one as `save_pretrained` does.

    Raises:
        CheckpointError: the folder exists.
    """
    if folder.exists():
        raise CheckpointError(f"{folder}: exists; choose another folder or remove it")
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    shards = _shards(config, shard_bytes)
    for i, tensors in enumerate(shards, start=1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write_sparse(folder / name, tensors, generator)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"block_size": config.block_size}))


def _shards(config: ModelConfig, shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in expected_tensors(config).items():
        parts = expert_parts(name, config) if ".mlp.experts." in name else {name: shape}
        for part, size in parts.items():
            nbytes = 2 * torch.Size(size).numel()
            if filled + nbytes > shard_bytes and shards[-1]:
                shards.append({})
                filled = 0
            shards[-1][part] = size
            filled += nbytes
    return shards


def _write_sparse(path: Path, tensors: dict[str, tuple[int, ...]], generator: torch.Generator) -> None:
    head = file_head({name: ("BF16", shape) for name, shape in tensors.items()})
    with path.open("wb") as file:
        file.write(head)
        at = len(head)
        for shape in tensors.values():
            count = torch.Size(shape).numel()
            numbers = torch.randn(min(count, FILLED_BYTES // 2), generator=generator) * shape[-1] ** -0.5
            file.seek(at)
            file.write(tensor_bytes(numbers.to(torch.bfloat16)))
            at += 2 * count
        file.truncate(at)
