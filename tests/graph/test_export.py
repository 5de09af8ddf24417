from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from clover_trt.checkpoint.names import expected_tensors
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import ModelConfig
from clover_trt.engine.build import export
from clover_trt.engine.package import GRAPH, EnginePackage
from clover_trt.errors import EngineError
from clover_trt.graph import export as export_module
from clover_trt.graph.bodies_onnxruntime import function_bodies
from clover_trt.graph.contract import (
    CONTROL_INPUTS,
    DOMAIN,
    OPS,
    OPSET,
    STEP_INPUTS,
    STEP_OUTPUTS,
    advanced_name,
    cache_names,
    expert_names,
)
from clover_trt.model.head import Controls
from tests.small import SMALL, random_state, write_checkpoint


@pytest.fixture(scope="module")
def graph(small_engine: EnginePackage) -> onnx.ModelProto:
    return onnx.load(str(small_engine.folder / GRAPH), load_external_data=False)


def test_nodes_follow_the_contract(graph: onnx.ModelProto) -> None:
    nodes = [node for node in graph.graph.node if node.domain == DOMAIN]
    layers = SMALL.layer_types
    counts = {name: sum(node.op_type == name for node in nodes) for name in OPS}
    assert counts == {
        "BlockAttention": layers.count("full_attention"),
        "GdnBlockScan": layers.count("linear_attention"),
        "ExpertSubsetMoe": len(layers),
        "ConfidenceHead": 1,
    }
    for node in nodes:
        op = OPS[node.op_type]
        assert len(node.input) == len(op.inputs)
        assert len(node.output) == len(op.outputs)
        assert sorted(attribute.name for attribute in node.attribute) == sorted(op.attributes)


def test_every_operation_has_a_body_with_its_inputs_and_outputs() -> None:
    for body in function_bodies(SMALL):
        op = OPS[body.name]
        assert tuple(body.input) == op.inputs
        assert tuple(body.output) == op.outputs
        assert tuple(body.attribute) == op.attributes


def test_inputs_and_outputs_are_named_and_experts_are_inputs(graph: onnx.ModelProto) -> None:
    caches = [name for pair in cache_names(SMALL) for name in pair]
    experts = [name for i in range(SMALL.num_hidden_layers) for name in expert_names(i)]
    assert [value.name for value in graph.graph.input] == [*STEP_INPUTS, *CONTROL_INPUTS, *caches, *experts]
    assert [value.name for value in graph.graph.output] == [*STEP_OUTPUTS, *map(advanced_name, caches)]
    assert Controls._fields == CONTROL_INPUTS
    elements = sum(int(np_size(tensor)) for tensor in graph.graph.initializer)
    experts_size = sum(size(shape) for name, shape in expected_tensors(SMALL).items() if ".experts." in name)
    all_size = sum(size(shape) for shape in expected_tensors(SMALL).values())
    assert elements < all_size - experts_size + 5000, "expert weights are not baked into the graph"


def size(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def np_size(tensor: onnx.TensorProto) -> int:
    return size(tuple(tensor.dims))


def test_axes_are_dynamic_and_the_opset_is_the_one_asked_for(graph: onnx.ModelProto) -> None:
    axes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.graph.input
    }
    assert axes["input_ids"] == ["batch", "tokens"]
    assert axes["logit_index"] == ["batch", "positions"]
    assert axes["key_cache.3"] == ["batch", 2, "max_len", 16]
    assert axes["bias_values"] == ["batch", "positions", "biases"]
    assert {o.domain: o.version for o in graph.opset_import}[""] == OPSET
    keys = {entry.key for entry in graph.metadata_props}
    assert {"clover.contract_version", "clover.source", "clover.block_rule"} <= keys


@pytest.mark.parametrize(
    "changes", [{"linear_right_conv_kernel_dim": 1}, {"linear_conv_kernel_dim": 2}, {"num_key_value_heads": 4}]
)
def test_bodies_parse_for_other_geometries(changes: dict[str, int]) -> None:
    other = ModelConfig.model_validate({**SMALL.model_dump(), **changes})
    assert len(function_bodies(other)) == len(OPS)


def test_the_graph_alone_is_written_for_every_target(tmp_path: Path) -> None:
    config = SMALL.model_copy(update={"moe_intermediate_size": 32})
    checkpoint = Checkpoint(write_checkpoint(tmp_path / "checkpoint", random_state(config), config))
    for gpu, precision, kind in (
        ("cpu", "float32", onnx.TensorProto.FLOAT),
        ("rtx", "bfloat16", onnx.TensorProto.BFLOAT16),
        ("h200", "fp8", onnx.TensorProto.FLOAT8E4M3FN),
        ("gb300", "nvfp4", onnx.TensorProto.INT8),
    ):
        target = tmp_path / f"{gpu}-{precision}"
        export(checkpoint, target, gpu=gpu, precision=precision, max_seq_len=128)
        assert sorted(path.name for path in target.iterdir()) == ["step.data", "step.onnx"]
        model = onnx.load(str(target / "step.onnx"))
        onnx.checker.check_model(str(target / "step.onnx"))
        inputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
        assert inputs[expert_names(0)[0]] == kind
        assert {each.name for each in model.functions} == ({"BlockAttention"} if gpu in ("h200", "gb300") else set(OPS))
        metadata = {entry.key: entry.value for entry in model.metadata_props}
        assert json.loads(metadata["clover.source"])["fingerprint"] == checkpoint.fingerprint()
    with pytest.raises(EngineError, match="exists; choose another"):
        export(checkpoint, target, gpu="cpu")
    with pytest.raises(EngineError, match="nvfp4: needs the plugins"):
        export(checkpoint, tmp_path / "other", gpu="gb300", precision="nvfp4", operations="functions")


def test_constants_of_more_than_two_gigabytes_go_into_several_files(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "SHARD_BYTES", 100_000)
    export(Checkpoint(small_folder), tmp_path / "out")
    data = sorted((tmp_path / "out").glob("step-*.data"))
    assert len(data) > 1
    monkeypatch.undo()
    export(Checkpoint(small_folder), tmp_path / "whole")
    split, whole = (onnx.load(str(tmp_path / name / "step.onnx")) for name in ("out", "whole"))
    for a, b in zip(split.graph.initializer, whole.graph.initializer, strict=True):
        assert a.raw_data == b.raw_data
