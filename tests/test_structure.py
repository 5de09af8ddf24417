"""The rules that keep the code base a road."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400


def test_imports_only_go_left() -> None:
    program = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([program, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_files_can_be_read_in_one_sitting() -> None:
    long = {path.name: n for path in ROOT.glob("clover_trt/**/*.py") if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert not long


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="not a git checkout")
def test_a_new_profile_is_not_ignored_and_an_engine_is() -> None:
    def ignored(path: str) -> bool:
        return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, check=False).returncode == 0

    assert not ignored("build/profiles/new.yaml")
    assert ignored("build/engines/x/step.onnx")
    assert ignored("out/bench/cpu.json")


def test_every_package_is_named_in_the_structure_page() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    packages = [path.name for path in (ROOT / "clover_trt").iterdir() if (path / "__init__.py").exists()]
    assert [name for name in packages if f"`{name}/`" not in page] == []
