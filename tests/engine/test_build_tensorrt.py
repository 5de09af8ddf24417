"""TensorRT packages: plans that TensorRT-RTX builds on this machine, and bundles for GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors import safe_open

from clover_trt.bench.midsize import midsize_state, write_midsize
from clover_trt.checkpoint import fp8
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import BuildConfig, ModelConfig
from clover_trt.engine import build as build_module
from clover_trt.engine import build_tensorrt
from clover_trt.engine.build import build, resume
from clover_trt.engine.package import BOUND, open_package
from clover_trt.engine.trt_library import find_library, load_timings, save_timings, timing_cache_file
from clover_trt.errors import EngineError
from clover_trt.graph.contract import (
    CONTROL_INPUTS,
    OPS,
    PLUGINS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    advanced_name,
    cache_names,
    expert_names,
)
from clover_trt.graph.tensorrt import check_operators
from tests.engine.conftest import NO_COMPILER
from tests.small import SMALL, AbsentTensorRT, random_state, write_checkpoint

Tensors = dict[str, tuple[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def midsize(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("midsize")
    write_midsize(folder, midsize_state())
    return Checkpoint(folder)


def expected_tensors_of_plan(model: ModelConfig, settings: BuildConfig) -> Tensors:
    """Names, types and shapes (-1: dynamic) of the plan's inputs and outputs, from the package's config.json alone."""
    c, dynamic = model, -1
    ints, floats, lengths = "INT64", "FLOAT", "INT32"
    step = {
        "input_ids": (ints, (dynamic, dynamic)),
        "prefix_len": (lengths, (dynamic,)),
        "commit_len": (lengths, (dynamic,)),
        "noisy_len": (lengths, (dynamic,)),
        "logit_index": (ints, (dynamic, dynamic)),
        "expert_mass": (floats, (dynamic,)),
        "num_candidates": (ints, (1,)),
    }
    controls = {
        "history_ids": (ints, (dynamic, dynamic)),
        "history_counts": (floats, (dynamic, dynamic)),
        "repetition_penalty": (floats, (dynamic,)),
        "presence_penalty": (floats, (dynamic,)),
        "frequency_penalty": (floats, (dynamic,)),
        "bias_ids": (ints, (dynamic, dynamic)),
        "bias_values": (floats, (dynamic, dynamic, dynamic)),
    }
    assert (tuple(step), tuple(controls)) == (STEP_INPUTS, CONTROL_INPUTS)
    assert settings.cache_len is not None
    rows = (dynamic, c.num_key_value_heads, settings.cache_len, c.head_dim)
    shapes = {
        "key_cache": ("BF16", rows),
        "value_cache": ("BF16", rows),
        "conv_state": ("BF16", (dynamic, c.conv_dim, c.linear_conv_kernel_dim - 1)),
        "recurrent_state": ("FLOAT", (dynamic, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)),
    }
    caches = {name: shapes[name.split(".")[0]] for pair in cache_names(c) for name in pair}
    kind = "FP8" if settings.precision == "fp8" else "BF16"
    experts: Tensors = {}
    scales: Tensors = {}
    for layer in range(c.num_hidden_layers):
        for name, part, size in zip(
            expert_names(layer),
            ("gate_up_proj", "down_proj"),
            ((2 * c.moe_intermediate_size, c.hidden_size), (c.hidden_size, c.moe_intermediate_size)),
            strict=True,
        ):
            experts[name] = (kind, (c.num_experts, *size))
            scales[f"{name}_scale"] = ("BF16", fp8.bank_scale_shape(part, c))
    return {**step, **controls, **caches, **experts, **(scales if kind == "FP8" else {})}


@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
@pytest.mark.parametrize(("which", "capability"), [("clover-tiny", "8.9"), ("midsize", "12.0")])
def test_rtx_builds_a_plan_whose_tensors_and_profiles_are_those_of_the_config(
    which: str, capability: str, precision: str, midsize: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    check, add = build_tensorrt.check_tensors, build_tensorrt.add_profile

    def watch_tensors(network: Any, model: onnx.ModelProto, trt: Any) -> None:
        check(network, model, trt)
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        seen["inputs"] = {t.name: (t.dtype.name, tuple(t.shape)) for t in inputs}
        seen["outputs"] = [network.get_output(i).name for i in range(network.num_outputs)]
        seen["host"] = [t.name for t in inputs if t.is_shape_tensor]

    def watch_profile(builder: Any, config: Any, network: Any, model: onnx.ModelProto, profile: Any) -> None:
        add(builder, config, network, model, profile)
        seen.setdefault("profiles", []).append(profile.model_dump(mode="json"))
        assert config.num_optimization_profiles == len(seen["profiles"])

    monkeypatch.setattr(build_tensorrt, "check_tensors", watch_tensors)
    monkeypatch.setattr(build_tensorrt, "add_profile", watch_profile)
    checkpoint = midsize if which == "midsize" else Checkpoint("clover-tiny")
    lines: list[str] = []
    target = tmp_path / "engine"
    finished = build(
        checkpoint,
        target,
        gpu="rtx",
        precision=precision,
        compute_capability=capability,
        max_seq_len=1024,
        progress=lines.append,
    )
    assert finished
    package = open_package(target)
    config = json.loads((target / "config.json").read_text())
    assert seen["inputs"] == expected_tensors_of_plan(package.model, package.build)
    caches = [name for pair in cache_names(package.model) for name in pair]
    assert seen["outputs"] == [*(name for name in STEP_OUTPUTS if name != "logits"), *map(advanced_name, caches)]
    assert seen["host"] == ["num_candidates"]
    assert seen["profiles"] == config["build_config"]["optimization_profiles"]
    assert (config["build_config"]["gpu"], config["build_config"]["compute_capability"]) == ("rtx", capability)
    assert (target / "rank0.engine").stat().st_size > 100_000
    assert not (target / "step.onnx").exists()
    assert any(line.startswith("building the plan: ") for line in lines)


@pytest.fixture(scope="module")
def bundle(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundles") / "gb300"
    assert build(Checkpoint(small_folder), target, gpu="gb300", precision="fp8") is False
    return target


def test_a_bundle_has_everything_but_the_plan_and_nothing_opens_it(bundle: Path) -> None:
    assert {path.name for path in bundle.iterdir()} == {
        "config.json", "generation_config.json", "manifest.json", "LICENSE", "step.onnx", "step.data", BOUND
    }  # fmt: skip
    with pytest.raises(EngineError, match=r"unfinished build bundle; finish it with: clover-trt build --resume"):
        open_package(bundle)
    package = open_package(bundle, unfinished=True)
    assert package.manifest["finished"] is False
    assert [profile.name for profile in package.build.optimization_profiles] == ["denoise", "fused", "prefill"]


def test_nodes_of_plugins_have_what_tensorrt_finds_plugins_by(bundle: Path) -> None:
    """Attention keeps its body; the others have the plugin's name, version and fields, and no output that is never asked for."""
    model = onnx.load(str(bundle / "step.onnx"))
    assert {function.name for function in model.functions if function.domain == "clover"} == {"BlockAttention"}
    nodes = {node.op_type: node for node in model.graph.node if node.domain == "clover"}
    assert set(nodes) == {"BlockAttention", *PLUGINS}
    wanted = {"plugin_namespace": b"clover", "plugin_version": b"1"}
    for name in PLUGINS:
        found = {each.name: onnx.helper.get_attribute_value(each) for each in nodes[name].attribute}
        assert wanted.items() <= found.items()
        assert set(OPS[name].attributes) <= set(found)
    head, moe = nodes["ConfidenceHead"], nodes["ExpertSubsetMoe"]
    found = {each.name: onnx.helper.get_attribute_value(each) for each in head.attribute}
    assert found["emit_logits"] == 0
    assert [head.input[i] for i in found["tensorrt_plugin_shape_input_indices"]] == ["num_candidates"]
    assert list(head.output) == ["candidate_ids", "candidate_logprobs"]
    assert [name.split(".")[-1] for name in moe.input[-2:]] == ["gate_up_scale", "down_scale"]


