"""A small random model and its checkpoint, used all over the tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from clover_trt.checkpoint.names import expected_tensors
from clover_trt.config import ModelConfig

SMALL = ModelConfig(
    model_type="clover_moe",
    vocab_size=128,
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    partial_rotary_factor=0.5,
    rope_theta=50_000.0,
    max_position_embeddings=512,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=32,
    layer_types=("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    block_size=16,
    mask_token_id=120,
    linear_right_conv_kernel_dim=3,
)


def random_state(config: ModelConfig = SMALL, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under our names, of a size that lets every part of the model matter."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in expected_tensors(config).items():
        fan_in = shape[-1] if len(shape) > 1 else 1
        tensor = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", "layernorm.weight", "_bias", "_slope", "temperature", "A_log")):
            tensor = 0.3 * tensor + (1.0 if name.endswith(("linear_attn.norm.weight", "temperature")) else 0.0)
        elif name.endswith("mlp.gate.weight"):
            tensor = tensor * 2 * fan_in**-0.5
        elif len(shape) > 1 and "embed" not in name:
            tensor = 0.6 * tensor * fan_in**-0.5
        state[name] = tensor
    return state


def write_checkpoint(folder: Path, state: dict[str, Tensor], config: ModelConfig = SMALL, **extra: object) -> Path:
    """A checkpoint folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config.to_hf(), **extra}))
    (folder / "generation_config.json").write_text(json.dumps({"block_size": config.block_size, "eos_token_id": [5]}))
    (folder / "LICENSE").write_text("a licence")
    return folder


class AbsentTensorRT:
    """TensorRT, as far as a build asks it before it writes a plan."""

    backend, version, builds_anywhere = "tensorrt", "10.14.1", False

    def check_target(self, wanted: str | None) -> None:
        """Whatever GPU is asked for is here."""
        assert wanted in ("9.0", "10.3")
