"""A stand-in for CUDA and TensorRT at the boundary of the two libraries.

Memory is NumPy arrays behind made-up addresses. Streams are queues that run when they are synchronized, one of them (`eager`)
at once, and each no further than `order` obliges, so that a missing dependency reads old data. A plan is an ONNX model that
ONNX Runtime runs on whatever the bound addresses hold. Graphs keep shapes and addresses as they were captured.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from clover_trt.errors import EngineError

KINDS = {onnx.TensorProto.FLOAT: "F32", onnx.TensorProto.INT64: "I64", onnx.TensorProto.INT32: "I32"}
NUMPY = {"F32": np.float32, "I64": np.int64, "I32": np.int32}
Operation = Callable[[], None] | tuple[int, int]  # work, or "wait until that stream has run so many operations"


class FakeGpu:
    version = "10.14.1"
    compute_capability = "9.0"

    def __init__(self, model: bytes, memory: int = 1 << 30, eager: int | None = None) -> None:
        self.model, self.left, self.eager = model, memory, eager
        self.memory: dict[int, np.ndarray] = {}
        self.next_address = 1 << 20
        self.queues: list[list[Operation]] = []
        self.ran: list[int] = []
        self.capturing: list[Callable[[], None]] | None = None
        self.launched = self.enqueued = self.captured = 0

    def load(self, plan: bytes, plugins: Path | None) -> FakePlan:
        self.plugins = plugins
        if plan != b"a plan":
            raise EngineError("TensorRT 10.14.1: cannot load the plan: magic tag does not match")
        return FakePlan(self, self.model)

    def allocate(self, nbytes: int) -> int:
        self.left -= nbytes
        if self.left < 0:
            raise EngineError("CUDA: cudaMalloc: out of memory")
        address, self.next_address = self.next_address, self.next_address + nbytes + (1 << 12)
        self.memory[address] = np.full(nbytes, 0xAA, np.uint8)
        return address

    def free(self, address: int) -> None:
        self.left += self.memory.pop(address).nbytes

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, 0x55, np.uint8)

    def at(self, address: int, nbytes: int) -> np.ndarray:
        for base, data in self.memory.items():
            if base <= address and address + nbytes <= base + data.nbytes:
                return data[address - base : address - base + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are not allocated")

    def put(self, work: Callable[[], None], stream: int) -> None:
        if self.capturing is not None:
            self.capturing.append(work)
        else:
            self.queues[stream].append(work)
            if stream == self.eager:
                self.synchronize(stream)

    def upload(self, address: int, host: np.ndarray, stream: int) -> None:
        self.put(lambda: np.copyto(self.at(address, host.nbytes), host), stream)

    def download(self, host: np.ndarray, address: int, stream: int) -> None:
        self.put(lambda: np.copyto(host, self.at(address, host.nbytes)), stream)

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        self.put(lambda: self.at(address, nbytes).fill(0), stream)

    def stream(self) -> int:
        self.queues.append([])
        self.ran.append(0)
        return len(self.queues) - 1

    def order(self, first: int, then: int) -> None:
        self.queues[then].append((first, len(self.queues[first])))

    def run(self, stream: int, until: int) -> None:
        while self.ran[stream] < until:
            work = self.queues[stream][self.ran[stream]]
            self.ran[stream] += 1
            if isinstance(work, tuple):
                self.run(*work)
            else:
                work()

    def synchronize(self, stream: int) -> None:
        self.run(stream, len(self.queues[stream]))

    def begin_capture(self, stream: int) -> None:
        self.capturing = []

    def end_capture(self, stream: int) -> list[Callable[[], None]]:
        assert self.capturing is not None
        graph, self.capturing = self.capturing, None
        self.captured += 1
        return graph

    def launch(self, graph: list[Callable[[], None]], stream: int) -> None:
        self.launched += 1
        for work in graph:
            self.put(work, stream)


class FakePlan:
    def __init__(self, gpu: FakeGpu, model: bytes) -> None:
        self.gpu = gpu
        graph = onnx.ModelProto.FromString(model).graph
        self.values = {value.name: value for value in (*graph.input, *graph.output)}
        self.inputs = tuple(value.name for value in graph.input)
        self.outputs = tuple(value.name for value in graph.output)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def dtype(self, name: str) -> str:
        return KINDS[self.values[name].type.tensor_type.elem_type]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(dim.dim_value if not dim.dim_param else -1 for dim in self.values[name].type.tensor_type.shape.dim)

    def context(self, profile: int, stream: int) -> FakeContext:
        return FakeContext(self)


class FakeContext:
    def __init__(self, plan: FakePlan) -> None:
        self.plan = plan
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        wanted = self.plan.shape(name)
        assert len(shape) == len(wanted)
        assert all(size in (found, -1) for found, size in zip(shape, wanted, strict=True)), (name, shape, wanted)
        self.shapes[name] = shape

    def set_address(self, name: str, address: int) -> None:
        assert name in self.plan.values, name
        self.addresses[name] = address

    def enqueue(self, stream: int) -> None:
        gpu, plan = self.plan.gpu, self.plan
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        assert set(addresses) == set(plan.values), set(plan.values) - set(addresses)
        gpu.enqueued += 1

        def read(name: str) -> Any:
            kind: Any = np.dtype(NUMPY[plan.dtype(name)])
            shape = shapes.get(name, plan.shape(name))
            if name == "num_candidates":
                return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int64 * 1).from_address(addresses[name])).copy()
            return gpu.at(addresses[name], int(np.prod(shape)) * kind.itemsize).view(kind).reshape(shape).copy()

        def work() -> None:
            found = plan.session.run(list(plan.outputs), {name: read(name) for name in plan.inputs})
            for name, value in zip(plan.outputs, found, strict=True):
                np.copyto(gpu.at(addresses[name], value.nbytes), np.ascontiguousarray(value).reshape(-1).view(np.uint8))

        gpu.put(work, stream)
