"""The kernels from Python, run on the host: the table of cases against PyTorch, and whole models on top of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny.wider import write_wider

from clover_trt.checkpoint import fp8, nvfp4
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.plugins import HOST_LIBRARY, build_library, check_geometry, open_library
from clover_trt.errors import EngineError
from clover_trt.model.block_step import REFERENCE_OPS, CloverModel, new_caches, no_controls
from clover_trt.model.gdn import GdnCache, GdnWeights, gdn_block_scan
from clover_trt.model.head import confidence_head
from clover_trt.model.lengths import Lengths
from clover_trt.model.load import load_model
from clover_trt.model.moe import expert_subset_moe
from clover_trt.parity.kernel_ops import Kernels, kernel_ops, register
from clover_trt.parity.torch_session import TorchSession
from clover_trt.parity.verify import decode
from clover_trt.runtime.generate import Generator
from tests.kernel_cases import Case, gdn_inputs, head_inputs, moe_inputs, read_cases
from tests.small import SMALL, random_state


@pytest.fixture(scope="session")
def library_path() -> Path:
    return build_library("host")


@pytest.fixture(scope="session")
def kernels(library_path: Path) -> Kernels:
    return Kernels(library_path)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def valid(lengths: Lengths, tokens: int) -> torch.Tensor:
    return (lengths.masks(tokens)[0] | lengths.masks(tokens)[1])[..., None]


def nvfp4_bank(bank: torch.Tensor, halves: int) -> tuple[torch.Tensor, ...]:
    """Interleaved values, both kinds of scales, and the bank that they stand for, in float32."""
    matrices = [nvfp4.quantize(half) for expert in bank for half in expert.chunk(halves)]
    exact = torch.cat([nvfp4.dequantize(*each, torch.float32) for each in matrices]).view(bank.shape)
    packed, scale, whole = (torch.stack([each[i] for each in matrices]) for i in range(3))
    shape = bank.shape[:2]
    return nvfp4.interleave(packed).view(*shape, -1), scale.view(*shape, -1), whole.view(-1, halves), exact


@pytest.mark.parametrize("case", read_cases("gdn"), ids=str)
def test_gdn(kernels: Kernels, case: Case) -> None:
    limit = 1e-2 if case.is_bf16 else 1e-5
    qkv, a, b, weights, cache, lengths = gdn_inputs(case)
    plain = (qkv.float(), a.float(), b.float(), GdnWeights(*(w.float() for w in weights)), GdnCache(*(s.float() for s in cache)))
    wide = gdn_block_scan(*plain, lengths)
    states = GdnCache(*(state.clone() for state in cache))
    found = kernels.gdn_block_scan(qkv, a, b, weights, *states, lengths)
    mask = valid(lengths, qkv.shape[1])[..., None]
    assert error(found * mask, wide[0] * mask) < limit
    assert error(states.recurrent, wide[1].recurrent) < limit
    assert torch.equal(states.conv.float(), wide[1].conv)


@pytest.mark.parametrize("case", [case for case in read_cases("moe") if "real" not in case.name], ids=str)
def test_moe(kernels: Kernels, case: Case) -> None:
    x, router, gate_up, down, shared, lengths, mass = moe_inputs(case)
    banks, scales, exact = (gate_up, down), (), (gate_up, down)
    if case.type == "e2m1":
        first, second = (nvfp4_bank(bank, halves) for bank, halves in ((gate_up, 2), (down, 1)))
        banks, scales, exact = (first[0], second[0]), (first[1], second[1], first[2], second[2]), (first[3], second[3])
    elif case.type == "e4m3":
        quantized = [fp8.quantize(bank) for bank in banks]
        banks, scales = tuple(q for q, _ in quantized), tuple(scale for _, scale in quantized)
        exact = tuple(fp8.dequantize(q, scale) for q, scale in quantized)
    wide = [tensor.float() for tensor in (x, router, *exact)]
    expected, distinct = expert_subset_moe(*wide, tuple(s.float() for s in shared), lengths, mass, case["top_k"])
    found, used = kernels.expert_subset_moe(x, router, *banks, shared, lengths, mass, case["top_k"], scales)
    mask = valid(lengths, x.shape[1])
    assert error(found * mask, expected * mask) < (6e-2 if case.type == "e4m3" else 1e-2)
    assert torch.equal(used, distinct)
    assert not (found * ~mask).any()


@pytest.mark.parametrize("case", [case for case in read_cases("head") if case["candidates"] < case["vocabulary"]], ids=str)
def test_head(kernels: Kernels, case: Case) -> None:
    hidden, weight, mask, given = head_inputs(case)
    expected = confidence_head(hidden.float(), weight.float(), mask, given, case["candidates"])
    found = kernels.confidence_head(hidden, weight, mask, given, case["candidates"], want_logits=True)
    assert error(found.logits, expected.logits) < 1e-5
    assert (found.candidate_logprobs - expected.candidate_logprobs)[expected.candidate_logprobs.isfinite()].abs().max() < 1e-4
    assert torch.equal(found.candidate_ids[..., 0], expected.candidate_ids[..., 0])


def test_the_operators_of_torch(kernels: Kernels) -> None:
    """`torch.ops.clover.*` are the same calls."""
    registration = register(kernels)
    qkv, a, b, weights, cache, lengths = gdn_inputs(read_cases("gdn")[4])
    first, second = (GdnCache(*(state.clone() for state in cache)) for _ in range(2))
    found = torch.ops.clover.gdn_block_scan(qkv, a, b, list(weights), *first, list(lengths))
    assert torch.equal(found, kernels.gdn_block_scan(qkv, a, b, weights, *second, lengths))
    assert torch.equal(first.recurrent, second.recurrent)
    x, router, gate_up, down, shared, lengths, mass = moe_inputs(read_cases("moe")[0])
    found, _ = torch.ops.clover.expert_subset_moe(x, router, gate_up, down, list(shared), list(lengths), mass, 4, [])
    assert torch.equal(found, kernels.expert_subset_moe(x, router, gate_up, down, shared, lengths, mass, 4)[0])
    hidden, weight, mask, given = head_inputs(read_cases("head")[1])
    ids, _ = torch.ops.clover.confidence_head(hidden, weight, mask, list(given), 4)
    assert torch.equal(ids, kernels.confidence_head(hidden, weight, mask, given, 4).candidate_ids)
    del registration


WIDE = SMALL.model_copy(
    update={
        "hidden_size": 64, "linear_key_head_dim": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32
    }
)  # fmt: skip


def test_a_whole_block_step_is_as_near_as_bfloat16_gets(kernels: Kernels) -> None:
    """Four layers, rows of three phases: no farther from float32 than twice the PyTorch model in bfloat16 is."""
    state = {
        name: tensor if name.endswith(("A_log", "dt_bias", "temperature", "memory_bias", "memory_slope")) else tensor.bfloat16()
        for name, tensor in random_state(WIDE).items()
    }
    rows = Lengths(*(torch.tensor(x, dtype=torch.int32) for x in ((0, 0, 0), (24, 0, 8), (0, 16, 16))))
    ids = torch.randint(0, 100, (3, 24), generator=torch.Generator().manual_seed(0))
    outputs = []
    for ops, dtype in ((REFERENCE_OPS, torch.float32), (REFERENCE_OPS, torch.bfloat16), (kernel_ops(kernels), torch.bfloat16)):
        model = CloverModel(WIDE, 100, ops).requires_grad_(False)
        kept = {name: tensor.to(dtype) if tensor.dtype == torch.bfloat16 else tensor for name, tensor in state.items()}
        model.load_state_dict(kept, assign=True)
        caches = new_caches(WIDE, 3, 32, dtype)
        with torch.no_grad():
            index = torch.arange(24)[None].expand(3, -1)
            outputs.append(model(ids, rows, index, torch.tensor([1.0, 0.7, 0.5]), no_controls(3, 24), caches, 2))
    mask = valid(rows, 24)
    exact, plain, ours = (output.hidden[-1].float() * mask for output in outputs)
    assert error(ours, exact) < max(1e-2, 2 * error(plain, exact))


def test_clover_tiny_answers_the_same(kernels: Kernels, tiny_engine, library_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Exact tokens of the trained model: the kernels in bfloat16 against the PyTorch model in bfloat16."""
    checkpoint = Checkpoint("clover-tiny")
    check_geometry(open_library(library_path), checkpoint.config, "bfloat16")
    generator = Generator(tiny_engine)
    model = load_model(checkpoint, torch.bfloat16)
    answers = []
    for ops in (REFERENCE_OPS, kernel_ops(kernels)):
        other = CloverModel(checkpoint.config, checkpoint.valid_tokens, ops).requires_grad_(False)
        other.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
        session = TorchSession(other, max_len=256)
        asked = [
            generator.chat([{"role": "user", "content": text}], max_new_tokens=48)
            for text in ('Reverse "stone".', "What is 7 + 15?")
        ]
        answers.append([decode(session, sequence) for sequence in asked])
    assert answers[0] == answers[1]
    assert generator.codec.decode(answers[1][0]).startswith("enots")


