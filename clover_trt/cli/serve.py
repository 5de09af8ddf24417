"""Verbs that serve: serve, openai, bench serve, deploy k8s."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from clover_trt.cli.shared import JsonOption, err, numbers, out, progress_lines
from clover_trt.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from clover_trt.bench.serve import Load

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


bench = typer.Typer(help="Measure a running server.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.callback()
def _bench() -> None:
    """Measure a running server."""


@bench.command("serve", epilog="Example: clover-trt bench serve --url localhost:8001 --concurrency 1,4,16 --out out/load")
def bench_serve(
    url: Annotated[str, typer.Option(help="HOST:PORT of Triton's gRPC endpoint.")] = "localhost:8001",
    concurrency: Annotated[str, typer.Option(help="Closed loops: clients at a time, separated by commas.")] = "1,4,16,64",
    rates: Annotated[str, typer.Option(help="Open loops: requests a second (Poisson arrivals), separated by commas.")] = "",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 200,
    dataset: Annotated[Path | None, typer.Option(help='JSON lines: {"prompt": text} or {"messages": [...]}.')] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Hard limit of each response.")] = 128,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every response has max-tokens tokens.")] = False,
    threshold: Annotated[float | None, typer.Option(help="Confidence above which a position is filled.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrival times.")] = 0,
    target: Annotated[Path | None, typer.Option("--out", help="Folder for serve.json and serve.png.")] = None,
    json_out: JsonOption = False,
) -> None:
    """Load a server and say what its clients saw."""
    import asyncio
    import json
    from dataclasses import asdict

    from clover_trt.bench.serve import measure, read_dataset, write_report

    loads_of = numbers("--concurrency", concurrency, int), numbers("--rates", rates, float)
    if not any(loads_of):
        raise RequestError("expected --concurrency or --rates with at least one number")
    settings = {"max_tokens": max_tokens, "ignore_eos": ignore_eos or None, "threshold": threshold}
    conversations = read_dataset(dataset, seed)
    with progress_lines(json_out) as progress:
        run = measure(
            url, conversations, requests, settings, concurrency=loads_of[0], rates=loads_of[1], seed=seed, progress=progress
        )
        loads = asyncio.run(run)
    if target is not None:
        write_report(target, loads, {"url": url, "requests": requests, **settings})
    if json_out:
        print(json.dumps([asdict(load) for load in loads]))
        return
    out.print(load_table(loads))


def load_table(loads: list[Load]) -> Table:
    """What each load came to."""
    heads = ("load", "requests", "errors", "requests/s", "tokens/s", "of one", "TPF", "first block", "inter-block", "end to end")
    table = Table(*heads, caption="tokens/s of all together, and of one request (median); times in ms: median / p95 / p99")
    for load in loads:
        errors = ", ".join(f"{count} {code}" for code, count in load.errors.items()) or "0"
        rates = (load.requests_per_second, load.tokens_per_second, load.tokens_per_second_per_request.get("p50", 0.0))
        times = (load.time_to_first_block, load.inter_block, load.end_to_end)
        shown = [" / ".join(f"{1e3 * value:.0f}" for value in each.values()) or "-" for each in times]
        table.add_row(load.load, str(load.requests), errors, *(f"{rate:.1f}" for rate in rates), f"{load.tpf:.2f}", *shown)
    return table


deploy = typer.Typer(help="Write what a cluster needs.", no_args_is_help=True)
app.add_typer(deploy, name="deploy")


@deploy.callback()
def _deploy() -> None:
    """Write what a cluster needs."""


@deploy.command("k8s", epilog="Example: clover-trt deploy k8s --image clover-trt:1 --engine-claim engines --out out/k8s")
def deploy_k8s(
    image: Annotated[str, typer.Option(help="Image built from build/docker/Dockerfile.")],
    engine_claim: Annotated[str, typer.Option(help="PersistentVolumeClaim that holds the engine package.")],
    target: Annotated[Path, typer.Option("--out", help="New folder for the manifests.")],
    gpu: Annotated[str, typer.Option(help="h200 (x86-64 nodes) or gb300 (Arm nodes).")] = "h200",
    gpu_product: Annotated[str | None, typer.Option(help="Value of the node label nvidia.com/gpu.product.")] = None,
    engine_path: Annotated[str, typer.Option(help="Folder of the engine in the claim.")] = ".",
    name: Annotated[str, typer.Option(help="Name of everything.")] = "clover",
    namespace: Annotated[str, typer.Option()] = "default",
    slots: Annotated[int, typer.Option(help="Requests in flight of a replica.")] = 8,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait in a replica.")] = 64,
    min_replicas: Annotated[int, typer.Option()] = 1,
    max_replicas: Annotated[int, typer.Option()] = 4,
    queue_target: Annotated[int, typer.Option(help="Waiting requests a replica above which replicas are added.")] = 4,
    api_keys_secret: Annotated[str | None, typer.Option(help="Secret whose key 'keys' has an API key a line.")] = None,
    kserve: Annotated[bool, typer.Option("--kserve", help="An InferenceService of KServe instead.")] = False,
) -> None:
    """Write Kubernetes manifests: probes follow the canary, replicas follow the queue."""
    from clover_trt.config import validated
    from clover_trt.serving.deploy import DeployOptions, write_manifests

    architectures = {"h200": "amd64", "gb300": "arm64"}
    if gpu not in architectures:
        raise RequestError(f"--gpu {gpu}: expected one of {', '.join(architectures)}")
    if min_replicas > max_replicas:
        raise RequestError(f"--min-replicas {min_replicas} is more than --max-replicas {max_replicas}")
    given = {
        "name": name, "namespace": namespace, "image": image, "engine_claim": engine_claim, "engine_path": engine_path,
        "architecture": architectures[gpu], "gpu_product": gpu_product, "slots": slots, "max_queue": max_queue,
        "min_replicas": min_replicas, "max_replicas": max_replicas, "queue_target": queue_target,
        "api_keys_secret": api_keys_secret,
    }  # fmt: skip
    for path in write_manifests(target, validated(DeployOptions, given, "deploy"), kserve=kserve):
        out.print(f"wrote {path}", soft_wrap=True)
