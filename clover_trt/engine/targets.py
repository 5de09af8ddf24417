"""Which target and precision an engine can be built for."""

from __future__ import annotations

from clover_trt.errors import EngineError

TARGETS = {"cpu": ("float32",)}


def check_target(gpu: str, precision: str) -> None:
    """Refuse a target or a precision that can't be built.

    Raises:
        EngineError: with the reason and what can be built.
    """
    if gpu not in TARGETS:
        raise EngineError(f"--gpu {gpu}: unknown target; expected one of {', '.join(TARGETS)}")
    if precision not in TARGETS[gpu]:
        reason = "; ONNX Runtime's CPU provider has no bfloat16 or FP8 matrix kernels" if gpu == "cpu" else ""
        raise EngineError(f"--precision {precision}: not possible with --gpu {gpu}{reason}; expected {', '.join(TARGETS[gpu])}")