def engine_banks(checkpoint: Checkpoint, layer: int, precision: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The banks of a layer and their scales, as an engine of this precision binds them."""
    found = []
    for part in ("gate_up", "down"):
        name = f"model.layers.{layer}.mlp.experts.{part}_proj"
        if precision == "nvfp4":
            packed, *scales = checkpoint.load_nvfp4(name)
            found.append((nvfp4.interleave(packed), *scales))
        else:
            found.append(checkpoint.load_quantized(name))
    values, *scales = zip(*found, strict=True)
    return list(values), [scale for pair in scales for scale in pair]


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_clover_tiny_answers_right_with_quantized_experts(
    kernels: Kernels,
    tmp_path: Path,
    tiny_engine,  # type: ignore[no-untyped-def]
    precision: str,
) -> None:
    checkpoint = Checkpoint(write_wider(tmp_path / "wider", 128))
    state = {name: tensor.clone() for name, tensor in load_model(checkpoint, torch.bfloat16).state_dict().items()}
    of_layer = [engine_banks(checkpoint, layer, precision) for layer in range(checkpoint.config.num_hidden_layers)]
    by_address = {
        state[f"model.layers.{layer}.mlp.experts.gate_up_proj"].data_ptr(): banks for layer, banks in enumerate(of_layer)
    }

    def moe(x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, _: torch.Tensor, *rest: Any) -> Any:
        values, scales = by_address[gate_up.data_ptr()]
        return kernels.expert_subset_moe(x.contiguous(), router, *values, *rest, tuple(scales))

    ops = dataclasses.replace(kernel_ops(kernels), expert_subset_moe=moe)
    model = CloverModel(checkpoint.config, checkpoint.valid_tokens, ops).requires_grad_(False)
    model.load_state_dict(state, assign=True)
    generator = Generator(tiny_engine)
    asked = generator.chat([{"role": "user", "content": 'Reverse "stone".'}], max_new_tokens=32)
    answer = generator.codec.decode(decode(TorchSession(model, max_len=256), asked))
    assert answer.startswith("enots")


def test_sizes_that_the_kernels_are_not_written_for_are_refused(library_path: Path) -> None:
    library = open_library(library_path)
    with pytest.raises(EngineError, match=r"GdnBlockScan expects k_dim and v_dim of 16, .*k_heads 2.*--operations functions"):
        check_geometry(library, SMALL, "bfloat16")
    with pytest.raises(EngineError, match="ExpertSubsetMoe expects a hidden size and an expert width that are multiples of 128"):
        check_geometry(library, WIDE, "fp8")
    with pytest.raises(EngineError, match="ExpertSubsetMoe expects a hidden size and an expert width that are multiples of 16, "):
        check_geometry(library, WIDE.model_copy(update={"moe_intermediate_size": 24}), "nvfp4")
    check_geometry(library, WIDE, "nvfp4")
    check_geometry(library, WIDE, "bfloat16")


def test_another_version_or_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="not found"):
        open_library(tmp_path / HOST_LIBRARY)
    (tmp_path / "text.so").write_text("x")
    with pytest.raises(EngineError, match="not a plugin library"):
        open_library(tmp_path / "text.so")
    source = tmp_path / "old.c"
    source.write_text('const char *clover_plugins_version() { return "clover-plugins 0.0.1 contract 0"; }')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "old.so"), str(source)], check=True)
    with pytest.raises(EngineError, match=r"is clover-plugins 0\.0\.1 contract 0, expected clover-plugins 0\.1\.0 contract 1"):
        open_library(tmp_path / "old.so")


def test_tensorrt_rtx_takes_the_library_and_makes_each_plugin(capfd: pytest.CaptureFixture[str]) -> None:
    """The registry of a real TensorRT: creators are listed, plugins made from fields, bad fields refused."""
    trt = pytest.importorskip("tensorrt_rtx_bindings")
    path = build_library("h200")
    messages: list[str] = []

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: object, message: str) -> None:
            messages.append(message)

    builder = trt.Builder(Log())  # gives the process its logger
    registry = trt.get_plugin_registry()
    registry.load_library(str(path))
    fields = {
        "GdnBlockScan": {"k_heads": 16, "v_heads": 32, "k_dim": 128, "v_dim": 128, "kernel": 4, "right_kernel": 3},
        "ExpertSubsetMoe": {"num_experts": 256, "top_k": 8},
        "ConfidenceHead": {"emit_logits": 0},
    }
    assert builder is not None
    for name, values in fields.items():
        creator = registry.get_creator(name, "1", "clover")
        assert creator is not None
        assert {field.name for field in creator.field_names} == set(values)

        def made(given: dict[str, int], creator: object = creator, name: str = name) -> object:
            collection = trt.PluginFieldCollection(
                [trt.PluginField(key, np.array([value], np.int32), trt.PluginFieldType.INT32) for key, value in given.items()]
            )
            return creator.create_plugin(name, collection, trt.TensorRTPhase.BUILD)  # type: ignore[attr-defined]

        plugin = made(values)
        assert plugin is not None
        for wrong in ({**values, next(iter(values)): -5}, dict(list(values.items())[1:])):
            messages.clear()
            with contextlib.suppress(RuntimeError, TypeError, ValueError):  # a binding may raise where C++ returns null
                assert made(wrong) is None
            said = capfd.readouterr().err + "".join(messages)  # standard error when TensorRT hands over no logger
            assert f"clover::{name}" in said, "the reason is logged with the plugin's name"


def test_the_gpu_check_runs_dry(tmp_path: Path) -> None:
    """The whole of tools/gpu_check.py over the kernels on the host: cases, every timing, the whole step against PyTorch."""
    tool = Path(__file__).parents[2] / "tools" / "gpu_check.py"
    command = [sys.executable, str(tool), "--dry-run", "--out", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(case["passed"] for case in report["cases"])
    assert {(row["kernel"], row["precision"]) for row in report["kernels"]} == {
        ("gdn_block_scan", "bf16"), ("expert_subset_moe", "bf16"), ("expert_subset_moe", "e4m3"),
        ("expert_subset_moe", "e2m1"), ("confidence_head", "bf16")
    }  # fmt: skip
    assert 0 < report["step"]["against_eager"]["first_layer_median"] < 0.02
    assert not report["step"]["failures"]
    masses = {row["expert_mass"]: row["distinct_experts"] for row in report["step"]["passes"] if row["tokens"] == 16}
    assert masses[0.7] < masses[0.9] < masses[1.0]