def test_bound_weights_are_the_quantized_experts(bundle: Path, small_folder: Path) -> None:
    checkpoint = Checkpoint(small_folder)
    with safe_open(bundle / BOUND, "pt") as file:
        assert len(file.keys()) == 4 * SMALL.num_hidden_layers
        for layer in range(SMALL.num_hidden_layers):
            weight, scale = checkpoint.load_quantized(f"model.layers.{layer}.mlp.experts.gate_up_proj")
            name = expert_names(layer)[0]
            assert torch.equal(file.get_tensor(name).view(torch.uint8), weight.view(torch.uint8))
            assert torch.equal(file.get_tensor(f"{name}_scale"), scale)


def test_constants_of_an_fp8_graph_stand_for_the_quantized_weights(tmp_path: Path) -> None:
    """A matrix whose summed axis is a multiple of 128 is e4m3 behind a DequantizeLinear, another is bfloat16."""
    wide = SMALL.model_copy(update={"hidden_size": 256})
    folder = write_checkpoint(tmp_path / "wide", random_state(wide), wide)
    build(Checkpoint(folder), tmp_path / "bundle", gpu="gb300", precision="fp8")
    graph = onnx.load(str(tmp_path / "bundle" / "step.onnx")).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    assert nodes
    checkpoint = Checkpoint(folder)
    for node in nodes:
        q = torch.tensor(onnx.numpy_helper.to_array(constants[node.input[0]]).astype(np.float32))
        scale = torch.tensor(onnx.numpy_helper.to_array(constants[node.input[1]]).astype(np.float32))
        axis = {attribute.name: attribute.i for attribute in node.attribute}["axis"]
        found = (q * scale.repeat_interleave(fp8.BLOCK, axis)).to(torch.bfloat16)
        source = node.input[0].removeprefix("clover.").removesuffix(".fp8")
        expected = fp8.dequantize(*checkpoint.load_quantized(source.removesuffix(".T")))
        assert torch.equal(found, expected.T if source.endswith(".T") else expected), source


