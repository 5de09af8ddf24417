"""The parts of an engine package for ONNX Runtime's CPU provider, float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch

from clover_trt.checkpoint.pack import Packed, pack
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.package import EXPERTS, GRAPH, GRAPH_DATA
from clover_trt.graph.bodies_onnxruntime import MICROSOFT, function_bodies
from clover_trt.graph.contract import expert_names
from clover_trt.graph.export import attach_functions, attach_metadata, attach_weights, save, trace

Progress = Callable[[str], None]


def write_engine(work: Path, checkpoint: Checkpoint, source: dict[str, str], progress: Progress) -> None:
    """Write the graph, its weights and the expert banks into the folder `work`.

    Raises:
        CheckpointError, EngineError: what is wrong.
    """
    progress("tracing the block step")
    model = prepared_graph(checkpoint, source)
    progress("writing weights")
    save(model, work / GRAPH, GRAPH_DATA)
    progress("packing experts")
    pack_experts(checkpoint, work / EXPERTS)


def prepared_graph(checkpoint: Checkpoint, source: dict[str, str]) -> ir.Model:
    """The traced block step with ONNX Runtime's function bodies and its weights, to be read when it is saved."""
    model = trace(checkpoint.config, checkpoint.valid_tokens)
    attach_weights(model, checkpoint)
    attach_functions(model, function_bodies(checkpoint.config), (MICROSOFT,))
    attach_metadata(model, checkpoint.config, source)
    return model


def pack_experts(checkpoint: Checkpoint, path: Path) -> None:
    """Write the expert banks in the layout of ONNX Runtime's MoE kernel: gate and up rows interleaved, float32."""
    banks: dict[str, Packed] = {}
    for layer in range(checkpoint.config.num_hidden_layers):
        for part, graph_name in zip(("gate_up", "down"), expert_names(layer), strict=True):
            name = f"model.layers.{layer}.mlp.experts.{part}_proj"
            banks[graph_name] = Packed("F32", checkpoint.expected[name], partial(_bank, checkpoint, name))
    pack(banks, path)


def _bank(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    ((_, tensor),) = checkpoint.tensors([name])
    return interleave(tensor.float()) if name.endswith("gate_up_proj") else tensor.float()


def interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """`[E, 2I, H]` from all gate rows before all up rows to g0, u0, g1, u1, …"""
    E, rows, H = gate_up.shape
    return gate_up.view(E, 2, rows // 2, H).transpose(1, 2).reshape(E, rows, H).contiguous()
