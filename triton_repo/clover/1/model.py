"""Triton's entry point of the model `clover`."""

import triton_python_backend_utils as pb_utils

from clover_trt.serving.triton_model import CloverModel


class TritonPythonModel(CloverModel):
    """All is in `CloverModel`; the module below exists inside Triton's Python backend only."""

    pb = pb_utils
