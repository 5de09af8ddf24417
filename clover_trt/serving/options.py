"""Options of the server, from the command line and a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from clover_trt.config import Frozen, validated
from clover_trt.errors import ConfigError


class ServeOptions(Frozen):
    """How to serve an engine. The ports are those of Triton; `health_port` is the supervisor's own, for /live and /ready."""

    engine: Path
    host: str = "127.0.0.1"
    http_port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int = Field(default=8001, ge=1, le=65535)
    metrics_port: int = Field(default=8002, ge=1, le=65535)
    health_port: int = Field(default=8003, ge=1, le=65535)
    slots: int = Field(default=8, ge=1)
    max_queue: int = Field(default=64, ge=0)
    cache_budget_mb: int = Field(default=0, ge=0)  # 0: what the slots need
    prefix_cache_mb: int = Field(default=256, ge=0)  # 0: no reuse
    threads: int = Field(default=0, ge=0)  # of the CPU engine; 0: all cores
    unary_instances: int = Field(default=4, ge=1, le=64)  # unary clients served at the same time
    max_prompt_bytes: int = Field(default=1 << 20, ge=1)
    log_level: Literal["error", "warning", "info", "verbose"] = "warning"
    start_timeout: float = Field(default=600.0, gt=0)  # seconds to become ready
    canary_interval: float = Field(default=1.0, gt=0)
    canary_timeout: float = Field(default=8.0, gt=0)  # a pass takes less, or the model process counts as hung
    grace: float = Field(default=30.0, ge=0)  # seconds for running requests when stopped

    @classmethod
    def read(cls, path: Path | None, changes: dict[str, Any]) -> ServeOptions:
        """Options of a YAML file, with changes on top; None changes nothing.

        Raises:
            ConfigError: the file can't be read, or a field is unknown or out of range.
        """
        data: Any = {}
        if path is not None:
            try:
                data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            except (OSError, yaml.YAMLError) as error:
                raise ConfigError(f"{path}: not a readable YAML file ({error})") from None
            if not isinstance(data, dict):
                raise ConfigError(f"{path}: expected a mapping of options, found {type(data).__name__}")
        given = {name: value for name, value in changes.items() if value is not None}
        if "engine" not in {**data, **given}:
            raise ConfigError("expected an engine: --engine DIR, or 'engine' in the file")
        options = validated(cls, {**data, **given}, str(path or "serve"))
        ports = [options.http_port, options.grpc_port, options.metrics_port, options.health_port]
        if len(set(ports)) != len(ports):
            raise ConfigError(f"ports: expected four different ones, found {ports}")
        return options