def test_a_bundle_with_functions_is_finished_where_the_library_is(
    small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "engine"
    find = build_module.find_library
    monkeypatch.setattr(build_module, "find_library", lambda backend: None)
    assert build(Checkpoint(small_folder), target, gpu="rtx", max_seq_len=256) is False
    with pytest.raises(EngineError, match=r"needs tensorrt-rtx and a GPU of compute capability 8\.9"):
        resume(target)
    monkeypatch.setattr(build_module, "find_library", find)
    before = open_package(target, unfinished=True)
    resume(target)
    after = open_package(target)
    assert after.build == before.build
    assert after.manifest["source"] == before.manifest["source"]
    assert len(after.manifest["tools"]["plan_identity"]) == 64
    assert {"rank0.engine", BOUND} <= set(after.manifest["files"])
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]
    with pytest.raises(EngineError, match="finished already"):
        resume(target)


def test_a_failed_resume_leaves_the_bundle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle was made without a compiler, and the machine that is to finish it has none either."""
    monkeypatch.setattr(build_module, "find_library", lambda backend: AbsentTensorRT())
    with pytest.raises(EngineError, match=NO_COMPILER):
        resume(bundle)
    open_package(bundle, unfinished=True)
    assert [path.name for path in bundle.parent.iterdir()] == [bundle.name]


def test_a_plugin_library_is_refused_where_no_operation_needs_one(small_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="--plugin-library"):
        build(Checkpoint(small_folder), tmp_path / "engine", gpu="rtx", plugin_library=tmp_path / "any.so")
    with pytest.raises(EngineError, match="not found; expected a plugin library"):
        build(Checkpoint(small_folder), tmp_path / "engine", gpu="h200", plugin_library=tmp_path / "any.so")
    assert not list(tmp_path.iterdir())


def test_a_capability_the_library_cannot_build_for_is_refused_before_any_work(small_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"compute capability 9\.0: tensorrt-rtx .* can build for 7\.5, 8\.0.* 12\.0"):
        build(Checkpoint(small_folder), tmp_path / "engine", gpu="rtx", compute_capability="9.0")
    assert not list(tmp_path.iterdir())


def test_what_tensorrt_does_not_take_is_named() -> None:
    make = onnx.helper
    value = make.make_tensor_value_info
    nodes = [
        make.make_node("NonZero", ["x"], ["y"], name="first"),
        make.make_node("ScatterElements", ["x", "y", "x"], ["z"], name="second", reduction="add"),
        make.make_node("Cast", ["z"], ["w"], name="third", to=onnx.TensorProto.DOUBLE),
        make.make_node("MoE", ["w"], ["v"], name="fourth", domain="com.microsoft"),
        make.make_node("GdnBlockScan", ["v"], ["u"], name="fifth", domain="clover"),
    ]
    graph = make.make_graph(nodes, "g", [value("x", onnx.TensorProto.DOUBLE, [2])], [value("u", onnx.TensorProto.FLOAT, [2])])
    with pytest.raises(EngineError) as caught:
        check_operators(make.make_model(graph), plugins=False)
    for part in (
        "NonZero (first)",
        "reduction (second)",
        "Cast to DOUBLE",
        "com.microsoft.MoE",
        "GdnBlockScan",
        "DOUBLE tensor x",
    ):
        assert part in str(caught.value)


def test_timings_are_kept_for_the_next_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through TensorRT-RTX, whose timing cache has the same calls and holds nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = find_library("tensorrt-rtx")
    assert library is not None
    path = timing_cache_file(library, "8.9")
    assert path.name == f"tensorrt-rtx-{library.version}-sm89.timing"
    builder, _logger = library.new_builder([], lambda _: None)
    config, _monitor = library.new_config(builder, "8.9", 0, lambda _: None)
    load_timings(config, path)
    save_timings(config, path)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    load_timings(config, path)
