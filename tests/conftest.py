from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clover_trt.checkpoint.reader import Checkpoint
from clover_trt.engine.build import build
from clover_trt.engine.package import EnginePackage, open_package
from clover_trt.model.block_step import CloverModel
from clover_trt.model.load import load_model
from tests.small import random_state, write_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", random_state())


@pytest.fixture(scope="session")
def small_model(small_folder: Path) -> CloverModel:
    return load_model(Checkpoint(small_folder))


@pytest.fixture(scope="session")
def small_engine(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> EnginePackage:
    target = tmp_path_factory.mktemp("engines") / "small"
    build(Checkpoint(small_folder), target)
    return open_package(target)


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> EnginePackage:
    target = tmp_path_factory.mktemp("engines") / "tiny"
    build(Checkpoint("clover-tiny"), target)
    return open_package(target)
