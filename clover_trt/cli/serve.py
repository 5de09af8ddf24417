"""Verbs that serve: serve, openai."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from clover_trt.cli.shared import err, out, progress_lines
from clover_trt.errors import ConfigError

app = typer.Typer()


@app.command(epilog="Example: clover-trt serve --engine build/engines/tiny --slots 8")
def serve(
    engine: Annotated[Path | None, typer.Option(help="Engine package folder.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of these options; the command line goes before it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; loopback when not given.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Triton's HTTP port; 8000.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Triton's gRPC port; 8001.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Prometheus metrics; 8002.")] = None,
    health_port: Annotated[int | None, typer.Option(help="/live and /ready, which follow a real canary request; 8003.")] = None,
    slots: Annotated[int | None, typer.Option(help="Requests in flight; 8.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests that may wait for a slot; 64.")] = None,
    cache_budget_mb: Annotated[int | None, typer.Option(help="Memory for the caches of all slots; what they need.")] = None,
    prefix_cache_mb: Annotated[int | None, typer.Option(help="Memory for states of earlier turns, 0 for none; 256.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of a CPU engine; all cores.")] = None,
    log_level: Annotated[str | None, typer.Option(help="error, warning, info or verbose; warning.")] = None,
    grace: Annotated[float | None, typer.Option(help="Seconds for running requests when stopped; 30.")] = None,
) -> None:
    """Serve an engine with a Triton Inference Server, and keep it answering."""
    from clover_trt.serving.options import ServeOptions
    from clover_trt.serving.supervisor import serve as run

    changes = {key: value for key, value in locals().items() if key not in ("config", "ServeOptions", "run")}
    options = ServeOptions.read(config, changes)
    with progress_lines() as progress:
        progress(
            f"gRPC {options.host}:{options.grpc_port}, HTTP {options.http_port}, metrics {options.metrics_port}, "
            f"health {options.health_port}"
        )
        run(options, progress)
    out.print("stopped")


@app.command(epilog="Example: clover-trt openai --triton localhost:8001 --port 8080")
def openai(
    triton: Annotated[str, typer.Option(help="HOST:PORT of Triton's gRPC endpoint.")] = "localhost:8001",
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the front.")] = 8080,
    model_name: Annotated[str, typer.Option(help="The model's name for clients.")] = "clover",
    api_keys: Annotated[
        Path | None, typer.Option(help="File with an API key a line; else $CLOVER_TRT_API_KEYS, separated by commas.")
    ] = None,
    max_request_bytes: Annotated[int, typer.Option(min=1, help="Longest request body.")] = 4 << 20,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Of one key, or of one address; no limit.")] = None,
) -> None:
    """Run an OpenAI-compatible front of a Triton server, with a chat page at /."""
    import uvicorn

    from clover_trt.serving.openai_front import FrontOptions, create_app

    keys = read_keys(api_keys)
    options = FrontOptions(triton, model_name, keys, max_request_bytes, requests_per_minute)
    if not keys and host not in ("127.0.0.1", "localhost", "::1"):
        err.print("note: no API keys: everyone who reaches this address is let in")
    err.print(f"http://{host}:{port}/ and http://{host}:{port}/v1", soft_wrap=True)
    uvicorn.run(create_app(options), host=host, port=port, log_level="warning")


def read_keys(path: Path | None) -> tuple[str, ...]:
    """API keys of a file or of the environment.

    Raises:
        ConfigError: the file can't be read or has none.
    """
    if path is None:
        return tuple(key.strip() for key in os.environ.get("CLOVER_TRT_API_KEYS", "").split(",") if key.strip())
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path}: expected an API key a line, found none")
    return keys
