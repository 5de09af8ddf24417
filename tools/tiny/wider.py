"""clover-tiny with wider experts, for kernels that take widths in multiples of 16 or 128 only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import read_json


def write_wider(folder: Path, multiple: int) -> Path:
    """Write clover-tiny with its experts' inner channels padded with zeros to a multiple of `multiple`; it computes the same.

    Returns:
        the new folder.
    """
    source = Checkpoint("clover-tiny")
    more = -source.config.moe_intermediate_size % multiple
    tensors = dict(source.tensors())
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            tensors[name] = torch.cat([F.pad(half, (0, 0, 0, more)) for half in tensor.chunk(2, dim=1)], dim=1)
        elif name.endswith("experts.down_proj"):
            tensors[name] = F.pad(tensor, (0, more))
    shutil.copytree(source.folder, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    config = read_json(folder / "config.json")
    config["moe_intermediate_size"] += more
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
