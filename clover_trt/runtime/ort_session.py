"""The block step on ONNX Runtime's CPU provider, with caches in bound buffers.

Each cache is bound as input and output at one address, so a pass writes its new rows and copies nothing else.
Key and value buffers start small and grow as slots fill, so that the time of a pass follows the tokens that are
there, not the longest that could be.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from clover_trt.checkpoint.safetensors_file import read_header
from clover_trt.engine.package import EXPERTS, GRAPH, EnginePackage
from clover_trt.errors import EngineError
from clover_trt.graph.contract import CONTROL_INPUTS, STEP_OUTPUTS, advanced_name, cache_names, cache_shape, expert_names
from clover_trt.runtime.session import Snapshot, StepInput, StepOutput, check_step, is_row_cache

GROWTH = 256  # cache rows are added in multiples of this


def mapped_experts(package: EnginePackage) -> dict[str, NDArray[np.float32]]:
    """The expert banks by graph input name, mapped from the file: their pages are read when first used, never copied.

    Raises:
        EngineError: a bank is missing, or not of the model's size.
    """
    path, c = package.folder / EXPERTS, package.model
    header = read_header(path)
    width, hidden = c.moe_intermediate_size, c.hidden_size
    names = []
    for layer in range(c.num_hidden_layers):
        for name, size in zip(expert_names(layer), ((2 * width, hidden), (hidden, width)), strict=True):
            found = (header[name].dtype, header[name].shape) if name in header else None
            if found != ("F32", (c.num_experts, *size)):
                expected = f"F32 {[c.num_experts, *size]}"
                raise EngineError(f"{path}: {name}: expected {expected}, found {found or 'nothing'}; build the engine again")
            names.append(name)
    return {name: np.memmap(path, np.float32, "r", header[name].begin, header[name].shape) for name in names}


class OrtSession:
    """An engine package on the CPU.

    Args:
        package: an opened package.
        slots: rows that can be in flight at once.
        threads: intra-op threads; the number of usable cores when None.
        cache_budget: bytes that the caches of all slots may take together; `max_len` is lowered to what fits. None for no limit.
        graph: a variant of the package's graph to run instead (its weights still come from the package), whose
            further outputs, `probes`, are kept in `probed` after each step.
        profile: begin of the name of the file to which `end_profile` writes ONNX Runtime's profile of every operator.

    Raises:
        EngineError: ONNX Runtime cannot load the graph, or the budget holds less than one block a slot.
    """

    def __init__(
        self,
        package: EnginePackage,
        *,
        slots: int = 1,
        threads: int | None = None,
        cache_budget: int | None = None,
        graph: bytes | None = None,
        probes: tuple[str, ...] = (),
        profile: Path | None = None,
    ) -> None:
        if package.build.backend != "onnxruntime":
            raise EngineError(f"{package.folder}: built for {package.build.gpu}; expected a CPU engine, built with --gpu cpu")
        self.config, self.slots, self.max_len = package.model, slots, package.build.max_seq_len
        if cache_budget is not None:
            self.max_len = min(self.max_len, self._longest(cache_budget))
        self.prefix_len: NDArray[np.int32] = np.zeros(slots, np.int32)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
        options.log_severity_level = 3
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(package.folder))
        self._probes = probes
        self.probed: dict[str, NDArray[np.float32]] = {}
        path = package.folder / GRAPH
        try:
            self._session = ort.InferenceSession(graph or str(path), options, providers=["CPUExecutionProvider"])
        except (RuntimeError, ort.capi.onnxruntime_pybind11_state.Fail) as error:
            raise EngineError(f"{path}: ONNX Runtime {ort.__version__} cannot load the engine: {error}") from None
        self._experts = {name: ort.OrtValue.ortvalue_from_numpy(bank) for name, bank in mapped_experts(package).items()}
        start = min(GROWTH, self.max_len)
        self._caches = {name: self._empty(name, start) for pair in cache_names(self.config) for name in pair}
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}

    def _empty(self, name: str, capacity: int) -> NDArray[np.float32]:
        return np.zeros((self.slots, *cache_shape(self.config, name, capacity)), np.float32)

    def _longest(self, budget: int) -> int:
        """Tokens a slot may hold so that the caches of all slots stay within `budget` bytes."""
        names = [name for pair in cache_names(self.config) for name in pair]
        sizes = {name: 4 * self.slots * math.prod(cache_shape(self.config, name, 1)) for name in names}
        a_row = sum(size for name, size in sizes.items() if is_row_cache(name))
        states = sum(size for name, size in sizes.items() if not is_row_cache(name))
        padding = 2 * self.config.block_size  # rows that a neighbour's longer step may reach past the end
        found = (budget - states) // max(1, a_row) - padding
        if found < self.config.block_size:
            least = states + a_row * (self.config.block_size + padding)
            raise EngineError(
                f"a cache budget of {budget:,} bytes is too small for {self.slots} slots: expected at least {least:,}; "
                "raise it or lower the number of slots"
            )
        return found

    def end_profile(self) -> Path:
        """Write the profile asked for: events in Chrome's trace format, times in microseconds."""
        return Path(self._session.end_profiling())

    def cache_bytes(self) -> int:
        """Bytes that the caches take now."""
        return sum(cache.nbytes for cache in self._caches.values())

    def reset(self, slot: int) -> None:
        """Empty a slot; zeros also wipe what a failed row may have left."""
        self.prefix_len[slot] = 0
        for cache in self._caches.values():
            cache[slot] = 0.0

    def save(self, slot: int, begin: int) -> Snapshot:
        """Copy the state of a slot, with the key and value rows of its tokens from `begin` on."""
        end = int(self.prefix_len[slot])
        rows = {name: cache[slot, :, begin:end].copy() for name, cache in self._caches.items() if is_row_cache(name)}
        states = {name: cache[slot].copy() for name, cache in self._caches.items() if not is_row_cache(name)}
        return Snapshot(begin, end, rows, states)

    def load(self, slot: int, chain: Sequence[Snapshot]) -> None:
        """Put a slot into the state of the last snapshot."""
        self._reserve(chain[-1].end)
        for part in chain:
            for name, rows in part.rows.items():
                self._caches[name][slot, :, part.begin : part.end] = rows
        for name, state in chain[-1].states.items():
            self._caches[name][slot] = state
        self.prefix_len[slot] = chain[-1].end

    def step(self, step: StepInput) -> StepOutput:
        """Run one block step over B neighbouring slots."""
        check_step(self, step)
        slots = step.slots
        self._reserve(int(self.prefix_len[slots].max()) + step.input_ids.shape[1])
        binding = self._binding(slots)
        inputs = {
            "input_ids": step.input_ids,
            "prefix_len": self.prefix_len[slots],
            "commit_len": step.commit_len,
            "noisy_len": step.noisy_len,
            "logit_index": step.logit_index,
            "expert_mass": step.expert_mass,
            "num_candidates": np.array([step.candidates], np.int64),
            **{name: getattr(step.controls, name) for name in CONTROL_INPUTS},
        }
        held = {name: np.ascontiguousarray(value) for name, value in inputs.items()}
        for name, value in held.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value))
        wanted = [name for name in STEP_OUTPUTS if name != "logits" or step.want_logits] + list(self._probes)
        self._bind_outputs(binding, slots, wanted)
        self._session.run_with_iobinding(binding)
        outputs = binding.get_outputs()
        values = {name: outputs[i].numpy() for i, name in enumerate(wanted)}
        self.probed = {name: values.pop(name) for name in self._probes}
        self.prefix_len[slots] += step.commit_len
        return StepOutput(**values)

    def _reserve(self, needed: int) -> None:
        """Grow key and value buffers to hold `needed` rows, by half at least, so that growth stays rare."""
        for name, cache in self._caches.items():
            if not is_row_cache(name) or cache.shape[2] >= needed:
                continue
            capacity = -(-max(needed, cache.shape[2] * 3 // 2) // GROWTH) * GROWTH
            grown = self._empty(name, max(needed, min(capacity, self.max_len)))
            grown[:, :, : cache.shape[2]] = cache
            self._caches[name] = grown
            self._bindings.clear()

    def _rows(self, name: str, slots: slice) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(self._caches[name][slots])

    def _binding(self, slots: slice) -> ort.IOBinding:
        """A binding for these slots, with experts and caches already bound."""
        key = (slots.start, slots.stop)
        if key not in self._bindings:
            binding = self._session.io_binding()
            for name, value in self._experts.items():
                binding.bind_ortvalue_input(name, value)
            for name in self._caches:
                binding.bind_ortvalue_input(name, self._rows(name, slots))
            self._bindings[key] = binding
        return self._bindings[key]

    def _bind_outputs(self, binding: ort.IOBinding, slots: slice, wanted: list[str]) -> None:
        binding.clear_binding_outputs()
        for name in wanted:
            binding.bind_output(name)
        for name in self._caches:
            binding.bind_ortvalue_output(advanced_name(name), self._rows(name, slots))
