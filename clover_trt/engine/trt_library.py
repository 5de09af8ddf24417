"""The one place that knows how TensorRT 10.14 and later, 11, and TensorRT-RTX differ."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover_trt.engine.package import TRT_MODULES
from clover_trt.errors import EngineError

OLDEST = {"tensorrt": (10, 14), "tensorrt-rtx": (1, 3)}
Progress = Callable[[str], None]


@dataclass(frozen=True)
class TrtLibrary:
    """A TensorRT Python module that is on this machine and can build."""

    trt: Any
    backend: str
    version: str

    @property
    def builds_anywhere(self) -> bool:
        """Whether it builds for a GPU that is not in this machine."""
        return self.backend == "tensorrt-rtx"

    def check_target(self, wanted: str | None) -> None:
        """Refuse a compute capability that this library can't build for.

        Raises:
            EngineError: with those it can.
        """
        if self.builds_anywhere:
            possible = [_dotted(name) for name in self.trt.ComputeCapability.__members__ if name.startswith("SM")]
        else:
            possible = local_compute_capabilities()
        if wanted not in possible:
            raise EngineError(
                f"compute capability {wanted}: {self.backend} {self.version} can build for {', '.join(possible)} here"
            )

    def new_builder(self, problems: list[str], log: Callable[[str], None]) -> tuple[Any, Any]:
        """A builder and its logger: errors are collected in `problems`, every message goes to `log`."""
        logger = collecting_logger(self.trt, problems, log)
        return self.trt.Builder(logger), logger

    def new_network(self, builder: Any) -> Any:
        """A strongly typed network; from TensorRT 11 on there is no other kind and no flag for it."""
        flags = self.trt.NetworkDefinitionCreationFlag
        strong = flags.__members__.get("STRONGLY_TYPED")
        return builder.create_network(1 << int(strong) if strong is not None else 0)

    def load_plugins(self, path: Path) -> None:
        """Put the plugins of a library into TensorRT's registry, where the parser looks for them.

        Raises:
            EngineError: TensorRT does not take the library.
        """
        try:
            loaded = self.trt.get_plugin_registry().load_library(str(path))
        except RuntimeError as error:
            raise EngineError(f"{self.backend} {self.version} does not take {path.name}: {error}") from None
        if not loaded:
            raise EngineError(f"{self.backend} {self.version} does not take {path.name}")

    def let_plugins_write_inputs(self, config: Any) -> None:
        """Allow plugin outputs that are the storage of an input, as states are; from TensorRT 11 on it needs no leave."""
        feature = self.trt.PreviewFeature.__members__.get("ALIASED_PLUGIN_IO_10_03")
        if feature is not None:
            config.set_preview_feature(feature, True)

    def new_config(self, builder: Any, compute_capability: str, workspace_mb: int, progress: Progress) -> tuple[Any, Any]:
        """A builder configuration for a target, and its progress monitor, which must live as long."""
        trt, config = self.trt, builder.create_builder_config()
        if workspace_mb:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_mb << 20)
        if self.builds_anywhere:
            config.num_compute_capabilities = 1
            name = "SM" + compute_capability.replace(".", "")
            config.set_compute_capability(trt.ComputeCapability.__members__[name], 0)

        class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                trt.IProgressMonitor.__init__(self)
                self.steps: dict[str, int] = {}

            def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
                self.steps[phase_name] = num_steps

            def step_complete(self, phase_name: str, step: int) -> bool:
                progress(f"building the plan: {phase_name} {step + 1}/{self.steps.get(phase_name, 0)}")
                return True

            def phase_finish(self, phase_name: str) -> None:
                self.steps.pop(phase_name, None)

        monitor = Monitor()
        config.progress_monitor = monitor
        return config, monitor


def collecting_logger(trt: Any, problems: list[str], log: Callable[[str], None] = lambda _: None) -> Any:
    """A logger of TensorRT that keeps errors in `problems` and passes every message on."""
    serious = (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR)

    class Collector(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            log(f"[{severity.name}] {message}")
            if severity in serious:
                problems.append(message)

    return Collector()


def timing_cache_file(library: TrtLibrary, compute_capability: str) -> Path:
    """Where kernel timings of this library and GPU are kept between builds: in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "clover-trt" / f"{library.backend}-{library.version}-sm{compute_capability.replace('.', '')}.timing"


def load_timings(config: Any, path: Path) -> None:
    """Give a builder configuration the timings of earlier builds; a file that TensorRT does not take is left out."""
    data = path.read_bytes() if path.exists() else b""
    if not config.set_timing_cache(config.create_timing_cache(data), False):
        config.set_timing_cache(config.create_timing_cache(b""), False)


def save_timings(config: Any, path: Path) -> None:
    """Keep the timings of a build, in one move, so that builds side by side do not spoil the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(config.get_timing_cache().serialize())
    os.replace(partial, path)


def find_library(backend: str) -> TrtLibrary | None:
    """The library of a backend, or None when it is not here (or, for TensorRT itself, when no GPU is).

    Raises:
        EngineError: the library is too old.
    """
    for name in TRT_MODULES[backend]:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if not hasattr(module, "Builder"):  # a shim whose libraries were never downloaded
            continue
        version = str(module.__version__)
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers < OLDEST[backend]:
            needed = ".".join(map(str, OLDEST[backend]))
            raise EngineError(f"{backend} {version} is too old; expected {needed} or later")
        library = TrtLibrary(module, backend, version)
        return library if library.builds_anywhere or local_compute_capabilities() else None
    return None


def local_compute_capabilities() -> list[str]:
    """Compute capabilities of the GPUs in this machine, as the driver's own tool says."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(done.stdout.split())) if done.returncode == 0 else []


def _dotted(name: str) -> str:
    """`SM120` as `12.0`."""
    digits = name.removeprefix("SM")
    return f"{digits[:-1]}.{digits[-1]}"
