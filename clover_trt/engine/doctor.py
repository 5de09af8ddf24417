"""What this machine can build and run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

from clover_trt.engine.plugins import find_nvcc


@dataclass(frozen=True)
class Finding:
    """One part of a working installation: what was found, and what to do when it is not there."""

    part: str
    present: bool
    found: str
    next_step: str = ""


def _package(part: str, distribution: str, next_step: str) -> Finding:
    try:
        return Finding(part, True, f"{distribution} {importlib.metadata.version(distribution)}")
    except importlib.metadata.PackageNotFoundError:
        return Finding(part, False, "not installed", next_step)


def _program(part: str, program: str, version_flag: str, next_step: str) -> Finding:
    path = shutil.which(program)
    if path is None:
        return Finding(part, False, f"no {program} on PATH", next_step)
    try:
        lines = subprocess.run([path, version_flag], capture_output=True, text=True, timeout=20).stdout.strip().splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return Finding(part, False, f"{path} does not answer", next_step)
    return Finding(part, True, lines[-1] if lines else path)


def _gpu() -> Finding:
    step = "engines for a GPU need an NVIDIA driver; without one, build with --gpu cpu"
    if shutil.which("nvidia-smi") is None:
        return Finding("GPU", False, "no nvidia-smi on PATH", step)
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return Finding("GPU", False, "nvidia-smi does not answer", step)
    lines = done.stdout.strip().splitlines()
    return Finding("GPU", True, "; ".join(lines)) if done.returncode == 0 and lines else Finding("GPU", False, "no GPU", step)


def _nvcc() -> Finding:
    path = find_nvcc()
    step = "install the CUDA toolkit, or pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-cccl"
    return _program("nvcc", "nvcc" if path is None else str(path), "--version", step)


def _triton() -> Finding:
    part, step = "Triton Inference Server", "use NVIDIA's Triton container, or pip install 'clover-trt[serve]'"
    if shutil.which("tritonserver") is None:
        return _package(part, "nvidia-pytriton", step)
    return _program(part, "tritonserver", "--version", step)


def examine() -> list[Finding]:
    """Look for every part; nothing is changed and nothing is loaded."""
    cores = len(os.sched_getaffinity(0))
    return [
        Finding("machine", True, f"{platform.machine()}, {cores} cores, Python {platform.python_version()}"),
        _package("run CPU engines", "onnxruntime", "pip install clover-trt"),
        _package("build engines", "torch", "pip install 'clover-trt[build]'"),
        _package("export graphs", "onnxscript", "pip install 'clover-trt[build]'"),
        _gpu(),
        _package("TensorRT", "tensorrt", "use NVIDIA's TensorRT container, or install TensorRT 10.14 or later"),
        _package("TensorRT-RTX", "tensorrt-rtx-cu13-bindings", "pip install 'clover-trt[tensorrt-rtx]'"),
        _nvcc(),
        _triton(),
        _package("Triton client", "tritonclient", "pip install 'clover-trt[serve]'"),
    ]
