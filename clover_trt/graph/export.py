"""Trace the block step into one ONNX graph with `clover::` nodes; weights stay where they are until saved."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import ModelConfig
from clover_trt.errors import EngineError
from clover_trt.graph.contract import (
    CONTROL_INPUTS,
    DOMAIN,
    OPS,
    OPSET,
    STEP_INPUTS,
    STEP_OUTPUTS,
    VERSION,
    advanced_name,
    cache_names,
    expert_names,
    hidden_name,
)
from clover_trt.graph.symbolic import symbolic_ops
from clover_trt.model.attention import AttentionCache
from clover_trt.model.block_step import CloverModel, LayerCache, new_caches
from clover_trt.model.gdn import GdnCache
from clover_trt.model.head import Controls, vocabulary_mask
from clover_trt.model.lengths import Lengths

TORCH_DTYPE = {ir.DataType.FLOAT: torch.float32, ir.DataType.BFLOAT16: torch.bfloat16}
SHARD_BYTES = 2 << 30
FLOAT_WEIGHTS = ("A_log", "dt_bias", "block_temperature", "memory_bias", "memory_slope")  # a few numbers a layer


class _StepGraph(nn.Module):
    """The model with flat inputs and outputs."""

    def __init__(self, model: CloverModel) -> None:
        super().__init__()
        self.clover = model

    def forward(
        self, step: tuple[Tensor, ...], controls: tuple[Tensor, ...], caches: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        input_ids, prefix, commit, noisy, logit_index, mass, candidates = step
        kinds = self.clover.config.layer_types
        state: list[LayerCache] = [
            AttentionCache(*pair) if kind == "full_attention" else GdnCache(*pair)
            for kind, pair in zip(kinds, caches, strict=True)
        ]
        lengths = Lengths(prefix, commit, noisy)
        out = self.clover(input_ids, lengths, logit_index, mass, Controls._make(controls), state, candidates)
        advanced = (tensor for pair in out.caches for tensor in pair)
        return (*out.head, out.distinct_experts, *advanced, *out.hidden)


def _example(config: ModelConfig, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Controls, list[LayerCache]]:
    """Example inputs; each dynamic axis has a size of its own."""
    B, T, L, R, A = 2, 7, 3, 5, 6
    ids = torch.zeros(B, T, dtype=torch.int64)
    lengths = [torch.zeros(B, dtype=torch.int32) for _ in range(3)]
    step = (ids, *lengths, torch.zeros(B, L, dtype=torch.int64), torch.ones(B), torch.ones(1, dtype=torch.int64))
    history = (torch.zeros(B, R, dtype=torch.int64), torch.zeros(B, R))
    penalties = (torch.zeros(B), torch.zeros(B), torch.zeros(B))
    controls = Controls._make((*history, *penalties, torch.zeros(B, A, dtype=torch.int64), torch.zeros(B, L, A)))
    return step, controls, new_caches(config, B, 11, dtype)


def _dynamic_shapes(config: ModelConfig) -> tuple[object, ...]:
    dim = torch.export.Dim
    batch, tokens, positions, length = dim("batch"), dim("tokens"), dim("positions"), dim("max_len")
    history, biases = dim("history"), dim("biases")
    row = {0: batch}
    step = ({0: batch, 1: tokens}, row, row, row, {0: batch, 1: positions}, row, None)
    seen = {0: batch, 1: history}
    controls = (seen, seen, row, row, row, {0: batch, 1: biases}, {0: batch, 1: positions, 2: biases})
    attention = ({0: batch, 2: length}, {0: batch, 2: length})
    return step, controls, [attention if kind == "full_attention" else (row, row) for kind in config.layer_types]


def trace(config: ModelConfig, valid_tokens: int, dtype: torch.dtype = torch.float32) -> ir.Model:
    """Trace the block step. No weight is allocated: initializers have names, shapes and dtypes only.

    Args:
        config: geometry.
        valid_tokens: vocabulary rows that can be candidates.
        dtype: of activations, weights, KV cache and convolution state. The recurrent state, the scan's gate and
            softmax parameters (`FLOAT_WEIGHTS`), logit controls and log-probabilities are float32 in any case.

    Returns:
        the ONNX model: inputs of `STEP_INPUTS`, `CONTROL_INPUTS`, the caches and the expert banks; outputs of
        `STEP_OUTPUTS` and the advanced caches. Values `hidden.0` … `hidden.layers` are named, not outputs.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = CloverModel(config, valid_tokens, symbolic_ops(config)).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if not name.endswith(FLOAT_WEIGHTS):
                parameter.data = parameter.data.to(dtype)
        step, controls, caches = _example(config, dtype)
        names = cache_names(config)
        flat = [name for pair in names for name in pair]
        hidden = [hidden_name(i) for i in range(config.num_hidden_layers + 1)]
        noise = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(noise), _quiet("torch.onnx", "onnxscript", "onnx_ir"):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                _StepGraph(model),
                (step, tuple(controls), [tuple(cache) for cache in caches]),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=_dynamic_shapes(config),
                input_names=[*STEP_INPUTS, *CONTROL_INPUTS, *flat],
                output_names=[*STEP_OUTPUTS, *(advanced_name(name) for name in flat), *hidden],
                optimize=False,
            )
            assert program is not None
            traced = program.model
            for value in traced.graph.initializers.values():
                if isinstance(getattr(value.const_value, "raw", None), Tensor):
                    value.const_value = None  # of no weight is there any data yet
            onnxscript.optimizer.optimize_ir(traced)
    _finish(traced, config)
    return traced


