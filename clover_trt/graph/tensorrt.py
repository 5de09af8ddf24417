"""What TensorRT needs of the traced graph: a fixed cache length, candidates only, large weights as inputs, quantized weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import onnx
import onnx_ir as ir
import torch
from torch import Tensor

from clover_trt.checkpoint import fp8, nvfp4
from clover_trt.checkpoint.pack import Packed
from clover_trt.checkpoint.quantize import Format
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.errors import EngineError
from clover_trt.graph.contract import DOMAIN, OPS, PLUGINS
from clover_trt.graph.export import TORCH_DTYPE, dtype_of, lazy_tensor, read_weight, shape_of, weight_source

BOUND_BYTES = 64 << 20  # a weight of this size or more is bound when the engine is loaded, not baked into the plan
SAFETENSORS_DTYPE = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.FLOAT8E4M3FN: "F8_E4M3",
    ir.DataType.INT8: "I8",
}
# Operators that TensorRT's ONNX parser takes, as far as this project's graphs use them.
ACCEPTED = frozenset(
    (
        "Add And Attention Cast Concat Constant ConstantOfShape Cos CumSum DequantizeLinear Div Equal Exp Expand Gather "
        "GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual Log LogSoftmax Loop MatMul Max Min Mul Neg Not "
        "Or Pad Pow RMSNormalization Range Reciprocal ReduceMax ReduceMean ReduceSum ReduceSumSquare "
        "Reshape RotaryEmbedding Scan ScatterElements Shape Sigmoid Sin Slice Softmax Softplus Split Sqrt Squeeze Sub "
        "TensorScatter TopK Transpose Trilu Unsqueeze Where Xor "
    ).split()
)
ACCEPTED_TYPES = frozenset(
    onnx.TensorProto.DataType.Value(name)
    for name in ("FLOAT", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "INT32", "INT64", "BOOL", "UINT8", "INT8", "INT4", "FLOAT4E2M1")
)


def fix_cache_length(model: ir.Model, length: int) -> None:
    """Give key and value caches a fixed number of rows: TensorRT updates a cache in place only then."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if (value.name or "").startswith(("key_cache", "value_cache")):
            assert value.shape is not None
            value.shape = ir.Shape([*value.shape[:2], length, *value.shape[3:]])


def drop_logits(model: ir.Model) -> None:
    """Return candidates only: an output of a plan is always computed and stored, and logits are large."""
    kept = [value for value in model.graph.outputs if value.name != "logits"]
    model.graph.outputs[:] = kept


def call_plugins(model: ir.Model) -> None:
    """Make the nodes that plugins compute what TensorRT's parser looks for.

    It finds a plugin by the node's type and these attributes; the number of candidates is a shape input, since the size of the
    outputs depends on its value; the head returns no logits.
    """
    for node in model.graph:
        if node.domain != DOMAIN or node.op_type not in PLUGINS:
            continue
        added = [ir.AttrString("plugin_namespace", DOMAIN), ir.AttrString("plugin_version", "1")]
        if node.op_type == "ConfidenceHead":
            count = OPS[node.op_type].inputs.index("num_candidates")
            added += [ir.AttrInt64s("tensorrt_plugin_shape_input_indices", [count]), ir.AttrInt64("emit_logits", 0)]
            node.resize_outputs(2)
        for attribute in added:
            node.attributes[attribute.name] = attribute


def quantize_graph(model: ir.Model, checkpoint: Checkpoint, experts: Format) -> None:
    """Replace weights that a quantized checkpoint has in FP8 by FP8 weights, experts in the format named.

    Expert banks become e4m3 or int8 inputs with inputs for their scales, which their node takes after those of the contract.
    Other matrices become e4m3 constants behind a DequantizeLinear over blocks of 128 along the summed axis; one whose summed
    axis is no multiple of 128 stays in bfloat16 with the values of its FP8 form.
    """
    graph = model.graph
    for node in [node for node in graph if node.domain == DOMAIN and node.op_type == "ExpertSubsetMoe"]:
        both = [_quantize_bank(bank, checkpoint, experts) for bank in (node.inputs[2], node.inputs[3]) if bank is not None]
        scales = [scale for pair in zip(*both, strict=True) for scale in pair]
        graph.inputs.extend(scales)
        first = len(node.inputs)
        node.resize_inputs(first + len(scales))
        for i, scale in enumerate(scales):
            node.replace_input_with(first + i, scale)
    for value in list(graph.initializers.values()):
        source, turned = weight_source(value, checkpoint)
        if fp8.is_quantized(source):
            if shape_of(value)[0 if turned else 1] % fp8.BLOCK == 0:
                _dequantize_in_graph(graph, value, checkpoint, source, turned)
            else:
                read = partial(_as_quantized, checkpoint, source, turned)
                value.const_value = lazy_tensor(value.name or "", dtype_of(value), shape_of(value), read)


