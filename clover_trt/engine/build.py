"""Build an engine package: what every target has in common."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.config import BuildConfig, ModelConfig, OptimizationProfile, validated
from clover_trt.engine import build_cpu, build_tensorrt
from clover_trt.engine.package import (
    GRAPH,
    GRAPH_DATA,
    RECORD,
    EnginePackage,
    carry_files,
    open_package,
    package_writer,
    write_metadata,
)
from clover_trt.engine.plugins import EXPECTED, LIBRARY, build_library, check_geometry, is_loadable, library_for, open_library
from clover_trt.engine.profiles import GpuProfile, Precision, check_precision, read_profile
from clover_trt.engine.trt_library import find_library, local_compute_capabilities
from clover_trt.errors import EngineError
from clover_trt.graph.bodies_tensorrt import CHUNK
from clover_trt.graph.export import save

Progress = Callable[[str], None]
TOOLS = ("torch", "onnx", "onnxscript", "onnxruntime", "safetensors")
CANDIDATES = (1, 1, 64)  # candidates a position: smallest, usual, largest
BIASES = (1, 2, 1024)  # n-gram bans are biases too


class Gate(Protocol):
    """What stands between a written package and its name: a comparison with the reference model."""

    def record(self, checkpoint: Checkpoint, settings: BuildConfig, folder: Path, progress: Progress) -> None:
        """Write what the reference computes into the folder of a package, for a check here or on another machine."""
        ...

    def check(self, folder: Path) -> None:
        """Raise an `EngineError` when the finished package in `folder` computes something else."""
        ...


def build(
    checkpoint: Checkpoint,
    out: Path,
    *,
    gpu: str = "cpu",
    precision: str | None = None,
    max_seq_len: int | None = None,
    compute_capability: str | None = None,
    operations: str | None = None,
    plugin_library: Path | None = None,
    progress: Progress = lambda _: None,
    log: Progress = lambda _: None,
    gate: Gate | None = None,
) -> bool:
    """Build the package at `out`; on any failure nothing is left there, and an existing package stays.

    Args:
        checkpoint: source of weights and configuration.
        out: folder of the package; an existing package is replaced at the end.
        gpu: name of a GPU profile, or a YAML file with one.
        precision: one that the profile offers; its first when None.
        max_seq_len: longest prompt and response together; the model's own limit when None.
        compute_capability: instead of the profile's, as "8.9".
        operations: "plugins" or "functions" instead of the profile's.
        plugin_library: a compiled plugin library; compiled here when None and the tools are there.
        progress: called with a line at the start of each stage.
        log: called with every message of the TensorRT library.
        gate: adds its record to the package, and checks the package before it gets its name when this machine can run it.

    Returns:
        Whether the package is finished. A target whose TensorRT library is not on this machine ends in a build bundle, an
        unfinished package that `resume` finishes where the library is.

    Raises:
        CheckpointError, EngineError, ConfigError: what is wrong and what to do.
    """
    profile = with_changes(read_profile(gpu), compute_capability, operations)
    config = checkpoint.config
    settings = build_settings(profile, config, check_precision(profile, precision), max_seq_len)
    library = None if profile.backend == "onnxruntime" else find_library(profile.backend)
    if library is not None:
        library.check_target(settings.compute_capability)
    plugins = _plugins(profile, config, settings, plugin_library, progress)
    with package_writer(out) as work:
        progress("reading the checkpoint")
        source = {"name": checkpoint.folder.name, "fingerprint": checkpoint.fingerprint()}
        tools = {name: importlib.metadata.version(name) for name in TOOLS}
        finished = True
        if profile.backend == "onnxruntime":
            build_cpu.write_engine(work, checkpoint, source, progress)
        else:
            build_tensorrt.write_graph(work, checkpoint, settings, source, progress)
            if plugins is not None:
                shutil.copyfile(plugins, work / LIBRARY)
                tools["plugins"] = EXPECTED
            finished = library is not None and (settings.operations == "functions" or plugins is not None)
            if library is not None and finished:
                tools |= build_tensorrt.write_plan(work, settings, library, progress, log)
        carry_files(checkpoint.folder, work)
        if gate is not None:
            gate.record(checkpoint, settings, work, progress)
        progress("hashing files")
        write_metadata(
            work,
            model=config,
            build=settings,
            valid_tokens=checkpoint.valid_tokens,
            source=source,
            tools=tools,
            finished=finished,
        )
        if gate is not None and finished and _can_run(settings):
            progress("comparing with the reference")
            gate.check(work)
    return finished


def export(
    checkpoint: Checkpoint,
    out: Path,
    *,
    gpu: str = "cpu",
    precision: str | None = None,
    max_seq_len: int | None = None,
    operations: str | None = None,
    progress: Progress = lambda _: None,
) -> None:
    """Write the ONNX graph of a target alone into the new folder `out`: `step.onnx` and its constants; expert banks and other
    bound weights are inputs, without values.

    Raises:
        CheckpointError, EngineError, ConfigError: what is wrong; nothing is left.
    """
    profile = with_changes(read_profile(gpu), None, operations)
    settings = build_settings(profile, checkpoint.config, check_precision(profile, precision), max_seq_len)
    if out.exists():
        raise EngineError(f"{out}: exists; choose another --out or remove it")
    with package_writer(out) as work:
        progress("reading the checkpoint")
        source = {"name": checkpoint.folder.name, "fingerprint": checkpoint.fingerprint()}
        progress("tracing the block step")
        if profile.backend == "onnxruntime":
            model = build_cpu.prepared_graph(checkpoint, source)
        else:
            model, _ = build_tensorrt.prepared_graph(checkpoint, settings, source)
        progress("writing weights")
        save(model, work / GRAPH, GRAPH_DATA)


def resume(
    bundle: Path, *, progress: Progress = lambda _: None, log: Progress = lambda _: None, gate: Gate | None = None
) -> None:
    """Finish a build bundle in place; on any failure it stays as it was.

    Args:
        bundle: its folder.
        progress: called with a line at the start of each stage.
        log: called with every message of the TensorRT library.
        gate: checks the finished engine against the bundle's record.

    Raises:
        EngineError: it is not a bundle, or this machine can't finish it.
    """
    package = open_package(bundle, unfinished=True)
    settings = package.build
    if package.manifest["finished"]:
        raise EngineError(f"{bundle}: finished already")
    library = find_library(settings.backend)
    if library is None:
        raise EngineError(f"{bundle}: needs {settings.backend} and a GPU of compute capability {settings.compute_capability}")
    library.check_target(settings.compute_capability)
    with package_writer(bundle) as work:
        for name in package.manifest["files"]:
            os.link(bundle / name, work / name)
        tools = dict(package.manifest["tools"])
        if settings.operations == "plugins":
            _ready_plugins(work, package, progress)
            tools["plugins"] = EXPECTED
        tools |= build_tensorrt.write_plan(work, settings, library, progress, log)
        progress("hashing files")
        (work / "config.json").unlink()  # a link to the bundle's own
        write_metadata(
            work,
            model=package.model,
            build=settings,
            valid_tokens=package.valid_tokens,
            source=package.manifest["source"],
            tools=tools,
            finished=True,
        )
        if gate is not None and RECORD in package.manifest["files"] and _can_run(settings):
            progress("comparing with the reference")
            gate.check(work)


def _can_run(settings: BuildConfig) -> bool:
    """Whether this machine has what an engine runs on."""
    return settings.backend == "onnxruntime" or settings.compute_capability in local_compute_capabilities()


def _plugins(
    profile: GpuProfile, model: ModelConfig, settings: BuildConfig, given: Path | None, progress: Progress
) -> Path | None:
    """The plugin library of a build, None when it has none or it must be compiled later."""
    if settings.operations == "functions":
        if given is not None:
            raise EngineError("--plugin-library: this target's operations have bodies of their own; leave it out")
        return None
    assert profile.plugin_preset is not None
    assert settings.precision != "float32"
    return library_for(model, settings.precision, profile.plugin_preset, given, progress)


def _ready_plugins(work: Path, package: EnginePackage, progress: Progress) -> None:
    """Make sure that the bundle in `work` has a plugin library that this machine can load; one from another kind of processor
    is compiled again.

    Raises:
        EngineError: it has none and none can be compiled.
    """
    path, preset = work / LIBRARY, read_profile(package.build.gpu).plugin_preset
    if path.exists() and is_loadable(path):
        open_library(path)
        return
    assert preset is not None
    made = build_library(preset, progress)
    path.unlink(missing_ok=True)
    shutil.copyfile(made, path)
    check_geometry(open_library(path), package.model, package.build.precision)


def with_changes(profile: GpuProfile, compute_capability: str | None, operations: str | None) -> GpuProfile:
    """The profile with another compute capability or form of the operations.

    Raises:
        ConfigError: the changed profile is not valid.
        EngineError: the profile's engines do not run on a GPU.
    """
    if profile.backend == "onnxruntime" and (compute_capability or operations):
        raise EngineError(f"--gpu {profile.name}: --compute-capability and --operations are for engines that run on a GPU")
    changes = {"compute_capability": compute_capability, "operations": operations}
    given = {name: value for name, value in changes.items() if value is not None}
    return validated(GpuProfile, {**profile.model_dump(), **given}, f"profile {profile.name}")


def build_settings(profile: GpuProfile, model: ModelConfig, precision: Precision, max_seq_len: int | None) -> BuildConfig:
    """The settings of a build for this profile and geometry.

    Raises:
        EngineError: `max_seq_len` is out of range, or NVFP4 is asked for without plugins.
    """
    limit, block = model.max_position_embeddings, model.block_size
    if max_seq_len is not None and not 0 < max_seq_len <= limit:
        raise EngineError(f"max_seq_len = {max_seq_len} is out of range: the model takes 1 to {limit} tokens")
    if precision == "nvfp4" and profile.operations == "functions":
        raise EngineError("--precision nvfp4: needs the plugins, which this build is to do without; use fp8")
    length = max_seq_len or limit
    chunk = min(profile.prefill_chunk, -(-length // block) * block)
    is_static = profile.backend != "onnxruntime"
    return BuildConfig(
        gpu=profile.name,
        backend=profile.backend,
        precision=precision,
        max_seq_len=length,
        max_input_len=max(1, length - block),
        max_batch_size=profile.rows.max,
        opt_batch_size=profile.rows.opt,
        max_num_tokens=profile.rows.max * max(2 * block, chunk),
        opt_num_tokens=profile.rows.opt * block,
        block_size=block,
        prefill_chunk=chunk,
        compute_capability=profile.compute_capability,
        operations=profile.operations,
        workspace_mb=profile.workspace_mb,
        # A call writes all its rows behind the prefix, committed or not, so the buffer outlasts the longest prefix by a call.
        cache_len=length + max(2 * block, chunk + block) if is_static else None,
        optimization_profiles=_optimization_profiles(profile, block, chunk, length) if is_static else (),
    )


def _optimization_profiles(profile: GpuProfile, block: int, chunk: int, length: int) -> tuple[OptimizationProfile, ...]:
    """Denoising passes, fused passes and prefill chunks; the last takes one row, as the scheduler sends it.

    TensorRT-RTX gets one profile for all, since it compiles for the shapes it meets when it runs. Its usual row is one
    chunk of the delta rule: version 1.7 crashes while building when the usual length makes a Scan of several steps.
    """
    rows = (profile.rows.min, profile.rows.opt, profile.rows.max)
    longest = max(chunk + block, 2 * block)  # a prompt's last chunk and the first pass over its first block
    common = {"positions": (1, block, 2 * block), "history": (1, 64, length), "biases": BIASES, "candidates": CANDIDATES}
    if profile.backend == "tensorrt-rtx":
        axes = {"batch": rows, "tokens": (1, min(block, CHUNK), longest), **common}
        return (OptimizationProfile(name="any", axes=axes),)
    return (
        OptimizationProfile(name="denoise", axes={"batch": rows, "tokens": (1, block, block), **common}),
        OptimizationProfile(name="fused", axes={"batch": rows, "tokens": (1, 2 * block, 2 * block), **common}),
        OptimizationProfile(name="prefill", axes={"batch": (1, 1, 1), "tokens": (1, chunk, longest), **common}),
    )
