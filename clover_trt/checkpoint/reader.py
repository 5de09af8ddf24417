"""A Hugging Face checkpoint folder, read lazily: headers first, each tensor when asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clover_trt.checkpoint import fp8, nvfp4
from clover_trt.checkpoint.names import (
    EXPERT,
    canonical,
    expected_tensors,
    expert_parts,
    is_added,
    read_tensor_map,
)
from clover_trt.checkpoint.safetensors_file import TensorInfo, read_header
from clover_trt.config import ModelConfig, read_json
from clover_trt.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SHIPPED = "clover-tiny"
LISTED = 12  # names shown of each kind of problem


def checkpoint_folder(name: str | Path) -> Path:
    """The folder of a checkpoint: a path, or `clover-tiny` for the model that ships with the package."""
    if str(name) == SHIPPED and not Path(name).exists():
        return Path(str(files("clover_trt.assets") / "clover_tiny"))
    folder = Path(name)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder; expected a Hugging Face checkpoint folder or '{SHIPPED}'")
    return folder


class Checkpoint:
    """Tensors of a checkpoint under our names.

    Opening reads json files and safetensors headers only and checks that every tensor of the model is there
    in its shape. No pickle is ever opened and no code from the folder is run.

    Args:
        name: folder, or `clover-tiny`.
        tensor_map: json file that names Clover's added tensors, see `read_tensor_map`.

    Raises:
        ConfigError, CheckpointError: what is wrong, in which file.
    """

    def __init__(self, name: str | Path, tensor_map: Path | None = None) -> None:
        self.folder = checkpoint_folder(name)
        self.config = ModelConfig.from_folder(self.folder)
        self.stored = self._stored(read_tensor_map(tensor_map))
        self.expected = expected_tensors(self.config)
        # A plain Qwen3.5-MoE checkpoint has none of Clover's tensors: the prefix is exact, blocks are not trained.
        self.neutral = self.config.is_backbone_only and not any(is_added(name) for name in self.stored)
        self._check()

    def _stored(self, tensor_map: dict[str, str]) -> dict[str, TensorInfo]:
        renamed: dict[str, str] = {}
        for ours, theirs in tensor_map.items():
            for i in range(self.config.num_hidden_layers):
                renamed[theirs.replace(".N.", f".{i}.")] = ours.replace(".N.", f".{i}.")
        tensors: dict[str, TensorInfo] = {}
        for path, promised in self._shards().items():
            header = read_header(path)
            lost = sorted(set(promised) - set(header))
            if lost:
                raise CheckpointError(f"{path}: {_listed(lost)} listed in {INDEX} but not in the file; download both again")
            for stored_name, info in header.items():
                name = renamed.get(stored_name) or canonical(stored_name)
                if name is not None:
                    if name in tensors:
                        raise CheckpointError(f"{path}: tensor {name!r} is also in {tensors[name].path.name}; expected it once")
                    tensors[name] = info
        return tensors

    def _shards(self) -> dict[Path, list[str]]:
        """Weight files, with the names the index promises in each."""
        index = self.folder / INDEX
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
                raise CheckpointError(f"{index}: expected 'weight_map' from tensor names to file names")
            shards: dict[Path, list[str]] = {}
            for name, file in weight_map.items():
                if Path(file).name != file:
                    raise CheckpointError(f"{index}: {name}: file name {file!r} must not contain a folder")
                shards.setdefault(self.folder / file, []).append(name)
            return shards
        single = self.folder / "model.safetensors"
        if single.exists():
            return {single: []}
        others = sorted(path.name for path in self.folder.glob("*.bin")) + sorted(path.name for path in self.folder.glob("*.pt"))
        hint = f"; found {_listed(others)}: pickle files are never opened, convert them to safetensors" if others else ""
        raise CheckpointError(f"{self.folder}: no model.safetensors and no {INDEX}{hint}")

    def parts(self, name: str) -> dict[str, tuple[int, ...]]:
        """The stored tensors that make up `name`: itself, or one tensor an expert."""
        if ".mlp.experts." in name and name not in self.stored:
            return expert_parts(name, self.config)
        return {name: self.expected[name]}

    def _check(self) -> None:
        wanted: dict[str, tuple[int, ...]] = {}
        for name in self.expected:
            if not (self.neutral and is_added(name)):
                wanted |= self.parts(name)
        missing = [f"{name} {list(shape)}" for name, shape in wanted.items() if name not in self.stored]
        wanted |= self._packed(wanted)
        scales = self._scales(wanted)
        wanted |= scales
        missing += [f"{name} {list(shape)}" for name, shape in scales.items() if name not in self.stored]
        unexpected = [f"{name} {list(info.shape)}" for name, info in self.stored.items() if name not in wanted]
        if self.config.tie_word_embeddings:
            unexpected = [entry for entry in unexpected if not entry.startswith("lm_head.weight ")]
        wrong = [
            f"{name} (expected {list(shape)}, found {list(self.stored[name].shape)})"
            for name, shape in wanted.items()
            if name in self.stored and self.stored[name].shape != shape
        ]
        if missing or unexpected or wrong:
            problems = (("missing", missing), ("unexpected", unexpected), ("wrong shape", wrong))
            text = "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in problems if names)
            hint = "; name Clover's added tensors with --tensor-map" if any(is_added(m.split()[0]) for m in missing) else ""
            raise CheckpointError(f"{self.folder}: tensors do not fit config.json: {text}{hint}")

    def _scales(self, wanted: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The scales that belong to the stored FP8 and NVFP4 tensors among `wanted`, whose shapes are those in the file."""
        scales: dict[str, tuple[int, ...]] = {}
        for name, shape in wanted.items():
            dtype = self.stored[name].dtype if name in self.stored else None
            if dtype == "F8_E4M3":
                stacked = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
                size = fp8.bank_scale_shape(name, self.config) if stacked else fp8.scale_shape(shape)
                scales[name + fp8.SCALE_SUFFIX] = size
            elif dtype == "U8":
                scales[f"{name}_scale"] = (*shape[:-1], 2 * shape[-1] // nvfp4.GROUP)
                scales[f"{name}_scale_2"] = ()
        return scales

    def _packed(self, wanted: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The stored shapes of NVFP4 matrices among `wanted`: two values a byte."""
        return {
            name: (*shape[:-1], shape[-1] // 2)
            for name, shape in wanted.items()
            if name in self.stored and self.stored[name].dtype == "U8" and EXPERT.match(name) and nvfp4.fits(shape)
        }

    @property
    def quantized(self) -> bool:
        """Whether weights are stored as FP8 or NVFP4."""
        return any(info.dtype == "F8_E4M3" for info in self.stored.values())

    def load(self, name: str) -> Tensor:
        """Read one tensor of the model, in its stored dtype; an FP8 weight as the bfloat16 it stands for.

        Raises:
            CheckpointError: the file cannot be read, or the tensor holds a value that is not finite.
        """
        if self.neutral and is_added(name):
            return self._neutral(name)
        parts = [self._dequantized(part) for part in self.parts(name)]
        if len(parts) == 1 and tuple(parts[0].shape) == self.expected[name]:
            tensor = parts[0]
        else:
            tensor = torch.cat([part.reshape(-1) for part in parts]).view(self.expected[name])
        return tensor

    def load_quantized(self, name: str) -> tuple[Tensor, Tensor]:
        """Read an FP8 weight and its scales as they are stored, or quantize one that is stored in higher precision.

        Returns:
            e4m3 in the shape of the tensor, bfloat16 scales of its blocks (see `fp8.bank_scale_shape` for experts).

        Raises:
            CheckpointError: the file cannot be read, or the tensor holds a value that is not finite.
        """
        assert fp8.is_quantized(name), name
        parts = list(self.parts(name))
        if any(self.stored[part].dtype == "U8" for part in parts):
            raise CheckpointError(f"{self.folder}: {name} is NVFP4; build fp8 from the bfloat16 checkpoint")
        if self.stored[parts[0]].dtype != "F8_E4M3":
            return self._quantized(name)
        weights = [self._read(self.stored[part]) for part in parts]
        scales = [self._read(self.stored[part + fp8.SCALE_SUFFIX]).to(torch.bfloat16) for part in parts]
        bad = sum(int((~torch.isfinite(each.float())).sum()) for each in (*weights, *scales))
        if bad:
            raise CheckpointError(f"{self.folder}: not finite (NaN or infinity): {name} ({bad} values)")
        if len(parts) == 1:
            return weights[0], scales[0]
        shape = self.expected[name]
        scale = torch.cat([each.reshape(-1) for each in scales]).view(fp8.bank_scale_shape(name, self.config))
        whole = torch.cat([each.reshape(-1).view(torch.uint8) for each in weights]).view(fp8.FP8)
        return whole.view(shape), scale

    def _quantized(self, name: str) -> tuple[Tensor, Tensor]:
        try:
            if ".mlp.experts." not in name:
                return fp8.quantize(self.load(name))
            one = fp8.quantize_bank if name.endswith("gate_up_proj") else fp8.quantize
            pairs = [one(matrix) for matrix in self.experts(name)]
        except ValueError:
            raise CheckpointError(f"{self.folder}: not finite (NaN or infinity): {name}") from None
        whole = torch.stack([weight.view(torch.uint8) for weight, _ in pairs]).view(fp8.FP8)
        return whole, torch.stack([scale for _, scale in pairs])

    def load_nvfp4(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Read a stacked expert tensor `[E, rows, columns]` as NVFP4, as it is stored or quantized from higher precision.

        Returns:
            packed values `[E, rows, columns / 2]` uint8, scales `[E, rows, columns / 16]` e4m3, and the scales of whole matrices,
            float32 `[E, 2]` (gate and up) or `[E, 1]`.

        Raises:
            CheckpointError: the file cannot be read, the tensor is FP8, does not divide into groups of 16, or holds a value that
                is not finite.
        """
        E, rows, columns = self.expected[name]
        if not nvfp4.fits((rows, columns)):
            raise CheckpointError(f"{self.folder}: {name} has {columns} columns, expected a multiple of {nvfp4.GROUP} for NVFP4")
        matrices = 2 if name.endswith("gate_up_proj") else 1
        packed = torch.empty(E, matrices, rows // matrices, columns // 2, dtype=torch.uint8)
        scale = torch.empty(E, matrices, rows // matrices, columns // nvfp4.GROUP, dtype=fp8.FP8)
        whole = torch.empty(E, matrices)
        for i, parts in enumerate(self._nvfp4_matrices(name, matrices)):
            for target, part in zip((packed, scale, whole), parts, strict=True):
                target[divmod(i, matrices)] = part
        if not (torch.isfinite(scale.float()).all() and torch.isfinite(whole).all()):
            raise CheckpointError(f"{self.folder}: not finite (NaN or infinity): scales of {name}")
        return packed.flatten(1, 2), scale.flatten(1, 2), whole

    def _nvfp4_matrices(self, name: str, matrices: int) -> Iterator[tuple[Tensor, ...]]:
        """Packed values and both scales of one matrix after another: gate and up, or down, of each expert."""
        parts = list(self.parts(name))
        kinds = {self.stored[part].dtype for part in parts}
        if "F8_E4M3" in kinds:
            raise CheckpointError(f"{self.folder}: {name} is FP8; build nvfp4 from the bfloat16 checkpoint")
        if kinds == {"U8"}:
            yield from (tuple(self._read(self.stored[part + end]) for end in ("", "_scale", "_scale_2")) for part in parts)
            return
        try:
            yield from (nvfp4.quantize(matrix) for bank in self.experts(name) for matrix in bank.chunk(matrices))
        except ValueError:
            raise CheckpointError(f"{self.folder}: not finite (NaN or infinity): {name}") from None

    def experts(self, name: str) -> Iterator[Tensor]:
        """The matrices of a stacked expert tensor, one expert in memory at a time, in their stored dtype."""
        if name in self.stored:
            info = self.stored[name]
            with self._opened(info) as file:
                stacked = file.get_slice(info.stored_name)
                yield from (stacked[expert] for expert in range(info.shape[0]))
            return
        parts = list(self.parts(name))
        each = len(parts) // self.config.num_experts
        for begin in range(0, len(parts), each):
            yield torch.cat([self._read(self.stored[part]) for part in parts[begin : begin + each]])

    def stored_dtype(self, name: str) -> str:
        """The dtype (safetensors name) that `load` gives a tensor."""
        if self.neutral and is_added(name):
            return "F32"
        return self.stored[next(iter(self.parts(name)))].dtype

    def weight_files(self) -> list[Path]:
        """The safetensors files, in the order of their names."""
        return sorted({info.path for info in self.stored.values()})

    def _dequantized(self, part: str) -> Tensor:
        tensor = self._read(self.stored[part])
        if tensor.dtype == torch.uint8:
            scale, whole = (self._read(self.stored[part + suffix]) for suffix in ("_scale", "_scale_2"))
            return nvfp4.dequantize(tensor, scale, whole)
        if tensor.dtype != fp8.FP8:
            return tensor
        scale = self._read(self.stored[part + fp8.SCALE_SUFFIX])
        return (fp8.dequantize_bank if part.endswith("gate_up_proj") else fp8.dequantize)(tensor, scale)

    def _read(self, info: TensorInfo) -> Tensor:
        with self._opened(info) as file:
            tensor: Tensor = file.get_tensor(info.stored_name)
        return tensor

    @contextmanager
    def _opened(self, info: TensorInfo) -> Iterator[Any]:
        """The file of a tensor; what goes wrong inside names the file and the tensor."""
        try:
            with safe_open(info.path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.path}: tensor {info.stored_name!r} cannot be read: {error}") from None

    def _neutral(self, name: str) -> Tensor:
        """What an added tensor is without training: no right convolution, a plain attention scale, an unbiased memory."""
        shape = self.expected[name]
        return (
            torch.full(shape, self.config.linear_key_head_dim**0.5) if name.endswith("block_temperature") else torch.zeros(shape)
        )

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Read tensors one after another (all of the model when `names` is None), checking that values are finite.

        Raises:
            CheckpointError: lists every tensor with non-finite values, after all have been read.
        """
        broken = []
        for name in self.expected if names is None else names:
            tensor = self.load(name)
            bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
            if bad:
                broken.append(f"{name} {list(tensor.shape)} ({bad} values)")
            yield name, tensor
        if broken:
            raise CheckpointError(f"{self.folder}: not finite (NaN or infinity) in {len(broken)} tensors: {_listed(broken)}")

    @cached_property
    def valid_tokens(self) -> int:
        """Vocabulary rows that the tokenizer knows; all rows when there is no tokenizer."""
        path = self.folder / "tokenizer.json"
        if not path.exists():
            return self.config.vocab_size
        data = read_json(path)
        vocab = data.get("model", {}).get("vocab", {})
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        ids += [token["id"] for token in data.get("added_tokens", [])]
        known = max(ids, default=-1) + 1
        if not 0 < known <= self.config.vocab_size:
            raise CheckpointError(f"{path}: highest token id {known - 1} does not fit vocab_size {self.config.vocab_size}")
        return known

    def fingerprint(self) -> str:
        """SHA-256 over names, dtypes, shapes and bytes of all tensors, whatever the files they lie in."""
        digest = hashlib.sha256(json.dumps(self.config.to_hf(), sort_keys=True).encode())
        for name in sorted(self.stored):
            info = self.stored[name]
            digest.update(f"{name} {info.dtype} {list(info.shape)}\n".encode())
            with info.path.open("rb") as file:
                file.seek(info.begin)
                left = info.nbytes
                while left:
                    chunk = file.read(min(left, 1 << 24))
                    if not chunk:
                        raise CheckpointError(f"{info.path}: ended while reading {name!r}; download it again")
                    digest.update(chunk)
                    left -= len(chunk)
        return digest.hexdigest()


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:LISTED])
    return f"{shown} and {len(names) - LISTED} more" if len(names) > LISTED else shown