def _quantize_bank(bank: ir.Value, checkpoint: Checkpoint, experts: Format) -> list[ir.Value]:
    """Give the input of an expert bank its quantized type and shape; the values for its scales."""
    name, (E, rows, columns) = bank.name or "", shape_of(bank)
    if experts == "fp8":
        bank.dtype = ir.DataType.FLOAT8E4M3FN
        scales = {"_scale": (ir.DataType.BFLOAT16, fp8.bank_scale_shape(_bank_source(name), checkpoint.config))}
    else:
        bank.dtype, bank.shape = ir.DataType.INT8, ir.Shape((E, rows, columns // 2))
        scales = {
            "_scale": (ir.DataType.FLOAT8E4M3FN, (E, rows, columns // nvfp4.GROUP)),
            "_scale_2": (ir.DataType.FLOAT, (E, 2 if name.endswith("gate_up") else 1)),
        }
    return [ir.Value(name=name + end, type=ir.TensorType(dtype), shape=ir.Shape(shape)) for end, (dtype, shape) in scales.items()]


def _bank_source(name: str) -> str:
    """The checkpoint's name of the bank that the input `experts.LAYER.PART` is."""
    _, layer, part = name.split(".")
    return f"model.layers.{layer}.mlp.experts.{part}_proj"


class _Quantized:
    """A quantized weight: read once for its values; its scales are kept until they are asked for.

    Args:
        load: gives values and scales.
    """

    def __init__(self, load: Callable[[], tuple[Tensor, ...]]) -> None:
        self._load = load
        self._scales: dict[int, Tensor] = {}

    def weight(self) -> Tensor:
        """The values."""
        values, *scales = self._load()
        self._scales = dict(enumerate(scales))
        return values

    def scale(self, which: int = 0) -> Tensor:
        """The scales of blocks or groups, or (1) of whole matrices."""
        if which not in self._scales:
            self.weight()
        return self._scales.pop(which)


def _as_quantized(checkpoint: Checkpoint, source: str, turned: bool) -> Tensor:
    weight = fp8.dequantize(*checkpoint.load_quantized(source))
    return (weight.T if turned else weight).contiguous()


def _dequantize_in_graph(graph: ir.Graph, value: ir.Value, checkpoint: Checkpoint, source: str, turned: bool) -> None:
    name, shape = value.name or "", shape_of(value)
    summed, rows = (0, shape[1]) if turned else (1, shape[0])

    quantized = _Quantized(partial(checkpoint.load_quantized, source))

    def weight() -> Tensor:
        q = quantized.weight()
        return (q.view(torch.uint8).T.contiguous().view(fp8.FP8) if turned else q).contiguous()

    def scale() -> Tensor:
        s = quantized.scale().repeat_interleave(fp8.BLOCK, 0)[:rows]
        return (s.T if turned else s).contiguous()

    blocks = tuple(n // fp8.BLOCK if axis == summed else n for axis, n in enumerate(shape))
    parts = []
    for suffix, dtype, size, read in (
        ("fp8", ir.DataType.FLOAT8E4M3FN, shape, weight),
        ("scale", ir.DataType.BFLOAT16, blocks, scale),
    ):
        part = ir.Value(name=f"{name}.{suffix}", type=ir.TensorType(dtype), shape=ir.Shape(size))
        part.const_value = lazy_tensor(part.name or "", dtype, size, read)
        graph.initializers[part.name or ""] = part
        parts.append(part)
    out = ir.Value(name=f"{name}.dequantized", type=value.type, shape=value.shape)
    attributes = [ir.AttrInt64("axis", summed), ir.AttrInt64("block_size", fp8.BLOCK)]
    node = ir.Node("", "DequantizeLinear", parts, attributes, outputs=[out], name=f"{name}.dequantize")
    graph.insert_before(graph[0], node)
    ir.convenience.replace_all_uses_with(value, out)
    del graph.initializers[name]


def bind_large_weights(model: ir.Model, checkpoint: Checkpoint, limit: int = BOUND_BYTES) -> dict[str, Packed]:
    """Turn initializers of `limit` bytes or more into inputs, as expert banks are; run before weights are attached.

    Returns:
        every bound weight by input name: expert banks layer by layer, each with its scales, then the large ones.
    """
    graph, bound = model.graph, {}
    quantized: dict[str, _Quantized] = {}
    experts = {value.name or "": value for value in graph.inputs if (value.name or "").startswith("experts.")}
    for name in sorted(experts, key=lambda name: (int(name.split(".")[1]), name)):
        bound[name] = _expert_weight(experts[name], checkpoint, quantized)
    for name, value in list(graph.initializers.items()):
        dtype = value.dtype
        if value.const_value is not None or dtype not in TORCH_DTYPE or math.prod(shape_of(value)) * dtype.itemsize < limit:
            continue
        source, turned = weight_source(value, checkpoint)
        graph.initializers.pop(name)
        graph.inputs.append(value)
        read: Callable[[], Tensor] = partial(read_weight, checkpoint, source, turned, TORCH_DTYPE[dtype])
        bound[name] = Packed(SAFETENSORS_DTYPE[dtype], shape_of(value), read)
    return bound


def _expert_weight(value: ir.Value, checkpoint: Checkpoint, quantized: dict[str, _Quantized]) -> Packed:
    """A bank or its scales, which come after it."""
    name, *scale = (value.name or "").split("_scale")
    source, dtype = _bank_source(name), dtype_of(value)
    read: Callable[[], Tensor]
    if scale:
        read = partial(quantized[source].scale, int(scale == ["_2"]))
    elif dtype in TORCH_DTYPE:
        read = partial(read_weight, checkpoint, source, False, TORCH_DTYPE[dtype])
    else:
        load = checkpoint.load_quantized if dtype == ir.DataType.FLOAT8E4M3FN else partial(_interleaved, checkpoint)
        quantized[source] = _Quantized(partial(load, source))
        read = quantized[source].weight
    return Packed(SAFETENSORS_DTYPE[dtype], shape_of(value), read)


def _interleaved(checkpoint: Checkpoint, source: str) -> tuple[Tensor, ...]:
    packed, *scales = checkpoint.load_nvfp4(source)
    return nvfp4.interleave(packed), *scales


def check_operators(model: onnx.ModelProto, plugins: bool) -> None:
    """Refuse a graph with an operator, a form of one or a type that TensorRT does not take.

    Args:
        model: the graph, functions and all; external data need not be loaded.
        plugins: whether the plugins are there.

    Raises:
        EngineError: every such operator, with the node's name.
    """
    problems = []
    functions = {function.name for function in model.functions}
    for node in _nodes(model):
        if node.domain == DOMAIN:
            if node.op_type not in functions and not (plugins and node.op_type in PLUGINS):
                problems.append(f"{node.op_type} ({node.name}): neither a plugin nor a function body")
        elif node.domain or node.op_type not in ACCEPTED:
            problems.append(f"{node.domain + '.' if node.domain else ''}{node.op_type} ({node.name})")
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "ScatterElements" and attributes.get("reduction", onnx.AttributeProto(s=b"none")).s != b"none":
            problems.append(f"ScatterElements with a reduction ({node.name})")
        if node.op_type == "Attention" and "softmax_precision" in attributes:
            problems.append(f"Attention with softmax_precision ({node.name})")
        if node.op_type == "Cast" and attributes["to"].i not in ACCEPTED_TYPES:
            problems.append(f"Cast to {onnx.TensorProto.DataType.Name(attributes['to'].i)} ({node.name})")
    tensors = [(t.name, t.data_type) for t in model.graph.initializer]
    tensors += [(v.name, v.type.tensor_type.elem_type) for v in (*model.graph.input, *model.graph.output)]
    problems += [f"{onnx.TensorProto.DataType.Name(kind)} tensor {name}" for name, kind in tensors if kind not in ACCEPTED_TYPES]
    if problems:
        raise EngineError(f"TensorRT does not take {len(problems)} parts of the graph: {', '.join(sorted(set(problems))[:12])}")


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the graph, of function bodies and of subgraphs."""
    pending = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    while pending:
        node = pending.pop()
        yield node
        pending += [inner for attribute in node.attribute for inner in attribute.g.node]
