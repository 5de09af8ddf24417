"""The reference model with the weights of a checkpoint."""

from __future__ import annotations

import torch

from clover_trt.checkpoint.names import ADDED_TENSORS
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.model.block_step import REFERENCE_OPS, CloverModel
from clover_trt.model.head import vocabulary_mask
from clover_trt.model.ops import BlockOps

# Kept as stored, whatever the compute dtype: they set decay and block weights, and are small.
KEPT = ("A_log", "dt_bias", *ADDED_TENSORS[1:])


def empty_model(checkpoint: Checkpoint, ops: BlockOps = REFERENCE_OPS) -> CloverModel:
    """The model without weight data (on the meta device), for tracing or for `assign`ed weights."""
    with torch.device("meta"):
        model = CloverModel(checkpoint.config, checkpoint.valid_tokens, ops)
    model.vocab_mask = vocabulary_mask(checkpoint.config, checkpoint.valid_tokens)
    return model.eval().requires_grad_(False)


def compute_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a tensor has in a model that computes in `dtype`."""
    return torch.float32 if name.endswith(KEPT) else dtype


def load_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> CloverModel:
    """Read all weights of `checkpoint` into the reference model, computing in `dtype`.

    Raises:
        CheckpointError: a tensor cannot be read or is not finite.
    """
    model = empty_model(checkpoint)
    state = {name: tensor.to(compute_dtype(name, dtype)) for name, tensor in checkpoint.tensors()}
    if checkpoint.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)
