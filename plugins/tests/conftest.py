"""Fixtures that the tests of the kernels share with the others."""

from tests.conftest import tiny_engine

__all__ = ["tiny_engine"]
