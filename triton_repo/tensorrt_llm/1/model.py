"""Triton's entry point of the model `tensorrt_llm`."""

import triton_python_backend_utils as pb_utils

from clover_trt.serving.forward_model import BatchedShapesModel


class TritonPythonModel(BatchedShapesModel):
    """All is in `BatchedShapesModel`; the module below exists inside Triton's Python backend only."""

    pb = pb_utils
