"""The mid-size random model of `make bench`: large enough to time, small enough for any machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from clover_trt.checkpoint.names import expected_tensors, is_added
from clover_trt.checkpoint.reader import Checkpoint, checkpoint_folder
from clover_trt.config import ModelConfig
from clover_trt.engine.build import build
from clover_trt.engine.package import EnginePackage, open_package

VOCAB, MASK = 32_000, 31_999
LAYERS = 8


def midsize_config() -> ModelConfig:
    """Hidden 512, 8 layers, 64 experts of width 256, top-8, vocabulary 32,000."""
    return ModelConfig(
        model_type="clover_moe",
        vocab_size=VOCAB,
        hidden_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16_384,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        layer_types=tuple("full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)),
        block_size=32,
        mask_token_id=MASK,
        linear_right_conv_kernel_dim=3,
    )


def midsize_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 tensors under our names."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in expected_tensors(midsize_config()).items():
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        state[name] = torch.randn(shape, generator=generator) * scale
        if name.endswith("linear_attn.norm.weight"):
            state[name] += 1.0
    return state


def build_midsize(
    folder: Path, progress: Callable[[str], None], *, max_seq_len: int | None = None, with_tokenizer: bool = False
) -> EnginePackage:
    """Write the checkpoint into `folder/checkpoint` and build the CPU engine `folder/engine`.

    Args:
        folder: an empty one.
        progress: called with a line at the start of each stage.
        max_seq_len: of the engine.
        with_tokenizer: whether the engine has clover-tiny's tokenizer, as a server needs; other ids are banned then.
    """
    write_midsize(folder / "checkpoint", midsize_state())
    if with_tokenizer:
        shutil.copy(checkpoint_folder("clover-tiny") / "tokenizer.json", folder / "checkpoint")
    build(Checkpoint(folder / "checkpoint"), folder / "engine", max_seq_len=max_seq_len, progress=progress)
    return open_package(folder / "engine")


def write_midsize(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Write the checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(midsize_config().to_hf()))
    (folder / "generation_config.json").write_text(json.dumps({"block_size": 32}))


def transformers_model(state: dict[str, torch.Tensor]) -> Any:
    """The same backbone weights in transformers' own model, eager attention and experts."""
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = Qwen3_5MoeTextConfig(
        **{k: v for k, v in midsize_config().to_hf().items() if k not in ("architectures", "model_type")}
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.device("meta"):
        model = Qwen3_5MoeForCausalLM(config)
    model.load_state_dict({name: tensor for name, tensor in state.items() if not is_added(name)}, assign=True)
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary
    return model.eval()
