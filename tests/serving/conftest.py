from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from clover_trt.bench.serve_cost import free_ports
from clover_trt.engine.package import EnginePackage


def get(url: str, data: object = None, timeout: float = 30) -> tuple[int, str]:
    """Status and body."""
    body = None if data is None else json.dumps(data).encode() if not isinstance(data, bytes) else data
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@dataclass
class Served:
    """`clover-trt serve`, run as a user runs it."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    metrics: str
    health: str

    def metric(self, name: str, **labels: str) -> float:
        wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else "") + " "
        text = get(f"{self.metrics}/metrics")[1]
        return next(float(line[len(wanted) :]) for line in text.splitlines() if line.startswith(wanted))

    def ready(self) -> bool:
        try:
            return get(f"{self.health}/ready", timeout=2)[0] == 200
        except OSError:
            return False

    def model_processes(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if "triton_python_backend_stub" in " ".join(each.cmdline())]


def wait(what: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < end, "took too long"
        time.sleep(0.05)


def start(engine: Path, *options: str) -> Served:
    http, grpc, metrics, health = free_ports(4)
    command = [sys.executable, "-m", "clover_trt.cli", "serve", "--engine", str(engine)]
    for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics), ("health", health)):
        command += [f"--{name}-port", str(port)]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    urls = [f"http://127.0.0.1:{port}" for port in (http, metrics, health)]
    served = Served(process, urls[0], f"127.0.0.1:{grpc}", urls[1], urls[2])
    wait(lambda: served.ready() or process.poll() is not None, 60)
    assert process.poll() is None, process.stdout.read() if process.stdout else ""
    return served


def end(served: Served) -> str:
    served.process.terminate()
    output, _ = served.process.communicate(timeout=60)
    return output


@pytest.fixture(scope="session")
def served(tiny_engine: EnginePackage) -> Iterator[Served]:
    server = start(tiny_engine.folder, "--slots", "4", "--max-queue", "8", "--threads", "1")
    yield server
    end(server)


def start_front(grpc: str, *options: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """`clover-trt openai`, and its address."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "clover_trt.cli", "openai", "--triton", grpc, "--port", str(port), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return get(f"{url}/health", timeout=10)[0] == 200
        except OSError:
            return process.poll() is not None

    wait(answers, 30)
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    return process, url


@pytest.fixture(scope="session")
def front(served: Served) -> Iterator[str]:
    process, url = start_front(served.grpc)
    yield url
    process.terminate()
    process.wait(20)
