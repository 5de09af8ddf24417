"""The function bodies of both targets on the table of cases that the kernels run on, against the reference functions."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch
from torch import Tensor

from clover_trt.config import ModelConfig
from clover_trt.graph import bodies_onnxruntime, bodies_tensorrt
from clover_trt.model.gdn import GdnCache, GdnWeights, gdn_block_scan
from clover_trt.model.head import confidence_head
from clover_trt.model.moe import expert_subset_moe
from tests.kernel_cases import Case, gdn_inputs, head_inputs, moe_inputs, read_cases, run_body
from tests.small import SMALL

Bodies = Callable[[ModelConfig], list[onnx.FunctionProto]]
TARGETS: dict[str, Bodies] = {
    "onnxruntime": bodies_onnxruntime.function_bodies,
    "tensorrt": lambda config: bodies_tensorrt.function_bodies(config, onnx.TensorProto.FLOAT),
}
LIMIT = 1e-5


def run(operation: str, target: str, config: ModelConfig, inputs: list[Tensor], attributes: dict[str, int]) -> list[Tensor]:
    (body,) = [body for body in TARGETS[target](config) if body.name == operation]
    return run_body(body, [tensor.float() if tensor.is_floating_point() else tensor for tensor in inputs], attributes)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", read_cases("gdn"), ids=str)
def test_gdn(case: Case, target: str) -> None:
    qkv, a, b, weights, cache, lengths = gdn_inputs(case)
    sizes = {
        "linear_num_key_heads": case["k_heads"],
        "linear_num_value_heads": case["v_heads"],
        "linear_key_head_dim": case["k_dim"],
        "linear_value_head_dim": case["v_dim"],
        "linear_conv_kernel_dim": case["kernel"],
        "linear_right_conv_kernel_dim": case["right_kernel"],
        "block_size": 32,
    }
    attributes = {name: case[name] for name in ("k_heads", "v_heads", "k_dim", "v_dim", "kernel", "right_kernel")}
    inputs = [qkv, a, b, *weights, *cache, *lengths]
    found = run("GdnBlockScan", target, SMALL.model_copy(update=sizes), inputs, attributes)
    plain = (qkv.float(), a.float(), b.float(), GdnWeights(*(w.float() for w in weights)), GdnCache(*(s.float() for s in cache)))
    out, states = gdn_block_scan(*plain, lengths)
    committed, noisy = lengths.masks(case["tokens"])
    mask = (committed | noisy)[..., None, None]
    assert error(found[0] * mask, out * mask) < LIMIT
    assert torch.equal(found[1], states.conv)
    assert error(found[2], states.recurrent) < LIMIT


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [case for case in read_cases("moe") if case.is_bf16 and "real" not in case.name], ids=str)
def test_moe(case: Case, target: str) -> None:
    x, router, gate_up, down, shared, lengths, mass = moe_inputs(case)
    sizes = {
        "hidden_size": case["hidden"],
        "num_experts": case["experts"],
        "num_experts_per_tok": case["top_k"],
        "moe_intermediate_size": case["width"],
        "shared_expert_intermediate_size": case["shared_width"],
    }
    bank = gate_up
    if target == "onnxruntime":  # its kernel wants gate and up rows in turn
        bank = gate_up.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()
    inputs = [x, router, bank, down, *shared, *lengths, mass]
    attributes = {"num_experts": case["experts"], "top_k": case["top_k"]}
    found, distinct = run("ExpertSubsetMoe", target, SMALL.model_copy(update=sizes), inputs, attributes)
    plain = [tensor.float() for tensor in (x, router, gate_up, down)]
    expected, used = expert_subset_moe(*plain, tuple(s.float() for s in shared), lengths, mass, case["top_k"])
    committed, noisy = lengths.masks(case["tokens"])
    mask = (committed | noisy)[..., None]
    assert error(found * mask, expected * mask) < LIMIT
    assert torch.equal(distinct, used)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [case for case in read_cases("head") if case["candidates"] < case["vocabulary"]], ids=str)
def test_head(case: Case, target: str) -> None:
    hidden, weight, mask, controls = head_inputs(case)
    sizes = {"hidden_size": case["hidden"], "vocab_size": case["vocabulary"]}
    inputs = [hidden, weight, mask, *controls, torch.tensor([case["candidates"]])]
    ids, logprobs, logits = run("ConfidenceHead", target, SMALL.model_copy(update=sizes), inputs, {})
    expected = confidence_head(hidden.float(), weight.float(), mask, controls, case["candidates"])
    assert error(logits, expected.logits) < LIMIT
    assert torch.equal(ids, expected.candidate_ids)
    assert (logprobs - expected.candidate_logprobs).abs().max() < 1e-4
