"""The parity record: what the reference model computes on a short fixed input, kept with the engine it was built for.

A build writes the record where the checkpoint is. Wherever the engine is finished, and whenever asked for later, it runs the
same steps: caches are compared layer by layer (a layer's keys, values and states follow from everything before it), and the
last layers and the paths of unresolved tokens by the log-probabilities of candidates. No checkpoint is needed for that.

parity.safetensors   `step.S.logprobs` [B, L, k] and `row.R.CACHE`, all float32: rows of tokens 0 to the prefix, or a state;
                     `rounding.NAME` [1], the relative error of the reference itself in the engine's precision
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from clover_trt.checkpoint import fp8, nvfp4
from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import BuildConfig
from clover_trt.engine.package import RECORD, EnginePackage, open_package
from clover_trt.engine.profiles import Precision
from clover_trt.errors import EngineError
from clover_trt.graph.contract import cache_names
from clover_trt.model.block_step import new_cache
from clover_trt.model.head import confidence_head, vocabulary_mask
from clover_trt.model.lengths import Lengths
from clover_trt.model.load import compute_dtype, empty_model
from clover_trt.model.moe import SparseMoe, route, shared_expert
from clover_trt.model.rotary import rotary_angles
from clover_trt.parity.compare import Check, mixed_steps, relative_error
from clover_trt.parity.torch_session import control_tensors
from clover_trt.runtime.generate import open_session
from clover_trt.runtime.session import Session, Snapshot, StepInput, StepOutput, is_row_cache

ROWS, CANDIDATES = 3, 8
# Limits of relative errors, see docs/numerics.md: of an engine in float32; of others a multiple of what rounding alone does,
# in bounds: below the first no difference matters, and an engine beyond the second computes something else.
FLOAT32_LIMIT, ROUNDING_FACTOR, BOUNDS = 1e-4, 4.0, (0.02, 0.6)
Steps = list[StepInput]


def record_steps(valid_tokens: int, settings: BuildConfig) -> Steps:
    """The fixed input: three rows of different lengths, then a fused, a denoising and a committing row in one step."""
    steps = mixed_steps(valid_tokens, settings.block_size, longest=settings.max_seq_len)
    return [dataclasses.replace(step, candidates=CANDIDATES, want_logits=False) for step in steps]


def some_rows(step: StepInput, first: int, count: int) -> StepInput:
    """The rows `first` to `first + count` of a step that starts at slot 0."""
    rows = slice(first, first + count)
    fields = {name: getattr(step.controls, name)[rows] for name in step.controls.__dataclass_fields__}
    longest = int((step.commit_len + step.noisy_len)[rows].max())
    return dataclasses.replace(
        step,
        input_ids=step.input_ids[rows, :longest],
        commit_len=step.commit_len[rows],
        noisy_len=step.noisy_len[rows],
        logit_index=step.logit_index[rows],
        expert_mass=step.expert_mass[rows],
        controls=dataclasses.replace(step.controls, **fields),
        first_slot=first,
    )


@torch.no_grad()
def write_record(
    checkpoint: Checkpoint, settings: BuildConfig, folder: Path, progress: Callable[[str], None] = lambda _: None
) -> None:
    """Run the reference over the record's steps and write the record into the folder of an engine.

    It runs in float32, and for an engine of lower precision in that too, to know how much rounding alone may change. Layers are
    on the outside and steps on the inside: every weight is read once, and one layer without its experts is in memory at a time.

    Args:
        checkpoint: the weights.
        settings: of the build; for a quantized engine the weights are rounded as it holds them.
        folder: of the engine that is being built.
        progress: called with a line a layer.

    Raises:
        CheckpointError: a tensor cannot be read or is not finite.
    """
    config = checkpoint.config
    steps = record_steps(checkpoint.valid_tokens, settings)
    weights = _Weights(checkpoint, settings.precision)
    runs = [_Run(weights, steps, torch.float32)]
    if settings.precision != "float32":
        runs.append(_Run(weights, steps, torch.bfloat16))
    for number in range(config.num_hidden_layers):
        progress(f"reference: layer {number + 1}/{config.num_hidden_layers}")
        inputs = [each for run in runs for each in run.mix(number)]
        for run, outputs in zip(runs, _split(_mixture(weights, number, inputs), len(steps)), strict=True):
            run.add(number, outputs)
    record, *rounded = [run.finish() for run in runs]
    for other in rounded:
        errors = {f"rounding.{name}": relative_error(other[name].numpy(), exact.numpy()) for name, exact in record.items()}
        record |= {name: torch.tensor([error], dtype=torch.float32) for name, error in errors.items()}
    save_file(record, folder / RECORD)


class _Weights:
    """Weights of a checkpoint as an engine holds them."""

    def __init__(self, checkpoint: Checkpoint, precision: Precision) -> None:
        self.checkpoint, self.precision = checkpoint, precision
        self.quantized = precision in ("fp8", "nvfp4")

    def read(self, module: torch.nn.Module, prefix: str, dtype: torch.dtype) -> None:
        """Give a module of the empty model its weights, those of experts aside."""
        names = [prefix + name for name, _ in module.named_parameters() if ".experts." not in name]
        rounded = [name for name in names if self.quantized and fp8.is_quantized(name)]
        state = dict(self.checkpoint.tensors(name for name in names if name not in rounded))
        state |= {name: fp8.dequantize(*self.checkpoint.load_quantized(name)) for name in rounded}
        converted = {name.removeprefix(prefix): tensor.to(compute_dtype(name, dtype)) for name, tensor in state.items()}
        module.load_state_dict(converted, assign=True, strict=False)
        module.requires_grad_(False)

    def experts(self, name: str) -> Iterator[Tensor]:
        """The matrices of a bank, one after another."""
        if self.precision == "nvfp4":
            yield from (nvfp4.dequantize_bank(*bank) for bank in zip(*self.checkpoint.load_nvfp4(name), strict=True))
        elif self.quantized:
            restore = fp8.dequantize_bank if name.endswith("gate_up_proj") else fp8.dequantize
            yield from (restore(weight, scale) for weight, scale in zip(*self.checkpoint.load_quantized(name), strict=True))
        elif self.checkpoint.quantized:
            yield from self.checkpoint.load(name)
        else:
            yield from self.checkpoint.experts(name)


class _MoeInput(NamedTuple):
    """Tokens of one step of one run before a mixture, with the router and the shared expert that they meet."""

    x: Tensor  # [B, T, H]
    mlp: SparseMoe
    lengths: Lengths
    mass: Tensor
    round_activations: bool


class _Run:
    """The steps in one precision, layer by layer."""

    def __init__(self, weights: _Weights, steps: Steps, dtype: torch.dtype) -> None:
        self.weights, self.steps, self.dtype = weights, steps, dtype
        self.config = weights.checkpoint.config
        self.model = empty_model(weights.checkpoint)
        embedding = weights.checkpoint.load("model.embed_tokens.weight")
        self.states = [embedding[torch.from_numpy(step.input_ids)].to(dtype) for step in steps]
        self.lengths, prefix = [], torch.zeros(ROWS, dtype=torch.int32)
        for step in steps:
            self.lengths.append(Lengths(prefix, torch.from_numpy(step.commit_len), torch.from_numpy(step.noisy_len)))
            prefix = prefix + self.lengths[-1].commit_len
        self.prefix = prefix
        self.record: dict[str, Tensor] = {}

    def mix(self, number: int) -> list[_MoeInput]:
        """A layer's attention or Gated DeltaNet over all steps; what its experts are to see of each."""
        layer: Any = self.model.model.layers[number]
        config = self.config
        self.weights.read(layer, f"model.layers.{number}.", self.dtype)
        inputs = []
        cache = new_cache(config, number, ROWS, int(self.prefix.max()) + 2 * config.block_size, self.dtype)
        for s, (step, rows) in enumerate(zip(self.steps, self.lengths, strict=True)):
            positions = rows.prefix_len[:, None].long() + torch.arange(self.states[s].shape[1])
            self.states[s], cache = layer.mix(self.states[s], cache, rows, rotary_angles(positions, config))
            seen = layer.post_attention_layernorm(self.states[s])
            rounds = self.weights.precision == "fp8" and self.dtype != torch.float32
            inputs.append(_MoeInput(seen, layer.mlp, rows, torch.from_numpy(step.expert_mass), rounds))
        for name, tensor in zip(cache_names(config)[number], cache, strict=True):
            for row in range(ROWS):
                kept = tensor[row, :, : int(self.prefix[row])] if is_row_cache(name) else tensor[row]
                self.record[f"row.{row}.{name}"] = kept.float().contiguous().clone()
        return inputs

    def add(self, number: int, outputs: list[Tensor]) -> None:
        """What a layer's experts gave, onto the states; the layer's memory is given back."""
        self.model.model.layers[number].to("meta")
        self.states = [state + output for state, output in zip(self.states, outputs, strict=True)]

    def finish(self) -> dict[str, Tensor]:
        """The record's values, in float32."""
        tied = self.config.tie_word_embeddings
        weight = self.weights.checkpoint.load("model.embed_tokens.weight" if tied else "lm_head.weight").to(self.dtype)
        self.weights.read(self.model.model.norm, "model.norm.", self.dtype)
        mask = vocabulary_mask(self.config, self.weights.checkpoint.valid_tokens)
        for s, step in enumerate(self.steps):
            index = torch.from_numpy(step.logit_index)[..., None].expand(-1, -1, self.config.hidden_size)
            last = self.model.model.norm(self.states[s].gather(1, index))
            head = confidence_head(last, weight, mask, control_tensors(step.controls), CANDIDATES)
            self.record[f"step.{s}.logprobs"] = head.candidate_logprobs.contiguous()
        return self.record


