"""plugins/tests/cases.txt and inputs for its cases, for everything in Python that computes a `clover::` operation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import Tensor

from clover_trt.graph.contract import DOMAIN, OPS, OPSET, VERSION
from clover_trt.model.gdn import GdnCache, GdnWeights
from clover_trt.model.head import Controls
from clover_trt.model.lengths import Lengths

TABLE = Path(__file__).parent.parent / "plugins" / "tests" / "cases.txt"


@dataclass(frozen=True)
class Case:
    """A line of the table."""

    operation: str
    fields: dict[str, str]

    def __getitem__(self, key: str) -> int:
        return int(self.fields[key])

    def __str__(self) -> str:
        return f"{self.name}-{self.type}"

    @property
    def name(self) -> str:
        return self.fields["name"]

    @property
    def type(self) -> str:
        return self.fields["type"]

    @property
    def is_bf16(self) -> bool:
        return self.type == "bf16"

    @property
    def lengths(self) -> Lengths:
        rows = [[int(part) for part in row.split("/")] for row in self.fields["rows"].split(",")]
        return Lengths(*torch.tensor(rows, dtype=torch.int32).T.contiguous().unbind())


def read_cases(operation: str) -> list[Case]:
    cases = []
    for line in TABLE.read_text().splitlines():
        words = line.split("#")[0].split()
        if words and words[0] == operation:
            cases.append(Case(operation, dict(word.split("=", 1) for word in words[1:])))
    return cases


class _Draw:
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self._generator = dtype, torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, spread: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * spread + mean).to(dtype or self.dtype)


def gdn_inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, GdnWeights, GdnCache, Lengths]:
    draw, lengths = _Draw(torch.bfloat16 if case.is_bf16 else torch.float32), case.lengths
    B, T, heads = len(lengths.commit_len), case["tokens"], case["v_heads"]
    C = 2 * case["k_heads"] * case["k_dim"] + heads * case["v_dim"]
    wide = torch.float32
    weights = GdnWeights(
        draw(C, 1, case["kernel"], spread=0.5),
        draw(C, 1, case["right_kernel"], spread=0.5),
        draw(heads, spread=0.5, mean=-1.0, dtype=wide),
        draw(heads, dtype=wide),
        draw(heads, mean=4.0, dtype=wide),
        draw(heads, dtype=wide),
        draw(heads, spread=0.2, dtype=wide),
    )
    cache = GdnCache(draw(B, C, case["kernel"] - 1), draw(B, heads, case["k_dim"], case["v_dim"], spread=0.3, dtype=wide))
    return draw(B, T, C), draw(B, T, heads), draw(B, T, heads), weights, cache, lengths


def moe_inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...], Lengths, Tensor]:
    draw, lengths = _Draw(torch.bfloat16), case.lengths
    B, T, H, E, width, S = (
        len(lengths.commit_len),
        case["tokens"],
        case["hidden"],
        case["experts"],
        case["width"],
        case["shared_width"],
    )
    shared = (draw(S, H, spread=H**-0.5), draw(S, H, spread=H**-0.5), draw(H, S, spread=S**-0.5), draw(1, H, spread=H**-0.5))
    router, gate_up = draw(E, H, spread=1.5 * H**-0.5), draw(E, 2 * width, H, spread=H**-0.5)
    mass = torch.full((B,), float(case.fields["mass"]))
    return draw(B, T, H), router, gate_up, draw(E, H, width, spread=width**-0.5), shared, lengths, mass


def controls(case: Case, draw: _Draw, mask: int) -> Controls:
    B, L, V, R, A = (case[key] for key in ("rows", "positions", "vocabulary", "history", "biases"))
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> Tensor:
        rows = [torch.randperm(V, generator=generator)[:count] for _ in range(B)]
        drawn = torch.stack(rows) if count else torch.zeros(B, 0, dtype=torch.int64)
        drawn[:, 4 * count // 5 :] = mask
        return drawn

    return Controls(
        ids(R),
        torch.randint(1, 5, (B, R), generator=generator).float(),
        draw(B, spread=0.1, mean=1.5, dtype=torch.float32),
        draw(B, spread=0.3, dtype=torch.float32),
        draw(B, spread=0.3, dtype=torch.float32),
        ids(A),
        draw(B, L, A, spread=3.0, dtype=torch.float32),
    )


def head_inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Controls]:
    draw, V, H = _Draw(torch.bfloat16), case["vocabulary"], case["hidden"]
    mask = torch.zeros(V)
    mask[[V - 7, V - 3, V - 2, V - 1]] = -torch.inf
    return draw(case["rows"], case["positions"], H), draw(V, H, spread=2 * H**-0.5), mask, controls(case, draw, V - 7)


KINDS = {torch.float32: onnx.TensorProto.FLOAT, torch.int32: onnx.TensorProto.INT32, torch.int64: onnx.TensorProto.INT64}


def run_body(body: onnx.FunctionProto, inputs: list[Tensor], attributes: dict[str, int]) -> list[Tensor]:
    """One node of an operation, computed by ONNX Runtime through a function body."""
    op, make = OPS[body.name], onnx.helper
    values = [make.make_tensor_value_info(n, KINDS[t.dtype], list(t.shape)) for n, t in zip(op.inputs, inputs, strict=True)]
    whole = ("candidate_ids", "distinct_experts")
    kinds = [onnx.TensorProto.INT64 if name in whole else onnx.TensorProto.FLOAT for name in op.outputs]
    results = [make.make_tensor_value_info(name, kind, None) for name, kind in zip(op.outputs, kinds, strict=True)]
    node = make.make_node(body.name, op.inputs, op.outputs, domain=DOMAIN, **attributes)
    opsets = [make.make_opsetid("", OPSET), make.make_opsetid(DOMAIN, VERSION), make.make_opsetid("com.microsoft", 1)]
    graph = make.make_graph([node], "one", values, results)
    model = make.make_model(graph, functions=[body], opset_imports=opsets, ir_version=11)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {name: tensor.numpy() for name, tensor in zip(op.inputs, inputs, strict=True)})
    return [torch.from_numpy(np.asarray(value)) for value in found]
