"""Keep a Triton server answering: a canary every second, a restart when it fails, a drain when it is to stop."""

from __future__ import annotations

import json
import logging
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from clover_trt.engine.package import open_package
from clover_trt.errors import EngineError
from clover_trt.serving.options import ServeOptions
from clover_trt.serving.repository import render_repository
from clover_trt.serving.server import Installation, TritonProcess, find_server

logger = logging.getLogger(__name__)
PROGRESS_EVERY = 2.0  # seconds
MOST_FAILURES = 3  # starts in a row that do not become ready
Progress = Callable[[str], None]


class Supervisor:
    """Runs a server for an engine until it is told to stop.

    Liveness and readiness (`/live` and `/ready` on the health port) say whether a canary, a request that the engine itself
    answers, came back in time; Triton's own readiness stays true when its model's process is dead.

    Args:
        options: how to serve.
        progress: called with a line at each change.
        installation: which tritonserver; found when None.

    Raises:
        EngineError: no engine, no tritonserver, or the port of the health server is taken.
    """

    def __init__(
        self, options: ServeOptions, progress: Progress = lambda _: None, installation: Installation | None = None
    ) -> None:
        open_package(options.engine)
        self.options, self._progress = options, progress
        self._installation = installation or find_server()
        self._folder = tempfile.TemporaryDirectory(prefix="clover-trt-serve-")
        self._work = Path(self._folder.name)
        self.drain_file = self._work / "drain"
        render_repository(self._work / "models", options, self.drain_file)
        self.process: TritonProcess | None = None
        self.ready, self.restarts = False, 0
        self._answered = time.monotonic()
        self._stop = threading.Event()
        try:
            self._health = ThreadingHTTPServer((options.host, options.health_port), _handler(self))
        except OSError as error:
            raise EngineError(f"health port {options.health_port} on {options.host}: {error.strerror}; choose another") from None
        threading.Thread(target=self._health.serve_forever, daemon=True).start()

    @property
    def live(self) -> bool:
        """Whether the server answered lately, or is being started."""
        return self.ready or time.monotonic() - self._answered < self.options.start_timeout

    def stop(self, *_: Any) -> None:
        """End `run`, from a signal handler or another thread."""
        self._stop.set()

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            EngineError: the server does not start, with the end of its log.
        """
        failures = 0
        try:
            while not self._stop.is_set():
                if self._start():
                    failures = 0
                    self._watch()
                else:
                    failures += 1
                if self._stop.is_set():
                    break
                assert self.process is not None
                if failures >= MOST_FAILURES or (failures and not self.restarts and not self.process.running):
                    raise EngineError(f"the server does not start; the end of its log:\n{self.process.last_lines()}")
                self._progress("restarting the server")
                self.process.kill()
                self.restarts += 1
            self._drain()
        finally:
            self.ready = False
            if self.process is not None:
                self.process.terminate()
            self._health.shutdown()
            self._health.server_close()
            self._folder.cleanup()

    def _start(self) -> bool:
        """Start the server; whether it became ready."""
        began = told = time.monotonic()
        self._progress("starting tritonserver")
        self.process = TritonProcess(self._installation, self._work / "models", self.options, self._work)
        while not self._stop.wait(0.1):
            waited = time.monotonic() - began
            if not self.process.running or waited > self.options.start_timeout:
                return False
            if time.monotonic() - told >= PROGRESS_EVERY:
                told = time.monotonic()
                self._progress(f"loading the engine: {waited:.0f} s")
            if self._canary():
                self.ready = True
                self._progress(f"ready after {time.monotonic() - began:.1f} s")
                return True
        return False

    def _watch(self) -> None:
        """Until the server fails or is to stop."""
        while not self._stop.wait(self.options.canary_interval):
            assert self.process is not None
            if not self.process.running:
                logger.error("tritonserver has ended:\n%s", self.process.last_lines())
                break
            if not self._canary():
                logger.error("no answer from the model in %.0f s", self.options.canary_timeout)
                break
        self.ready = False

    def _canary(self) -> bool:
        """Whether the engine answers."""
        url = f"http://{_loopback(self.options.host)}:{self.options.http_port}/v2/models/clover/generate"
        request = urllib.request.Request(url, json.dumps({"canary": True}).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.options.canary_timeout) as response:
                answered = bool(json.load(response)["text_output"] == "ok")
        except (OSError, ValueError, KeyError):
            return False
        self._answered = time.monotonic()
        return answered

    def open_requests(self) -> int | None:
        """Requests in the model, as the metrics say; None when they can't be read."""
        url = f"http://{_loopback(self.options.host)}:{self.options.metrics_port}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=2) as response:
                lines = response.read().decode().splitlines()
        except OSError:
            return None
        return next((int(float(line.split()[-1])) for line in lines if line.startswith("clover_open_requests ")), None)

    def _running(self) -> bool:
        return self.process is not None and self.process.running

    def _drain(self) -> None:
        """Let running requests end, within the grace period."""
        self.ready = False
        self.drain_file.touch()
        end = time.monotonic() + self.options.grace
        time.sleep(0.5)  # the model looks for the file, and refreshes its metrics
        while time.monotonic() < end:
            left = self.open_requests()
            if left == 0 or not self._running():
                return
            self._progress(f"waiting for {'the' if left is None else left} running requests")
            time.sleep(0.2)
        self._progress("the grace period is over")


def _loopback(host: str) -> str:
    """Where this machine reaches a server bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _handler(supervisor: Supervisor) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            states = {"/live": supervisor.live, "/ready": supervisor.ready}
            state = states.get(self.path)
            self.send_response(404 if state is None else 200 if state else 503)
            self.end_headers()
            self.wfile.write(b"ok\n" if state else b"no\n")

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler


def serve(options: ServeOptions, progress: Progress) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        EngineError: the server can't be started.
    """
    supervisor = Supervisor(options, progress)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, supervisor.stop)
    supervisor.run()
