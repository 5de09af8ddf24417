"""Write a trained clover-tiny as a checkpoint folder, as a published one is laid out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from clover_trt.model.block_step import CloverModel
from tiny.tokenizer import save_tokenizer

ROOT = Path(__file__).parents[2]


def write_checkpoint(model: CloverModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Weights in bfloat16, configuration, tokenizer, chat template, generation defaults and licence files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    config = {**model.config.to_hf(), "dtype": str(torch.bfloat16).removeprefix("torch."), "eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"threshold": 0.95, "block_size": 32, "max_new_tokens": 256, "do_sample": False, "eos_token_id": ends}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder)
    for name in ("LICENSE", "ATTRIBUTIONS.md"):
        shutil.copyfile(ROOT / name, folder / name)
