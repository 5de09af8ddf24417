"""The block step as a TensorRT plan: buffers bound once, caches advanced in place, a CUDA graph for each shape.

A step packs its small inputs into one page-locked buffer and sends them in one copy on a stream of its own; the results
come back the same way, candidates only. Nothing else crosses the bus.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from clover_trt.checkpoint.safetensors_file import DTYPE_BYTES, read_header
from clover_trt.config import OptimizationProfile
from clover_trt.engine.package import BOUND, PLAN, EnginePackage
from clover_trt.engine.plugins import LIBRARY
from clover_trt.errors import EngineError
from clover_trt.graph.contract import CONTROL_INPUTS, advanced_name, cache_names
from clover_trt.runtime.gpu import Context, CudaGpu, Gpu
from clover_trt.runtime.session import Snapshot, StepInput, StepOutput, check_step, is_row_cache

ALIGNMENT = 256  # bytes, of every tensor in a packed buffer
STAGE_BYTES = 64 << 20  # of the buffer through which weights are uploaded
MOST_GRAPHS = 64
HOST_INPUT = "num_candidates"  # the plan's shapes depend on it, so TensorRT reads it in host memory
DTYPES = {"F32": np.float32, "I64": np.int64, "I32": np.int32}


class Shape(NamedTuple):
    """What a step's tensors and addresses depend on: one CUDA graph each."""

    first_slot: int
    batch: int
    tokens: int
    positions: int
    history: int
    biases: int
    candidates: int