@contextlib.contextmanager
def _quiet(*names: str):  # type: ignore[no-untyped-def]
    """Keep the exporter's progress lines off the terminal."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _finish(model: ir.Model, config: ModelConfig) -> None:
    """Experts become inputs, hidden states stop being outputs, the candidate axis becomes symbolic."""
    graph = model.graph
    emitted = model.opset_imports.get("", 0)
    if emitted != OPSET:
        raise EngineError(f"the exporter wrote opset {emitted}, expected {OPSET}; use the pinned onnx and torch versions")
    kept = [value for value in graph.outputs if not (value.name or "").startswith("hidden.")]
    graph.outputs[:] = kept
    for value in graph.outputs[:2]:
        assert value.shape is not None
        value.shape = ir.Shape([*value.shape[:2], "candidates"])
    for layer in range(config.num_hidden_layers):
        prefix = f"clover.model.layers.{layer}.mlp.experts"
        for suffix, name in zip(("gate_up_proj", "down_proj"), expert_names(layer), strict=True):
            value = graph.initializers.pop(f"{prefix}.{suffix}")
            value.name, value.const_value = name, None
            graph.inputs.append(value)
    model.opset_imports[DOMAIN] = VERSION
    used = {node.op_type for node in graph if node.domain == DOMAIN}
    assert used == set(OPS), used


def attach_functions(model: ir.Model, bodies: Sequence[onnx.FunctionProto], domains: Sequence[str] = ()) -> None:
    """Give the `clover::` nodes a backend's bodies, which use operators of `domains` besides the standard ones."""
    for body in bodies:
        function = ir.serde.deserialize_function(body)
        model.functions[function.identifier()] = function
    model.opset_imports.update(dict.fromkeys(domains, 1))


def attach_metadata(model: ir.Model, config: ModelConfig, source: dict[str, str]) -> None:
    """Name the graph and say where it comes from."""
    model.graph.name = "clover_block_step"
    model.metadata_props.update(
        {"clover.contract_version": str(VERSION), "clover.source": json.dumps(source), "clover.block_rule": config.block_rule}
    )


def save(model: ir.Model, path: Path, data: str) -> None:
    """Write the graph, its weights beside it in the file `data` (several, numbered, of at most 2 GB each, when they are
    more), and run ONNX's checker over the result.

    Raises:
        EngineError: the graph is not valid ONNX.
    """
    ir.save(model, path, external_data=data, max_shard_size_bytes=SHARD_BYTES)
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise EngineError(f"the traced graph is not valid ONNX: {error}") from None


def attach_weights(model: ir.Model, checkpoint: Checkpoint) -> None:
    """Point every initializer at the checkpoint, read when the model is saved and converted to the type it was traced
    in; transposes of weights are done on the data.

    Raises:
        EngineError: an initializer has no tensor in the checkpoint.
    """
    _fold_transposes(model)
    for name, value in model.graph.initializers.items():
        source, turned = weight_source(value, checkpoint)
        if value.const_value is not None:
            continue
        if source == "vocab_mask":
            mask = vocabulary_mask(checkpoint.config, checkpoint.valid_tokens)
            value.const_value = ir.tensor(mask.numpy(), name=name)
        elif source in checkpoint.expected:
            read = partial(read_weight, checkpoint, source, turned, TORCH_DTYPE[dtype_of(value)])
            value.const_value = lazy_tensor(name, dtype_of(value), shape_of(value), read)
        else:
            raise EngineError(f"the traced graph has a weight {name!r} that no tensor of the checkpoint fills")


def weight_source(value: ir.Value, checkpoint: Checkpoint) -> tuple[str, bool]:
    """The checkpoint's name of an initializer, and whether it is stored transposed."""
    source = value.metadata_props.get("source", value.name or "").removeprefix("clover.")
    if source == "lm_head.weight" and checkpoint.config.tie_word_embeddings:
        source = "model.embed_tokens.weight"
    return source, "transposed" in value.metadata_props


def read_weight(checkpoint: Checkpoint, source: str, turned: bool, dtype: torch.dtype) -> Tensor:
    """One weight, checked to be finite, in the type and orientation that the graph wants."""
    ((_, tensor),) = checkpoint.tensors([source])
    tensor = tensor.to(dtype)
    return (tensor.T if turned else tensor).contiguous()


def lazy_tensor(name: str, dtype: ir.DataType, shape: Sequence[int], read: Callable[[], Tensor]) -> ir.LazyTensor:
    """A weight that is read when the model is saved."""
    return ir.LazyTensor(lambda: ir.tensor(read(), name=name), dtype=dtype, shape=ir.Shape(shape), name=name)


def dtype_of(value: ir.Value) -> ir.DataType:
    """Element type of a value that has one."""
    assert value.dtype is not None, value.name
    return value.dtype


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Shape of a value without dynamic axes."""
    assert value.shape is not None, value.name
    return tuple(int(n) for n in value.shape)  # type: ignore[arg-type]


def _fold_transposes(model: ir.Model) -> None:
    """Replace `Transpose(weight)` by a weight that is stored transposed."""
    graph = model.graph
    for node in list(graph):
        if node.op_type != "Transpose" or node.domain != "":
            continue
        value, turned = node.inputs[0], node.outputs[0]
        if value is None or value.name is None or value.name not in graph.initializers:
            continue
        if value.shape is None or len(value.shape) != 2:
            continue
        name = f"{value.name}.T"
        fresh = ir.Value(name=name, type=value.type, shape=ir.Shape(list(value.shape)[::-1]))
        fresh.metadata_props.update({"source": value.name, "transposed": "1"})
        graph.initializers[name] = fresh
        ir.convenience.replace_all_uses_with(turned, fresh)
        graph.remove(node, safe=True)
        if not value.uses():
            del graph.initializers[value.name]
