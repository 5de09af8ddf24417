"""The plugin library: its toolchain, a build on demand, and what is checked before an engine stands on it.

python -m clover_trt.engine.plugins h200 gb300      # build for these presets and print where the libraries are
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from clover_trt.errors import EngineError
from clover_trt.graph.contract import VERSION

if TYPE_CHECKING:
    from clover_trt.config import ModelConfig
    from clover_trt.engine.profiles import Precision

LIBRARY = "libclover_plugins.so"
HOST_LIBRARY = "libclover_kernels_host.so"
HOST_PRESETS = ("host", "host-sanitized")
EXPECTED = f"clover-plugins 0.1.0 contract {VERSION}"
FLOAT32, BFLOAT16, E4M3, E2M1 = 0, 1, 2, 3  # enum clover_type of plugins/kernels/c_api.h
SOURCE_TREE = Path(__file__).parents[2] / "plugins"
LONGEST_BLOCK = 64  # of a row's noisy tokens, as the adapters have it


class GdnShape(ctypes.Structure):
    """GdnShape of plugins/kernels/gdn_block_scan.h."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("rows", "tokens", "k_heads", "v_heads", "k_dim", "v_dim", "kernel", "right_kernel", "block")
    ]


class MoeShape(ctypes.Structure):
    """MoeShape of plugins/kernels/expert_subset_moe.h."""

    _fields_ = [
        (name, ctypes.c_int) for name in ("rows", "tokens", "hidden", "experts", "top_k", "width", "shared_width", "block")
    ]


class HeadShape(ctypes.Structure):
    """HeadShape of plugins/kernels/confidence_head.h."""

    _fields_ = [(name, ctypes.c_int) for name in ("rows", "positions", "hidden", "vocabulary", "history", "biases", "candidates")]


def is_loadable(path: Path) -> bool:
    """Whether this machine can load a library at all: not when it was compiled for another processor."""
    try:
        ctypes.CDLL(str(path.absolute()))
    except OSError:
        return False
    return True


def open_library(path: Path) -> ctypes.CDLL:
    """Load a plugin library and check its version.

    Raises:
        EngineError: it is not there, can't be loaded, or is of another version.
    """
    if not path.exists():
        raise EngineError(f"{path}: not found; expected a plugin library ({LIBRARY})")
    try:
        library = ctypes.CDLL(str(path.absolute()))
        version = library.clover_plugins_version
    except (OSError, AttributeError) as error:
        raise EngineError(f"{path}: not a plugin library of this project ({error})") from None
    version.restype = ctypes.c_char_p
    found = version().decode()
    if found != EXPECTED:
        raise EngineError(f"{path}: is {found}, expected {EXPECTED}; build it again from this version's plugins/")
    for name in ("gdn", "moe", "head"):
        getattr(library, f"clover_{name}_unsupported").restype = ctypes.c_char_p
        getattr(library, f"clover_{name}_workspace").restype = ctypes.c_size_t
    return library


def check_geometry(library: ctypes.CDLL, model: ModelConfig, precision: Precision) -> None:
    """Refuse a model whose sizes the kernels are not written for.

    Raises:
        EngineError: with what each operation expects and what the model has.
    """
    block = model.block_size
    gdn = GdnShape(
        1,
        block,
        model.linear_num_key_heads,
        model.linear_num_value_heads,
        model.linear_key_head_dim,
        model.linear_value_head_dim,
        model.linear_conv_kernel_dim,
        model.linear_right_conv_kernel_dim,
        block,
    )
    moe = MoeShape(
        1,
        block,
        model.hidden_size,
        model.num_experts,
        model.num_experts_per_tok,
        model.moe_intermediate_size,
        model.shared_expert_intermediate_size,
        block,
    )
    head = HeadShape(1, block, model.hidden_size, model.vocab_size, 0, 0, 1)
    banks = {"fp8": E4M3, "nvfp4": E2M1}.get(precision, BFLOAT16)
    problems = []
    for name, shape, wrong in (
        ("GdnBlockScan", gdn, library.clover_gdn_unsupported(ctypes.byref(gdn))),
        ("ExpertSubsetMoe", moe, library.clover_moe_unsupported(banks, ctypes.byref(moe))),
        ("ConfidenceHead", head, library.clover_head_unsupported(ctypes.byref(head))),
    ):
        if wrong is not None:
            sizes = ", ".join(f"{field[0]} {getattr(shape, field[0])}" for field in shape._fields_[2:])
            problems.append(f"{name} expects {wrong.decode()}, the model has {sizes}")
    if problems:
        raise EngineError(f"the plugins do not support this model: {'; '.join(problems)}; build with --operations functions")


def source_folder() -> Path:
    """The sources of the library: in the source tree, or in the installed package."""
    return SOURCE_TREE if SOURCE_TREE.is_dir() else Path(str(files("clover_trt") / "plugins"))