class TrtSession:
    """An engine package on a GPU.

    Args:
        package: an opened package with a TensorRT plan.
        slots: rows that can be in flight at once, at most the build's `max_batch_size`.
        cache_budget: bytes that the caches of all slots may take together; None for no limit.
        gpu: the GPU and its libraries; the first one of this machine when None.

    Raises:
        EngineError: the plan was built for another GPU or by another TensorRT, or does not fit in memory or the budget.
    """

    def __init__(
        self, package: EnginePackage, *, slots: int = 1, cache_budget: int | None = None, gpu: Gpu | None = None
    ) -> None:
        build = package.build
        self.config, self.slots, self.max_len = package.model, slots, build.max_seq_len
        self.prefix_len: NDArray[np.int32] = np.zeros(slots, np.int32)
        if not 1 <= slots <= build.max_batch_size:
            raise EngineError(f"slots = {slots}: the engine was built for 1 to {build.max_batch_size} rows")
        if package.model.mask_token_id is None:
            raise EngineError(f"{package.folder}: a plain Qwen3.5-MoE engine has no blocks to decode on a GPU")
        self._filler = package.model.mask_token_id
        self._gpu = gpu or CudaGpu(build.backend)
        self._check_build(package)
        self._profiles = build.optimization_profiles
        plugins = package.folder / LIBRARY if build.operations == "plugins" else None
        self._plan = self._gpu.load((package.folder / PLAN).read_bytes(), plugins)
        self._check_budget(cache_budget)
        self._compute, self._copy = self._gpu.stream(), self._gpu.stream()
        self._weights = self._upload_weights(package)
        self._caches = {
            name: self._gpu.allocate(slots * self._row_bytes(name)) for pair in cache_names(self.config) for name in pair
        }
        for name, address in self._caches.items():
            self._gpu.zero(address, slots * self._row_bytes(name), self._compute)
        self._contexts: dict[int, Context] = {}
        self._inputs, self._outputs = _Buffer(self._gpu), _Buffer(self._gpu)
        self._host = self._gpu.pinned(8)
        self._seen: OrderedDict[Shape, Any] = OrderedDict()

    def _check_build(self, package: EnginePackage) -> None:
        build = package.build
        if build.backend == "onnxruntime":
            raise EngineError(f"{package.folder}: an ONNX Runtime engine; expected one built for a GPU")
        if build.compute_capability != self._gpu.compute_capability:
            raise EngineError(
                f"{package.folder}: built for compute capability {build.compute_capability}, "
                f"this GPU has {self._gpu.compute_capability}; build the engine for it"
            )
        built_with = package.manifest["tools"].get(build.backend)
        if built_with != self._gpu.version:
            raise EngineError(
                f"{package.folder}: built with {build.backend} {built_with}, this machine has {self._gpu.version}; "
                "build the engine again or install that version"
            )

    def _check_budget(self, budget: int | None) -> None:
        each = sum(self._row_bytes(name) for pair in cache_names(self.config) for name in pair)
        if budget is not None and self.slots * each > budget:
            raise EngineError(
                f"the caches of {self.slots} slots of {self.max_len} tokens take {self.slots * each:,} bytes, the budget is "
                f"{budget:,}: at most {budget // each} slots fit; lower the slots, or build for a shorter context"
            )

    def _row_bytes(self, name: str) -> int:
        return math.prod(self._plan.shape(name)[1:]) * DTYPE_BYTES[self._plan.dtype(name)]

    def _upload_weights(self, package: EnginePackage) -> dict[str, int]:
        """Put every bound weight into GPU memory, checked against what the plan takes."""
        path = package.folder / BOUND
        addresses: dict[str, int] = {}
        stage = self._gpu.pinned(STAGE_BYTES)
        for name, info in read_header(path).items():
            wanted = (self._plan.dtype(name), self._plan.shape(name)) if name in self._plan.inputs else None
            if (info.dtype, info.shape) != wanted:
                raise EngineError(
                    f"{path}: {name} is {info.dtype} {list(info.shape)}, the plan takes {wanted}; build the engine again"
                )
            data = np.memmap(path, np.uint8, "r", info.begin, (info.nbytes,))
            addresses[name] = self._gpu.allocate(info.nbytes)
            for at in range(0, info.nbytes, STAGE_BYTES):
                part = data[at : at + STAGE_BYTES]
                stage[: len(part)] = part
                self._gpu.upload(addresses[name] + at, stage[: len(part)], self._copy)
                self._gpu.synchronize(self._copy)
        return addresses

    def cache_bytes(self) -> int:
        """Bytes that the caches take."""
        return sum(self.slots * self._row_bytes(name) for name in self._caches)

    def reset(self, slot: int) -> None:
        """Empty a slot; zeros also wipe what a failed row may have left."""
        self.prefix_len[slot] = 0
        for name, address in self._caches.items():
            size = self._row_bytes(name)
            self._gpu.zero(address + slot * size, size, self._compute)

    def save(self, slot: int, begin: int) -> Snapshot:
        """Copy the state of a slot to the host, with the key and value rows of its tokens from `begin` on."""
        end = int(self.prefix_len[slot])
        self._gpu.order(self._compute, self._copy)
        rows, states = {}, {}
        for name in self._caches:
            shape, size = self._plan.shape(name)[1:], DTYPE_BYTES[self._plan.dtype(name)]
            if is_row_cache(name):
                rows[name] = self._gpu.pinned(shape[0] * (end - begin) * shape[2] * size).reshape(shape[0], end - begin, -1)
                for host, address in self._row_pieces(name, slot, begin, rows[name]):
                    self._gpu.download(host, address, self._copy)
            else:
                states[name] = self._gpu.pinned(self._row_bytes(name))
                self._gpu.download(states[name], self._caches[name] + slot * self._row_bytes(name), self._copy)
        self._gpu.synchronize(self._copy)
        return Snapshot(begin, end, rows, states)

    def load(self, slot: int, chain: Sequence[Snapshot]) -> None:
        """Put a slot into the state of the last snapshot."""
        self._gpu.order(self._compute, self._copy)
        for part in chain:
            for name, rows in part.rows.items():
                for host, address in self._row_pieces(name, slot, part.begin, rows):
                    self._gpu.upload(address, host, self._copy)
        for name, state in chain[-1].states.items():
            self._gpu.upload(self._caches[name] + slot * self._row_bytes(name), state, self._copy)
        self._gpu.synchronize(self._copy)
        self.prefix_len[slot] = chain[-1].end

    def _row_pieces(self, name: str, slot: int, begin: int, rows: NDArray[np.uint8]) -> Iterator[tuple[NDArray[np.uint8], int]]:
        """The rows of each key or value head, `[kv_heads, n, bytes]` on the host, and where they lie on the GPU."""
        _, heads, capacity, _ = self._plan.shape(name)
        first = self._caches[name] + slot * self._row_bytes(name)
        width = self._row_bytes(name) // (heads * capacity)
        for head in range(heads if rows.size else 0):
            yield rows[head].reshape(-1), first + (head * capacity + begin) * width

    def step(self, step: StepInput) -> StepOutput:
        """Run one block step over B neighbouring slots."""
        check_step(self, step)
        if step.want_logits:
            raise EngineError("an engine for a GPU returns candidates only; compare logits on the CPU engine")
        inputs = self._step_inputs(step)
        shape = _shape_of(step, inputs)
        self._inputs.pack(inputs)
        results = self._result_arrays(shape)
        if self._outputs.reserve(results) | self._inputs.moved():
            self._seen.clear()  # addresses changed
        self._host.view(np.int64)[0] = step.candidates
        self._gpu.upload(self._inputs.address, self._inputs.filled(), self._copy)
        self._gpu.order(self._copy, self._compute)
        self._run(shape, inputs)
        self._gpu.order(self._compute, self._copy)
        self._gpu.download(self._outputs.filled(), self._outputs.address, self._copy)
        self._gpu.synchronize(self._copy)
        self.prefix_len[step.slots] += step.commit_len
        found, asked = {name: self._outputs.array(name).copy() for name in results}, step.logit_index.shape[1]
        ids, logprobs = found["candidate_ids"][:, :asked], found["candidate_logprobs"][:, :asked]
        return StepOutput(ids, logprobs, found["distinct_experts"])

    def _step_inputs(self, step: StepInput) -> dict[str, NDArray[Any]]:
        """The small inputs by name; positions, histories and biases are padded to a power of two, so that few shapes occur."""
        controls = {name: getattr(step.controls, name) for name in CONTROL_INPUTS}
        for names, filler in ((("history_ids", "bias_ids"), self._filler), (("history_counts", "bias_values"), 0)):
            for name in names:
                controls[name] = _padded(controls[name], filler)
        index = _padded(step.logit_index, 0)
        more = index.shape[1] - step.logit_index.shape[1]
        controls["bias_values"] = np.pad(controls["bias_values"], [(0, 0), (0, more), (0, 0)])
        return {
            "input_ids": step.input_ids,
            "prefix_len": self.prefix_len[step.slots],
            "commit_len": step.commit_len,
            "noisy_len": step.noisy_len,
            "logit_index": index,
            "expert_mass": step.expert_mass,
            **controls,
        }

    def _result_arrays(self, shape: Shape) -> dict[str, tuple[type, tuple[int, ...]]]:
        size = (shape.batch, shape.positions, shape.candidates)
        return {
            "candidate_ids": (np.int64, size),
            "candidate_logprobs": (np.float32, size),
            "distinct_experts": (np.int64, (self.config.num_hidden_layers,)),
        }

    def _run(self, shape: Shape, inputs: dict[str, NDArray[Any]]) -> None:
        """Launch the plan; a shape that comes a second time is captured as a CUDA graph, and replayed from then on."""
        graph = self._seen.get(shape)
        if graph is not None:
            self._seen.move_to_end(shape)
            self._gpu.launch(graph, self._compute)
            return
        context = self._bound_context(shape, inputs)
        context.enqueue(self._compute)  # after a change of shapes TensorRT may allocate, so this run is never a captured one
        seen_before = shape in self._seen
        self._seen[shape] = None
        if seen_before:
            self._gpu.begin_capture(self._compute)
            context.enqueue(self._compute)
            self._seen[shape] = self._gpu.end_capture(self._compute)
        if len(self._seen) > MOST_GRAPHS:
            self._seen.popitem(last=False)

    def _bound_context(self, shape: Shape, inputs: dict[str, NDArray[Any]]) -> Context:
        index = choose_profile(self._profiles, shape)
        if index not in self._contexts:
            context = self._plan.context(index, self._compute)
            for name, address in self._weights.items():
                context.set_address(name, address)
            self._contexts[index] = context
        context = self._contexts[index]
        for name, value in inputs.items():
            context.set_shape(name, value.shape)
            context.set_address(name, self._inputs.address_of(name))
        context.set_address(HOST_INPUT, self._host.ctypes.data)
        for name, address in self._caches.items():
            rows = address + shape.first_slot * self._row_bytes(name)
            context.set_shape(name, (shape.batch, *self._plan.shape(name)[1:]))
            context.set_address(name, rows)
            context.set_address(advanced_name(name), rows)
        for name in self._outputs.names():
            context.set_address(name, self._outputs.address_of(name))
        return context


