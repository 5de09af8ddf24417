"""The bodies in standard operators, run by ONNX Runtime in float32, against the reference model."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.package import EnginePackage
from clover_trt.graph.bodies_tensorrt import CHUNK, function_bodies
from clover_trt.graph.contract import OPS, advanced_name, expert_names
from clover_trt.model.block_step import CloverModel
from clover_trt.model.gdn import GdnCache, GdnWeights, gdn_block_scan
from clover_trt.model.lengths import Lengths
from clover_trt.parity.compare import relative_error
from clover_trt.parity.torch_session import TorchSession
from clover_trt.parity.verify import compare_layers, probe_graph
from clover_trt.runtime.ort_session import OrtSession
from clover_trt.runtime.session import StepInput, StepOutput
from tests.kernel_cases import run_body
from tests.small import SMALL


class ApartSession(OrtSession):
    """Writes advanced caches to buffers of their own: Scan and Loop may write a result before they have read all input."""

    def step(self, step: StepInput) -> StepOutput:
        self._apart: dict[str, np.ndarray] = {}
        output = super().step(step)
        for name, rows in self._apart.items():
            self._caches[name][step.slots] = rows
        return output

    def _bind_outputs(self, binding: ort.IOBinding, slots: slice, wanted: list[str]) -> None:
        binding.clear_binding_outputs()
        for name in wanted:
            binding.bind_output(name)
        for name, cache in self._caches.items():
            self._apart[name] = np.empty_like(cache[slots])
            binding.bind_ortvalue_output(advanced_name(name), ort.OrtValue.ortvalue_from_numpy(self._apart[name]))


@pytest.fixture
def standard_session(small_engine: EnginePackage, small_folder) -> ApartSession:  # type: ignore[no-untyped-def]
    graph, names = probe_graph(small_engine)
    model = onnx.ModelProto.FromString(graph)
    del model.functions[:]
    model.functions.extend(function_bodies(SMALL, onnx.TensorProto.FLOAT))
    session = ApartSession(small_engine, slots=3, threads=1, graph=model.SerializeToString(), probes=names)
    checkpoint = Checkpoint(small_folder)
    for layer in range(SMALL.num_hidden_layers):  # the package interleaves gate and up rows for ONNX Runtime's own kernel
        gate_up = checkpoint.load(f"model.layers.{layer}.mlp.experts.gate_up_proj").numpy()
        session._experts[expert_names(layer)[0]] = ort.OrtValue.ortvalue_from_numpy(gate_up)
    return session


def test_every_layer_equals_the_reference(standard_session: ApartSession, small_model: CloverModel) -> None:
    reference = TorchSession(small_model, slots=3, max_len=256)
    checks = compare_layers(standard_session, reference, standard_session._probes, 1e-5, SMALL.vocab_size)
    assert len(checks) == SMALL.num_hidden_layers + 2
    assert all(check.passed for check in checks), checks


def test_bodies_follow_the_contract_and_use_standard_operators_only() -> None:
    for compute in (onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16):
        for body in function_bodies(SMALL, compute):
            op = OPS[body.name]
            assert (tuple(body.input), tuple(body.output), tuple(body.attribute)) == (op.inputs, op.outputs, op.attributes)
            assert [entry.domain for entry in body.opset_import] == [""]
            assert {node.domain for node in body.node} == {""}


def test_the_chunked_rule_survives_identical_keys() -> None:
    """Equal keys, no decay and full write strength are the worst case of the triangle's inverse."""
    B, T, heads = 2, 2 * CHUNK + 5, SMALL.linear_num_value_heads
    g = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 2 * SMALL.key_dim, generator=g).expand(B, T, -1)
    qkv = torch.cat((keys, torch.randn(B, T, SMALL.value_dim, generator=g)), dim=-1)
    last_tap = torch.zeros(SMALL.conv_dim, 1, 4)
    last_tap[..., -1] = 1.0
    gates = torch.full((B, T, heads), 20.0)
    per_head = [torch.full((heads,), value) for value in (-40.0, 0.0, 1.0, 0.0, 0.0)]
    weights = GdnWeights(last_tap, torch.zeros(SMALL.conv_dim, 1, 3), *per_head)
    state = torch.randn(B, heads, SMALL.linear_key_head_dim, SMALL.linear_value_head_dim, generator=g)
    cache = GdnCache(torch.zeros(B, SMALL.conv_dim, 3), state)
    lengths = Lengths(*(torch.full((B,), n, dtype=torch.int32) for n in (9, T, 0)))
    expected, advanced = gdn_block_scan(qkv, gates, gates, weights, cache, lengths)
    attributes = {"k_heads": 2, "v_heads": heads, "k_dim": 8, "v_dim": 16, "kernel": 4, "right_kernel": 3}
    (body,) = [body for body in function_bodies(SMALL, onnx.TensorProto.FLOAT) if body.name == "GdnBlockScan"]
    out, conv, recurrent = run_body(body, [qkv, gates, gates, *weights, *cache, *lengths], attributes)
    assert relative_error(out.numpy(), expected.numpy()) < 1e-5
    assert relative_error(recurrent.numpy(), advanced.recurrent.numpy()) < 1e-5
    assert torch.equal(conv, advanced.conv)
