"""Facts of an engine package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clover_trt.engine.package import MANIFEST, open_package


def describe_engine(folder: Path) -> dict[str, Any]:
    """Build settings, geometry, bytes by file and provenance of a package, which is verified first.

    Raises:
        EngineError, ConfigError: the package is not usable.
    """
    package = open_package(folder, unfinished=True)
    sizes = {name: (package.folder / name).stat().st_size for name in (*package.manifest["files"], MANIFEST)}
    model = package.model.model_dump(mode="json")
    model.pop("layer_types")
    return {
        "engine": {
            "folder": str(folder),
            "finished": package.manifest["finished"],
            "files": "verified against the manifest",
            "bytes": sum(sizes.values()),
        },
        "build": package.build.model_dump(mode="json"),
        "geometry": {**model, "valid_tokens": package.valid_tokens},
        "bytes by file": sizes,
        "source": package.manifest["source"],
        "tools": package.manifest["tools"],
    }