class _Buffer:
    """Tensors side by side in one piece of GPU memory with a page-locked twin, so that one copy moves them all."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.address, self._host, self._moved = 0, np.empty(0, np.uint8), False
        self._places: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}

    def reserve(self, arrays: dict[str, tuple[type, tuple[int, ...]]]) -> bool:
        """Lay out tensors; whether the buffer had to grow, which moves it."""
        at = 0
        self._places = {}
        for name, (kind, shape) in arrays.items():
            dtype: np.dtype[Any] = np.dtype(kind)
            self._places[name] = (at, dtype, shape)
            at += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        self._moved = at > len(self._host)
        if self._moved:
            if self.address:
                self._gpu.free(self.address)
            size = max(at, 2 * len(self._host))
            self.address, self._host = self._gpu.allocate(size), self._gpu.pinned(size)
        self._used = at
        return self._moved

    def pack(self, arrays: dict[str, NDArray[Any]]) -> None:
        """Lay out tensors and write their values into the host twin."""
        self.reserve({name: (value.dtype.type, value.shape) for name, value in arrays.items()})
        for name, value in arrays.items():
            self.array(name)[...] = value

    def moved(self) -> bool:
        """Whether the last layout moved the buffer."""
        return self._moved

    def filled(self) -> NDArray[np.uint8]:
        """The used part of the host twin."""
        return self._host[: self._used]

    def names(self) -> list[str]:
        """Names of the tensors laid out."""
        return list(self._places)

    def address_of(self, name: str) -> int:
        """Where a tensor lies in GPU memory."""
        return self.address + self._places[name][0]

    def array(self, name: str) -> NDArray[Any]:
        """A tensor in the host twin."""
        at, dtype, shape = self._places[name]
        return self._host[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _padded(value: NDArray[Any], filler: float) -> NDArray[Any]:
    """The last axis filled up to the next power of two, at least 1."""
    size = value.shape[-1]
    missing = (1 << max(0, size - 1).bit_length()) - size
    return np.pad(value, [(0, 0)] * (value.ndim - 1) + [(0, missing)], constant_values=filler) if missing else value


def _shape_of(step: StepInput, inputs: dict[str, NDArray[Any]]) -> Shape:
    (B, T), L = step.input_ids.shape, inputs["logit_index"].shape[1]
    history, biases = inputs["history_ids"].shape[1], inputs["bias_ids"].shape[1]
    return Shape(step.first_slot, B, T, L, history, biases, step.candidates)


def choose_profile(profiles: tuple[OptimizationProfile, ...], shape: Shape) -> int:
    """The profile with the fewest tokens that takes this shape.

    Raises:
        EngineError: none does.
    """
    sizes = shape._asdict()
    fitting = [
        (profile.axes["tokens"][2], index)
        for index, profile in enumerate(profiles)
        if all(low <= sizes[axis] <= high for axis, (low, _, high) in profile.axes.items())
    ]
    if not fitting:
        ranges = "; ".join(f"{p.name}: " + ", ".join(f"{a} {r[0]}-{r[2]}" for a, r in p.axes.items()) for p in profiles)
        asked = ", ".join(f"{axis} {sizes[axis]}" for axis in profiles[0].axes)
        raise EngineError(f"no optimization profile takes {asked}; the engine has {ranges}")
    return min(fitting)[1]
