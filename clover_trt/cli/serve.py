"""Verbs that serve: serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clover_trt.cli.shared import out, progress_lines

app = typer.Typer()


@app.command(epilog="Example: clover-trt serve --engine build/engines/tiny --slots 8")
def serve(
    engine: Annotated[Path | None, typer.Option(help="Engine package folder.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of these options; the command line goes before it.")
    ] = None,
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