def find_nvcc() -> Path | None:
    """CUDA's compiler: $CUDACXX, on PATH, in /usr/local/cuda, or installed from PyPI."""
    named = os.environ.get("CUDACXX") or shutil.which("nvcc")
    places = [Path(named)] if named else [Path("/usr/local/cuda/bin/nvcc")]
    spec = importlib.util.find_spec("nvidia")
    places += [Path(each) / "cu13" / "bin" / "nvcc" for each in (spec.submodule_search_locations or [])] if spec else []
    return next((place for place in places if place.exists()), None)


def find_tensorrt_headers() -> Path | None:
    """The folder of NvInfer.h: $TENSORRT_INCLUDE_DIR, the system's, or that of the kernel-lens package."""
    places = [Path(os.environ["TENSORRT_INCLUDE_DIR"])] if "TENSORRT_INCLUDE_DIR" in os.environ else []
    places += [Path("/usr/include") / machine for machine in ("x86_64-linux-gnu", "aarch64-linux-gnu")]
    places.append(Path("/usr/local/tensorrt/include"))
    spec = importlib.util.find_spec("kernel_lens")
    places += [Path(each) / "include" / "tensorrt" for each in (spec.submodule_search_locations or [])] if spec else []
    return next((place for place in places if (place / "NvInfer.h").exists()), None)


def missing_tools(adapters: bool = True) -> str | None:
    """What this machine lacks to compile the library, with the adapters for TensorRT or without; None when nothing."""
    if find_nvcc() is None:
        return "no nvcc: install the CUDA toolkit, or: pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl"
    if adapters and find_tensorrt_headers() is None:
        return "no NvInfer.h: install TensorRT's headers, set TENSORRT_INCLUDE_DIR, or: pip install --no-deps kernel-lens"
    return _missing_programs()


def _missing_programs() -> str | None:
    path = _path()
    absent = [name for name in ("cmake", "ninja") if shutil.which(name, path=path) is None]
    return f"no {' or '.join(absent)}: install them, or: pip install cmake ninja" if absent else None


def library_for(
    model: ModelConfig, precision: Precision, preset: str, given: Path | None, progress: Callable[[str], None]
) -> Path | None:
    """The library that an engine is to use: the one given, or one compiled now; None where that can't be done.

    Raises:
        EngineError: it is of another version, does not support the model, or does not compile.
    """
    missing = missing_tools()
    if given is None and missing is not None:
        progress(f"the plugin library is compiled when the engine is finished: {missing}")
        return None
    path = given or build_library(preset, progress)
    check_geometry(open_library(path), model, precision)
    return path


def build_library(
    preset: str, progress: Callable[[str], None] = lambda _: None, *, everything: bool = False, adapters: bool = True
) -> Path:
    """Configure and compile a preset of plugins/CMakePresets.json; what is up to date is not compiled again.

    Args:
        preset: h200, gb300, portable, host or host-sanitized.
        progress: called with a line at the start of each stage.
        everything: the tests too.
        adapters: with those for TensorRT, which need its headers.

    Returns:
        the library.

    Raises:
        EngineError: a tool is missing, or the compiler's own message.
    """
    source = source_folder()
    options, library = [], LIBRARY
    if preset in HOST_PRESETS:
        library = HOST_LIBRARY
    else:
        missing = missing_tools(adapters)
        if missing is not None:
            raise EngineError(missing)
        options = [
            f"-DCMAKE_CUDA_COMPILER={find_nvcc()}",
            f"-DTENSORRT_INCLUDE_DIR={find_tensorrt_headers() if adapters else ''}",
        ]
    folder = (source.parent / "out" / "plugins" if source == SOURCE_TREE else _cache()) / preset
    progress(f"compiling the plugin library ({preset})")
    _run(source, "cmake", "--preset", preset, "-B", str(folder), *options)
    target = [] if everything else ["--target", library.removeprefix("lib").removesuffix(".so")]
    _run(source, "cmake", "--build", str(folder), *target)
    return folder / library


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clover-trt" / "plugins"


def _path() -> str:
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


def _run(source: Path, *command: str) -> None:
    missing = _missing_programs()
    if missing is not None:
        raise EngineError(missing)
    path = _path()
    program = shutil.which(command[0], path=path)
    assert program is not None
    environment = {**os.environ, "PATH": path}
    done = subprocess.run([program, *command[1:]], cwd=source, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        output = f"{done.stdout}\n{done.stderr}"
        errors = [line for line in output.splitlines() if "error" in line.lower() or "fatal" in line.lower()][:5]
        raise EngineError(f"the plugin library can't be compiled: {'; '.join(errors) or output[-600:]}")


if __name__ == "__main__":
    try:
        for name in sys.argv[1:]:
            print(build_library(name, print, everything=True))
    except EngineError as failure:
        sys.exit(f"error: {failure}")
