"""The parts of an engine package for TensorRT and TensorRT-RTX: the graph, bound weights, and the plan.

rank0.engine                        the plan
rank0_managed_weights.safetensors   expert banks and other large weights, bound when the engine is loaded
libclover_plugins.so                the plugin library, when the graph keeps operations for it
step.onnx, step.data                the graph, in an unfinished package only
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx.inliner import inline_local_functions

from clover_trt.checkpoint.pack import Packed, pack
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import BuildConfig, OptimizationProfile
from clover_trt.engine.package import BOUND, GRAPH, GRAPH_DATA, PLAN, sha256_of
from clover_trt.engine.plugins import LIBRARY
from clover_trt.engine.trt_library import TrtLibrary, load_timings, save_timings, timing_cache_file
from clover_trt.errors import EngineError
from clover_trt.graph.bodies_tensorrt import function_bodies
from clover_trt.graph.contract import PLUGINS
from clover_trt.graph.export import attach_functions, attach_metadata, attach_weights, save, trace
from clover_trt.graph.tensorrt import (
    bind_large_weights,
    call_plugins,
    check_operators,
    drop_logits,
    fix_cache_length,
    quantize_graph,
)

Progress = Callable[[str], None]
INLINED = "inlined.onnx"


def write_graph(work: Path, checkpoint: Checkpoint, settings: BuildConfig, source: dict[str, str], progress: Progress) -> None:
    """Write the graph, its constants and the bound weights into the folder `work`.

    Raises:
        CheckpointError, EngineError: what is wrong.
    """
    progress("tracing the block step")
    model, bound = prepared_graph(checkpoint, settings, source)
    progress("writing weights")
    save(model, work / GRAPH, GRAPH_DATA)
    check_operators(onnx.load(str(work / GRAPH), load_external_data=False), plugins=settings.operations == "plugins")
    progress("packing experts")
    pack(bound, work / BOUND)


def prepared_graph(checkpoint: Checkpoint, settings: BuildConfig, source: dict[str, str]) -> tuple[ir.Model, dict[str, Packed]]:
    """The graph with its constants attached, to be read when it is saved, and the weights that are bound later."""
    model = trace(checkpoint.config, checkpoint.valid_tokens, torch.bfloat16)
    assert settings.cache_len is not None
    fix_cache_length(model, settings.cache_len)
    drop_logits(model)
    if settings.precision in ("fp8", "nvfp4"):
        quantize_graph(model, checkpoint, settings.precision)
    bound = bind_large_weights(model, checkpoint)
    attach_weights(model, checkpoint)
    bodies = function_bodies(checkpoint.config, onnx.TensorProto.BFLOAT16, quantized=settings.precision == "fp8")
    if settings.operations == "plugins":
        call_plugins(model)
        bodies = [body for body in bodies if body.name not in PLUGINS]
    attach_functions(model, bodies)
    attach_metadata(model, checkpoint.config, source)
    return model, bound


def write_plan(
    work: Path,
    settings: BuildConfig,
    library: TrtLibrary,
    progress: Progress,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Compile the graph in `work` into a plan and remove the graph.

    Returns:
        the library's version, and the plan's identity: a hash over graph, constants and settings (plans of one identity
        compute the same, though not byte by byte).

    Raises:
        EngineError: with the library's own messages.
    """
    progress("building the plan")
    inlined = inline_local_functions(onnx.load(str(work / GRAPH), load_external_data=False))
    onnx.save(inlined, str(work / INLINED))
    problems: list[str] = []
    trt = library.trt
    if settings.operations == "plugins":
        library.load_plugins(work / LIBRARY)
    builder, logger = library.new_builder(problems, log)
    network = library.new_network(builder)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(work / INLINED)):
        found = [parser.get_error(i).desc() for i in range(parser.num_errors)]
        raise EngineError(f"{library.backend} {library.version} refuses the graph: {_shortened(found or problems)}")
    network.name = inlined.graph.name
    check_tensors(network, inlined, trt)
    assert settings.compute_capability is not None
    config, _monitor = library.new_config(builder, settings.compute_capability, settings.workspace_mb, progress)
    if settings.operations == "plugins":
        library.let_plugins_write_inputs(config)
    for each in settings.optimization_profiles:
        add_profile(builder, config, network, inlined, each)
    timings = None if library.builds_anywhere else timing_cache_file(library, settings.compute_capability)
    if timings is not None:
        load_timings(config, timings)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError(f"{library.backend} {library.version} cannot build the plan: {_shortened(problems)}")
    if timings is not None:
        save_timings(config, timings)
    (work / PLAN).write_bytes(plan)
    identity = hashlib.sha256(settings.model_dump_json().encode())
    (work / INLINED).unlink()
    for path in sorted(work.glob("step*")):  # the graph and its data
        identity.update(bytes.fromhex(sha256_of(path)))
        path.unlink()
    return {library.backend: library.version, "plan_identity": identity.hexdigest()}


def _shortened(messages: list[str]) -> str:
    kept = list(dict.fromkeys(" ".join(message.split()) for message in messages))[:3]
    return "; ".join(message[:400] for message in kept) or "no reason given"


def axes(value: onnx.ValueInfoProto) -> list[str | int]:
    """The dimensions of a graph input or output: a name where dynamic."""
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def check_tensors(network: Any, model: onnx.ModelProto, trt: Any) -> None:
    """Make sure that the network has the graph's inputs and outputs, by name, type and shape.

    Raises:
        EngineError: names what differs.
    """
    kinds = {
        onnx.TensorProto.FLOAT: trt.float32,
        onnx.TensorProto.BFLOAT16: trt.bfloat16,
        onnx.TensorProto.FLOAT8E4M3FN: trt.fp8,
        onnx.TensorProto.INT8: trt.int8,
        onnx.TensorProto.INT32: trt.int32,
        onnx.TensorProto.INT64: trt.int64,
    }
    found = [network.get_input(i) for i in range(network.num_inputs)] + [
        network.get_output(i) for i in range(network.num_outputs)
    ]
    expected = [*model.graph.input, *model.graph.output]
    if [tensor.name for tensor in found] != [value.name for value in expected]:
        raise EngineError(f"the network's tensors are {[t.name for t in found]}, expected {[v.name for v in expected]}")
    for tensor, value in zip(found, expected, strict=True):
        shape = [-1 if isinstance(size, str) else size for size in axes(value)]
        kind = kinds[value.type.tensor_type.elem_type]
        if tensor.dtype != kind or (list(tensor.shape) != shape and value in model.graph.input):
            raise EngineError(f"{tensor.name}: expected {kind} {shape}, the network has {tensor.dtype} {list(tensor.shape)}")


def add_profile(builder: Any, config: Any, network: Any, model: onnx.ModelProto, profile: OptimizationProfile) -> None:
    """Add one optimization profile: a range for every input with dynamic axes."""
    made = builder.create_optimization_profile()
    for i, value in enumerate(model.graph.input):
        sizes = axes(value)
        if network.get_input(i).is_shape_tensor:
            made.set_shape_input(value.name, *([size] for size in profile.axes["candidates"]))
        elif any(isinstance(size, str) for size in sizes):
            made.set_shape(
                value.name,
                *(tuple(profile.axes[size][k] if isinstance(size, str) else size for size in sizes) for k in range(3)),
            )
    if config.add_optimization_profile(made) < 0:
        raise EngineError(f"optimization profile {profile.name} is not valid: {json.dumps(profile.axes)}")
