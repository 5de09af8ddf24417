"""GPU profiles: what an engine is built for, read from YAML files and validated field by field."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, model_validator

from clover_trt.config import Frozen, validated
from clover_trt.errors import EngineError

Precision = Literal["float32", "bfloat16", "fp8", "nvfp4"]
Backend = Literal["onnxruntime", "tensorrt", "tensorrt-rtx"]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Rows(Frozen):
    """Smallest, usual and largest number of rows (sequences) in a pass."""

    min: Count
    opt: Count
    max: Count

    @model_validator(mode="after")
    def _ordered(self) -> Rows:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"expected min <= opt <= max, found {self.min}, {self.opt}, {self.max}")
        return self


class GpuProfile(Frozen):
    """One target. `peak_tflops` by precision and `bandwidth_gb_s` are dense and of one GPU, with their source."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    description: str
    backend: Backend
    compute_capability: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")] | None = None
    plugin_preset: str | None = None
    memory_gb: Positive | None = None
    bandwidth_gb_s: Positive | None = None
    peak_tflops: dict[Precision, Positive] = Field(default={})
    sources: dict[str, str] = Field(default={})
    precisions: Annotated[tuple[Precision, ...], Field(min_length=1)]
    kv_dtype: Literal["float32", "bfloat16"]
    state_dtype: Literal["float32"]
    operations: Literal["plugins", "functions"]
    workspace_mb: Annotated[int, Field(ge=0)] = 0
    rows: Rows
    prefill_chunk: Annotated[int, Field(ge=64, multiple_of=32)]
    cuda_graph_rows: tuple[Count, ...] = ()
    slots_by_context: dict[Count, Count] = Field(default={})

    @model_validator(mode="after")
    def _complete(self) -> GpuProfile:
        if self.backend != "onnxruntime":
            needed = ("compute_capability", "memory_gb", "bandwidth_gb_s")
            missing = [name for name in needed if getattr(self, name) is None]
            if missing:
                raise ValueError(f"a {self.backend} profile needs {', '.join(missing)}")
        if self.operations == "plugins" and (self.backend != "tensorrt" or self.plugin_preset is None):
            raise ValueError("operations: plugins needs backend tensorrt and a plugin_preset")
        if self.cuda_graph_rows and max(self.cuda_graph_rows) > self.rows.max:
            raise ValueError(f"cuda_graph_rows go to {max(self.cuda_graph_rows)}, rows.max is {self.rows.max}")
        return self


def profiles_folder() -> Path:
    """Where the profiles lie: in the source tree, or in the installed package."""
    source = Path(__file__).parents[2] / "build" / "profiles"
    return source if source.is_dir() else Path(str(files("clover_trt") / "profiles"))


def profile_names() -> list[str]:
    """Names of the profiles that ship with the project."""
    return sorted(path.stem for path in profiles_folder().glob("*.yaml"))


def read_profile(name: str) -> GpuProfile:
    """The profile of a name, or of a YAML file of the user's.

    Raises:
        EngineError: there is no such profile or file, or it is not YAML.
        ConfigError: a field is missing, unknown or out of range; all such fields are named.
    """
    own = Path(name)
    path = own if own.suffix in (".yaml", ".yml") else profiles_folder() / f"{name}.yaml"
    if path != own and name not in profile_names():
        raise EngineError(f"--gpu {name}: unknown target; expected one of {', '.join(profile_names())}, or a YAML file")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineError(f"--gpu {name}: no such file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EngineError(f"{path}: not a readable YAML file ({error})") from None
    if not isinstance(data, dict):
        raise EngineError(f"{path}: expected fields of a GPU profile, found {type(data).__name__}")
    return validated(GpuProfile, data, str(path))


def check_precision(profile: GpuProfile, precision: str | None) -> Precision:
    """The precision to build in: the profile's first when None.

    Raises:
        EngineError: the profile does not offer it; with the reason where there is one.
    """
    if precision is None:
        return profile.precisions[0]
    for offered in profile.precisions:
        if offered == precision:
            return offered
    reason = "; ONNX Runtime's CPU provider has no bfloat16 or FP8 matrix kernels" if profile.backend == "onnxruntime" else ""
    raise EngineError(
        f"--precision {precision}: not offered by profile {profile.name}{reason}; expected {', '.join(profile.precisions)}"
    )
