"""The engine package on disk: a folder with everything that serving needs, checked byte by byte when opened.

config.json            version, pretrained_config, build_config (as TensorRT-LLM engine folders)
step.onnx, step.data   the block step and its weights, those of `experts.safetensors` aside (ONNX Runtime)
experts.safetensors    expert banks, bound as inputs (ONNX Runtime)
rank0.engine, …        plan and bound weights (TensorRT), see engine/build_tensorrt.py
parity.safetensors     what the reference computes on a short fixed input, see parity/record.py
tokenizer.json, …      files of the checkpoint that serving needs, licence files included
manifest.json          SHA-256 of every file, the source checkpoint, tool versions, whether the package is finished

A build that can't be finished on this machine leaves the same folder, marked unfinished: a build bundle.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover_trt import __version__
from clover_trt.config import BuildConfig, GenerationConfig, ModelConfig, read_json, validated
from clover_trt.errors import ConfigError, EngineError

MANIFEST = "manifest.json"
GRAPH = "step.onnx"
GRAPH_DATA = "step.data"
EXPERTS = "experts.safetensors"
PLAN = "rank0.engine"
BOUND = "rank0_managed_weights.safetensors"  # TensorRT-LLM's name for weights that are not in the plan
RECORD = "parity.safetensors"
FORMAT = 2
# TensorRT-LLM's names; NVFP4 experts beside FP8 matrices are its mixed precision.
QUANT_ALGO = {"fp8": "FP8_BLOCK_SCALES", "nvfp4": "MIXED_PRECISION"}
TRT_MODULES = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}  # Python modules
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json",
    "vocab.json", "merges.txt", "added_tokens.json",
)  # fmt: skip
LICENCES = ("LICENSE*", "NOTICE*", "ATTRIBUTION*")


@dataclass(frozen=True)
class EnginePackage:
    """An opened, verified engine package."""

    folder: Path
    model: ModelConfig
    build: BuildConfig
    generation: GenerationConfig
    valid_tokens: int
    manifest: dict[str, Any]


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_package(folder: Path) -> bool:
    """Whether `folder` looks like an engine package (finished or not)."""
    return (Path(folder) / MANIFEST).exists()


def open_package(folder: str | Path, *, unfinished: bool = False) -> EnginePackage:
    """Open a package and verify every file against the manifest.

    Args:
        folder: the package.
        unfinished: take a build bundle too.

    Raises:
        EngineError: not a package, unfinished, of another format, or a file is missing, changed or added.
        ConfigError: `config.json` is not valid.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise EngineError(f"{folder}: not a folder; expected an engine package written by 'clover-trt build'")
    if not is_package(folder):
        raise EngineError(f"{folder}: no {MANIFEST}; expected an engine package written by 'clover-trt build'")
    try:
        manifest = read_json(folder / MANIFEST)
        data = read_json(folder / "config.json")
    except ConfigError as error:
        raise EngineError(f"{error}; build the engine again") from None
    if manifest.get("format") != FORMAT:
        raise EngineError(f"{folder}: package format {manifest.get('format')!r}, expected {FORMAT}; build the engine again")
    if not (unfinished or manifest.get("finished") is True):
        raise EngineError(f"{folder}: an unfinished build bundle; finish it with: clover-trt build --resume {folder}")
    _verify(folder, manifest)
    where = str(folder / "config.json")
    pretrained = data.get("pretrained_config")
    if not isinstance(pretrained, dict) or not isinstance(data.get("build_config"), dict):
        raise EngineError(f"{where}: expected pretrained_config and build_config; build the engine again")
    return EnginePackage(
        folder,
        ModelConfig.from_hf(pretrained, where),
        validated(BuildConfig, data["build_config"], where),
        GenerationConfig.from_folder(folder),
        int(pretrained["valid_tokens"]),
        manifest,
    )


def _verify(folder: Path, manifest: dict[str, Any]) -> None:
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise EngineError(f"{folder / MANIFEST}: expected 'files' with a SHA-256 each; build the engine again")
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    if present != set(files):
        missing, extra = sorted(set(files) - present), sorted(present - set(files))
        raise EngineError(
            f"{folder}: files differ from {MANIFEST}: missing {missing}, not listed {extra}; build the engine again"
        )
    for name, expected in files.items():
        found = sha256_of(folder / name)
        if found != expected:
            raise EngineError(
                f"{folder / name}: changed since the build: SHA-256 {found[:12]}…, {MANIFEST} says {expected[:12]}…; "
                "build the engine again"
            )


@contextmanager
def package_writer(out: Path) -> Iterator[Path]:
    """A temporary sibling of `out` to write into, renamed to `out` at the end; removed when the build fails.

    Raises:
        EngineError: `out` exists and is not an engine package (which would be replaced).
    """
    out = Path(out).absolute()
    if out.exists() and not (out.is_dir() and (is_package(out) or not any(out.iterdir()))):
        raise EngineError(f"{out}: exists and is not an engine package; choose another --out or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"
    work.mkdir()
    try:
        yield work
        if out.exists():
            old = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.old"
            out.rename(old)
            work.rename(out)
            shutil.rmtree(old)
        else:
            work.rename(out)
    finally:
        if work.exists():
            shutil.rmtree(work)


def write_metadata(
    work: Path,
    *,
    model: ModelConfig,
    build: BuildConfig,
    valid_tokens: int,
    source: dict[str, str],
    tools: dict[str, str],
    finished: bool,
) -> None:
    """Write `config.json`, then `manifest.json` over all files in `work`; the last step of a build."""
    config = {
        "version": __version__,
        "pretrained_config": {
            **model.to_hf(),
            "architecture": "CloverForBlockDiffusion",
            "dtype": "float32" if build.precision == "float32" else "bfloat16",
            "logits_dtype": "float32",
            "head_size": model.head_dim,
            "norm_epsilon": model.rms_norm_eps,
            "position_embedding_type": "rope_gpt_neox",
            "quantization": {"quant_algo": QUANT_ALGO.get(build.precision), "kv_cache_quant_algo": None},
            "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
            "valid_tokens": valid_tokens,
        },
        "build_config": build.model_dump(mode="json"),
    }
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    files = {path.name: sha256_of(path) for path in sorted(work.iterdir())}
    manifest = {
        "format": FORMAT, "finished": finished, "files": files, "source": source, "tools": tools, "gpu": build.gpu
    }  # fmt: skip
    (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def carry_files(source: Path, work: Path) -> None:
    """Copy tokenizer, generation and licence files of a checkpoint."""
    names = [source / name for name in CARRIED if (source / name).exists()]
    for pattern in LICENCES:
        names += sorted(source.glob(pattern))
    for path in names:
        shutil.copyfile(path, work / path.name)