def _split(values: list[Tensor], size: int) -> list[list[Tensor]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def _mixture(weights: _Weights, number: int, inputs: list[_MoeInput]) -> list[Tensor]:
    """The mixture of experts of a layer over several inputs, one expert in memory at a time."""
    flat, outs, chosen = [], [], []
    for each in inputs:
        score, index = route(F.linear(each.x, each.mlp.gate.weight), each.lengths, each.mass, each.mlp.top_k)
        chosen.append((score.flatten(0, 1), index.flatten(0, 1)))
        flat.append((_rounded(each.x) if each.round_activations else each.x).flatten(0, 1))
        one = each.mlp.shared_expert
        matrices = (one.gate_proj.weight, one.up_proj.weight, one.down_proj.weight, each.mlp.shared_expert_gate.weight)
        outs.append(shared_expert(each.x.flatten(0, 1), *matrices))
    at = f"model.layers.{number}.mlp.experts."
    for expert, (gate_up, down) in enumerate(
        zip(weights.experts(f"{at}gate_up_proj"), weights.experts(f"{at}down_proj"), strict=True)
    ):
        for x, out, (score, index) in zip(flat, outs, chosen, strict=True):
            token, slot = (index == expert).nonzero(as_tuple=True)
            if len(token):
                gate, up = F.linear(x[token], gate_up.to(x.dtype)).chunk(2, dim=-1)
                part = F.linear(F.silu(gate) * up, down.to(x.dtype)) * score[token, slot, None].to(x.dtype)
                out.index_add_(0, token, part)
    return [out.view_as(each.x) for out, each in zip(outs, inputs, strict=True)]


def _rounded(x: Tensor) -> Tensor:
    """Activations as FP8 kernels take them: e4m3 with a scale for each token and 128 channels."""
    groups = F.pad(x.float(), (0, -x.shape[-1] % fp8.BLOCK)).unflatten(-1, (-1, fp8.BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / fp8.LARGEST
    rounded: Tensor = fp8.widen((groups / scale).to(fp8.FP8)) * scale
    return rounded.flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def compare_with_record(package: EnginePackage, session: Session | None = None) -> list[Check]:
    """Run an engine over the steps of its record.

    Args:
        package: the engine.
        session: empty, over the package, with up to three slots; a new one when None.

    Raises:
        EngineError: the package has no record.
    """
    path = package.folder / RECORD
    if not path.exists():
        raise EngineError(f"{package.folder}: has no {RECORD}: it was built with --no-gate; build it again without")
    record = load_file(path)
    session = session or open_session(package, slots=min(ROWS, package.build.max_batch_size))
    checks: list[Check] = []
    for s, step in enumerate(record_steps(package.valid_tokens, package.build)):
        outputs = list(_run(session, step, alone=s == 0))
        found = np.concatenate([output.candidate_logprobs for output in outputs])
        key = f"step.{s}.logprobs"
        error = _error(found, record[key][: session.slots])
        checks.append(Check(f"log-probabilities of step {s + 1}", error, _limit(package, record, [key])))
    snapshots = [session.save(row, 0) for row in range(session.slots)]
    for layer, names in enumerate(cache_names(package.model)):
        for name in names:
            keys = [f"row.{row}.{name}" for row in range(session.slots)]
            pairs = zip(snapshots, (record[key] for key in keys), strict=True)
            error = max(_error(_cache(snapshot, name, expected), expected) for snapshot, expected in pairs)
            kind = name.split(".")[0].replace("_", " ")
            checks.append(Check(f"layer {layer}, {kind}", error, _limit(package, record, keys)))
    return checks


def _limit(package: EnginePackage, record: dict[str, NDArray[np.float32]], keys: list[str]) -> float:
    if package.build.precision == "float32":
        return FLOAT32_LIMIT
    rounding = max(float(record[f"rounding.{key}"][0]) for key in keys)
    return float(np.clip(ROUNDING_FACTOR * rounding, *BOUNDS))


def _run(session: Session, step: StepInput, alone: bool) -> Iterator[StepOutput]:
    """A step over all rows at once, or row by row as prefills go."""
    for first in range(session.slots if alone else 1):
        yield session.step(some_rows(step, first, 1 if alone else session.slots))


def _error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return relative_error(found, expected) if np.isfinite(found).all() else float("inf")


def _cache(snapshot: Snapshot, name: str, expected: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a slot holds in a cache, in float32; the bytes of a GPU's cache are bfloat16 when they are two a value."""
    data = np.ascontiguousarray((snapshot.rows if is_row_cache(name) else snapshot.states)[name]).reshape(-1).view(np.uint8)
    if data.nbytes == 2 * expected.size:
        wide = np.zeros((expected.size, 2), np.uint16)
        wide[:, 1] = data.view(np.uint16)
        data = wide.reshape(-1).view(np.uint8)
    return data.view(np.float32).reshape(expected.shape)


class ParityGate:
    """The gate of `clover_trt.engine.build`: an engine with a layer that is off is refused."""

    def record(self, checkpoint: Checkpoint, settings: BuildConfig, folder: Path, progress: Callable[[str], None]) -> None:
        """Write the record into the folder of an engine that is being built."""
        write_record(checkpoint, settings, folder, progress)

    def check(self, folder: Path) -> None:
        """Compare a finished engine with its record.

        Raises:
            EngineError: names the layers that are off.
        """
        off = [check for check in compare_with_record(open_package(folder)) if not check.passed]
        if off:
            shown = ", ".join(f"{check.name} ({check.error:.2g}, limit {check.limit:g})" for check in off[:8])
            raise EngineError(f"the built engine differs from the reference model in {len(off)} places: {shown}")
