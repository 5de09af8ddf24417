from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine import build_cpu as module
from clover_trt.engine.build import build
from clover_trt.engine.inspect import describe_engine
from clover_trt.engine.package import EnginePackage, open_package
from clover_trt.errors import EngineError


@pytest.fixture
def copy(small_engine: EnginePackage, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_engine.folder, tmp_path / "engine"))


def test_a_package_says_what_it_is_and_carries_licence_files(small_engine: EnginePackage, small_folder: Path) -> None:
    facts = describe_engine(small_engine.folder)
    assert facts["source"]["fingerprint"] == Checkpoint(small_folder).fingerprint()
    assert {"config.json", "step.onnx", "step.data", "experts.safetensors", "LICENSE"} <= set(facts["bytes by file"])
    config = json.loads((small_engine.folder / "config.json").read_text())
    assert set(config) == {"version", "pretrained_config", "build_config"}


@pytest.mark.parametrize("name", ["step.onnx", "step.data", "experts.safetensors", "config.json", "LICENSE"])
def test_one_changed_byte_is_refused(copy: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(EngineError, match=f"{name}: changed since the build|{name}: not valid"):
        open_package(copy)


def test_missing_added_and_foreign_files_are_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "note.txt").write_text("x")
    with pytest.raises(EngineError, match=r"not listed \['note.txt'\]"):
        open_package(copy)
    (copy / "note.txt").unlink()
    (copy / "step.data").unlink()
    with pytest.raises(EngineError, match=r"missing \['step.data'\]"):
        open_package(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(EngineError, match=r"no manifest\.json"):
        open_package(copy)
    with pytest.raises(EngineError, match="not a folder"):
        open_package(tmp_path / "nowhere")


def test_a_failed_build_leaves_nothing_and_keeps_the_old_package(
    small_folder: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("made to fail")

    monkeypatch.setattr(module, "pack_experts", fail)
    for target in (tmp_path / "fresh", copy):
        with pytest.raises(EngineError, match="made to fail"):
            build(Checkpoint(small_folder), target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]
    open_package(copy)


def test_a_killed_build_leaves_nothing_that_looks_finished(small_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "engine"
    code = (
        "import os, sys, pathlib\n"
        "from clover_trt.engine import build_cpu as m\n"
        "from clover_trt.checkpoint.reader import Checkpoint\n"
        "from clover_trt.engine.build import build\n"
        "m.pack_experts = lambda *_: os._exit(9)\n"
        "build(Checkpoint(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(small_folder), str(target)], capture_output=True, check=False)
    assert done.returncode == 9
    assert not target.exists()
    (left,) = tmp_path.iterdir()
    with pytest.raises(EngineError, match=r"no manifest\.json"):
        open_package(left)


def test_a_folder_that_is_not_a_package_is_never_replaced(small_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(EngineError, match="exists and is not an engine package"):
        build(Checkpoint(small_folder), tmp_path)
    assert (tmp_path / "precious.txt").read_text() == "x"


def test_max_seq_len_is_checked(small_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="takes 1 to 512"):
        build(Checkpoint(small_folder), tmp_path / "e", max_seq_len=513)
