"""The model repository of an engine: `triton_repo/` with the options filled in."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path
from string import Template

from clover_trt.serving.options import ServeOptions

MODELS = ("clover", "clover_unary", "tensorrt_llm")
SOURCE_TREE = Path(__file__).parents[2] / "triton_repo"


def repository_source() -> Path:
    """`triton_repo/` of the source tree, or of the installed package."""
    return SOURCE_TREE if SOURCE_TREE.is_dir() else Path(str(files("clover_trt") / "triton_repo"))


def render_repository(target: Path, options: ServeOptions, drain_file: Path | None = None) -> None:
    """Write a repository for `options` into the folder `target`."""
    values = {
        "engine": str(options.engine.absolute()),
        "slots": str(options.slots),
        "max_queue": str(options.max_queue),
        "cache_budget_mb": str(options.cache_budget_mb),
        "prefix_cache_mb": str(options.prefix_cache_mb),
        "threads": str(options.threads),
        "max_prompt_bytes": str(options.max_prompt_bytes),
        "unary_instances": str(options.unary_instances),
        "drain_file": "" if drain_file is None else str(drain_file.absolute()),
    }
    for name in MODELS:
        source = repository_source() / name
        (target / name / "1").mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / "1" / "model.py", target / name / "1" / "model.py")
        text = (source / "config.pbtxt").read_text()
        (target / name / "config.pbtxt").write_text(Template(text).substitute({k: _quoted(v) for k, v in values.items()}))


def _quoted(value: str) -> str:
    """A value inside a quoted string of protobuf's text format."""
    return value.replace("\\", "\\\\").replace('"', '\\"')
