"""Triton's entry point of the model `clover_unary`."""

import triton_python_backend_utils as pb_utils

from clover_trt.serving.forward_model import UnaryModel


class TritonPythonModel(UnaryModel):
    """All is in `UnaryModel`; the module below exists inside Triton's Python backend only."""

    pb = pb_utils
