"""Fixtures that the tests of the kernels share with the others."""

from tests.conftest import small_folder, tiny_engine

__all__ = ["small_folder", "tiny_engine"]
