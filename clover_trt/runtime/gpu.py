"""The boundary to TensorRT's runtime and CUDA: what a session asks of them, and the implementation over both libraries.

Addresses, streams, events and graphs are plain integers or opaque objects; no decision is taken here.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clover_trt.engine.package import TRT_MODULES
from clover_trt.engine.trt_library import collecting_logger
from clover_trt.errors import EngineError

Bytes = NDArray[np.uint8]


class Context(Protocol):
    """One execution context of a plan, on one of its optimization profiles."""

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Say the shape of an input."""
        ...

    def set_address(self, name: str, address: int) -> None:
        """Say where a tensor lies: in GPU memory, or in host memory for an input that shapes depend on."""
        ...

    def enqueue(self, stream: int) -> None:
        """Launch the plan on a stream."""
        ...


class Plan(Protocol):
    """A loaded plan. Shapes hold -1 for dynamic axes; dtypes are safetensors names."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def dtype(self, name: str) -> str:
        """Element type of a tensor."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def context(self, profile: int, stream: int) -> Context:
        """A new execution context on an optimization profile."""
        ...


class Gpu(Protocol):
    """One GPU and the libraries that drive it. Every failure is an `EngineError` with the library's own message."""

    version: str  # of TensorRT
    compute_capability: str

    def load(self, plan: bytes, plugins: Path | None) -> Plan:
        """Load a plan, and before it the plugin library that it needs."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Reserve GPU memory and return its address."""
        ...

    def free(self, address: int) -> None:
        """Give GPU memory back."""
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Page-locked host memory."""
        ...

    def upload(self, address: int, host: Bytes, stream: int) -> None:
        """Copy from page-locked host memory to the GPU, in stream order."""
        ...

    def download(self, host: Bytes, address: int, stream: int) -> None:
        """Copy from the GPU to page-locked host memory, in stream order."""
        ...

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        """Fill GPU memory with zeros, in stream order."""
        ...

    def stream(self) -> int:
        """A new stream."""
        ...

    def order(self, first: int, then: int) -> None:
        """Let work put on stream `then` from now on wait for what is on stream `first`."""
        ...

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""
        ...

    def begin_capture(self, stream: int) -> None:
        """Record what is put on the stream instead of running it."""
        ...

    def end_capture(self, stream: int) -> Any:
        """The recorded work as a graph."""
        ...

    def launch(self, graph: Any, stream: int) -> None:
        """Run a graph."""
        ...


class CudaGpu:
    """The GPU `device` through cuda-python and TensorRT.

    Raises:
        EngineError: a library is missing, or there is no GPU.
    """

    def __init__(self, backend: str = "tensorrt", device: int = 0) -> None:
        self._cuda = _first(("cuda.bindings.runtime",), "cuda-python")
        self._trt = _first(TRT_MODULES[backend], backend)
        self.version = str(self._trt.__version__)
        self._call("cudaSetDevice", device)
        kinds = self._cuda.cudaDeviceAttr
        major = self._call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMajor, device)
        minor = self._call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMinor, device)
        self.compute_capability = f"{major}.{minor}"
        self._messages: list[str] = []
        self._logger = collecting_logger(self._trt, self._messages)
        self._runtime = self._trt.Runtime(self._logger)
        self._event = self._call("cudaEventCreate")

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._cuda, name)(*arguments)
        if int(error) != 0:
            _, text = self._cuda.cudaGetErrorString(error)
            raise EngineError(f"CUDA: {name}: {text.decode() if isinstance(text, bytes) else text}")
        return results[0] if results else None

    def check(self, done: Any, what: str) -> None:
        """Turn a refusal of TensorRT into an error with its own words."""
        if not done:
            said = "; ".join(self._messages[-3:]) or "no reason given"
            self._messages.clear()
            raise EngineError(f"TensorRT {self.version}: {what}: {said}")

    def load(self, plan: bytes, plugins: Path | None) -> Plan:
        """Load a plan, and before it the plugin library that it needs."""
        if plugins is not None:
            self.check(self._trt.get_plugin_registry().load_library(str(plugins)), f"cannot load {plugins}")
        engine = self._runtime.deserialize_cuda_engine(plan)
        self.check(engine, "cannot load the plan")
        return _CudaPlan(self, self._trt, engine)

    def allocate(self, nbytes: int) -> int:
        """Reserve GPU memory and return its address."""
        return int(self._call("cudaMalloc", max(nbytes, 1)))

    def free(self, address: int) -> None:
        """Give GPU memory back."""
        self._call("cudaFree", address)

    def pinned(self, nbytes: int) -> Bytes:
        """Page-locked host memory, given back when the array is gone."""
        address = int(self._call("cudaMallocHost", max(nbytes, 1)))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(memory, self._call, "cudaFreeHost", address)
        return np.ctypeslib.as_array(memory)

    def upload(self, address: int, host: Bytes, stream: int) -> None:
        """Copy from page-locked host memory to the GPU, in stream order."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, host.ctypes.data, host.nbytes, kind, stream)

    def download(self, host: Bytes, address: int, stream: int) -> None:
        """Copy from the GPU to page-locked host memory, in stream order."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", host.ctypes.data, address, host.nbytes, kind, stream)

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        """Fill GPU memory with zeros, in stream order."""
        self._call("cudaMemsetAsync", address, 0, nbytes, stream)

    def stream(self) -> int:
        """A new stream."""
        return int(self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking))

    def order(self, first: int, then: int) -> None:
        """Let work put on stream `then` from now on wait for what is on stream `first`."""
        self._call("cudaEventRecord", self._event, first)
        self._call("cudaStreamWaitEvent", then, self._event, 0)

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""
        self._call("cudaStreamSynchronize", stream)

    def begin_capture(self, stream: int) -> None:
        """Record what is put on the stream instead of running it."""
        self._call("cudaStreamBeginCapture", stream, self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)

    def end_capture(self, stream: int) -> Any:
        """The recorded work as a graph."""
        return self._call("cudaGraphInstantiate", self._call("cudaStreamEndCapture", stream), 0)

    def launch(self, graph: Any, stream: int) -> None:
        """Run a graph."""
        self._call("cudaGraphLaunch", graph, stream)


class _CudaPlan:
    def __init__(self, gpu: CudaGpu, trt: Any, engine: Any) -> None:
        self._gpu, self._engine = gpu, engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        modes = {name: engine.get_tensor_mode(name) for name in names}
        self.inputs = tuple(name for name in names if modes[name] == trt.TensorIOMode.INPUT)
        self.outputs = tuple(name for name in names if modes[name] == trt.TensorIOMode.OUTPUT)
        kinds = {"FLOAT": "F32", "BF16": "BF16", "FP8": "F8_E4M3", "INT8": "I8", "INT32": "I32", "INT64": "I64"}
        self._dtypes = {name: kinds[engine.get_tensor_dtype(name).name] for name in names}

    def dtype(self, name: str) -> str:
        return self._dtypes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._engine.get_tensor_shape(name))

    def context(self, profile: int, stream: int) -> Context:
        context = self._engine.create_execution_context()
        self._gpu.check(context, "cannot create an execution context (not enough GPU memory?)")
        self._gpu.check(context.set_optimization_profile_async(profile, stream), f"cannot choose profile {profile}")
        return _CudaContext(self._gpu, context)


class _CudaContext:
    def __init__(self, gpu: CudaGpu, context: Any) -> None:
        self._gpu, self._context = gpu, context

    def set_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self._gpu.check(self._context.set_input_shape(name, shape), f"refuses shape {shape} of {name}")

    def set_address(self, name: str, address: int) -> None:
        self._gpu.check(self._context.set_tensor_address(name, address), f"refuses the address of {name}")

    def enqueue(self, stream: int) -> None:
        self._gpu.check(self._context.execute_async_v3(stream), "cannot run the plan")


def _first(names: tuple[str, ...], what: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise EngineError(f"running this engine needs {what}; install it with: pip install 'clover-trt[tensorrt]'")
