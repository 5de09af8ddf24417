from __future__ import annotations

from collections.abc import Iterator

import pytest

NO_COMPILER = "no nvcc: install it"


@pytest.fixture(scope="module", autouse=True)
def _no_compiler() -> Iterator[None]:
    """Builds end the same with and without CUDA's compiler in the environment; plugins/tests/ has builds that use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clover_trt.engine.plugins.missing_tools", lambda adapters=True: NO_COMPILER)
        yield
