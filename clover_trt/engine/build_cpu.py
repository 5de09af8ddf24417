"""Build an engine package for ONNX Runtime's CPU provider, float32."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from safetensors.numpy import save_file as save_numpy

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import BuildConfig, ModelConfig
from clover_trt.engine.package import EXPERTS, GRAPH, GRAPH_DATA, carry_files, package_writer, write_metadata
from clover_trt.errors import EngineError
from clover_trt.graph.bodies_onnxruntime import function_bodies
from clover_trt.graph.contract import VERSION, expert_names
from clover_trt.graph.export import attach_weights, trace

Progress = Callable[[str], None]
TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "safetensors")


def build_cpu(checkpoint: Checkpoint, out: Path, *, max_seq_len: int | None = None, progress: Progress = lambda _: None) -> None:
    """Build the package at `out`; on any failure nothing is left there.

    Args:
        checkpoint: source of weights and configuration.
        out: folder of the package; an existing package is replaced at the end.
        max_seq_len: longest prompt and response together; the model's own limit when None.
        progress: called with a line at the start of each stage.

    Raises:
        CheckpointError, EngineError, ConfigError: what is wrong and what to do.
    """
    config = checkpoint.config
    limit = config.max_position_embeddings
    if max_seq_len is not None and not 0 < max_seq_len <= limit:
        raise EngineError(f"max_seq_len = {max_seq_len} is out of range: the model takes 1 to {limit} tokens")
    build = BuildConfig(max_seq_len=max_seq_len or limit, block_size=config.block_size)
    with package_writer(out) as work:
        progress("reading the checkpoint")
        source = {"name": checkpoint.folder.name, "fingerprint": checkpoint.fingerprint()}
        progress("tracing the block step")
        model = traced_graph(config, checkpoint.valid_tokens, source)
        progress("writing weights")
        attach_weights(model, checkpoint)
        ir.save(model, work / GRAPH, external_data=GRAPH_DATA)
        progress("packing experts")
        pack_experts(checkpoint, work / EXPERTS)
        progress("checking the graph")
        check_graph(work / GRAPH)
        carry_files(checkpoint.folder, work)
        tools = {name: importlib.metadata.version(name) for name in TOOLS}
        progress("hashing files")
        write_metadata(work, model=config, build=build, valid_tokens=checkpoint.valid_tokens, source=source, tools=tools)


def traced_graph(config: ModelConfig, valid_tokens: int, source: dict[str, str]) -> ir.Model:
    """The traced block step with ONNX Runtime's function bodies and a metadata block."""
    model = trace(config, valid_tokens)
    for body in function_bodies(config):
        function = ir.serde.deserialize_function(body)
        model.functions[function.identifier()] = function
    model.opset_imports["com.microsoft"] = 1
    model.graph.name = "clover_block_step"
    model.metadata_props.update(
        {"clover.contract_version": str(VERSION), "clover.source": json.dumps(source), "clover.block_rule": config.block_rule}
    )
    return model


def pack_experts(checkpoint: Checkpoint, path: Path) -> None:
    """Write the expert banks in the layout of ONNX Runtime's MoE kernel: gate and up rows interleaved, float32."""
    tensors = {}
    for layer in range(checkpoint.config.num_hidden_layers):
        bank = f"model.layers.{layer}.mlp.experts"
        (_, gate_up), (_, down) = checkpoint.tensors([f"{bank}.gate_up_proj", f"{bank}.down_proj"])
        first, second = expert_names(layer)
        tensors[first] = interleave(gate_up.float()).numpy()
        tensors[second] = down.float().contiguous().numpy()
    save_numpy(tensors, path)


def interleave(gate_up: torch.Tensor) -> torch.Tensor:
    """`[E, 2I, H]` from all gate rows before all up rows to g0, u0, g1, u1, …"""
    E, rows, H = gate_up.shape
    return gate_up.view(E, 2, rows // 2, H).transpose(1, 2).reshape(E, rows, H).contiguous()


def check_graph(path: Path) -> None:
    """Run ONNX's checker over the saved graph.

    Raises:
        EngineError: the graph is not valid ONNX.
    """
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise EngineError(f"the traced graph is not valid ONNX: {error}") from None
