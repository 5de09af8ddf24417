"""The model `clover` of the repository, over Triton's Python backend; `triton_repo/clover/1/model.py` hands `pb_utils` over."""

from __future__ import annotations

import json
import logging
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from clover_trt.errors import CloverError, QueueFullError, RequestError
from clover_trt.runtime.generate import Generator
from clover_trt.runtime.prefix_cache import PrefixCache
from clover_trt.runtime.request import PassEvent, Request
from clover_trt.serving.fields import ServingRequest, parse
from clover_trt.serving.metrics import Metrics
from clover_trt.serving.responses import ResponseMaker, Tensors, tensor
from clover_trt.serving.worker import Job, ServerStoppingError, Worker

DRAIN_POLL = 0.2  # seconds
GRPC_NAMES = {"INVALID_ARG": "INVALID_ARGUMENT"}  # where Triton's differ


class CloverModel:
    """One scheduler for all requests in flight.

    `execute` hands requests to the worker's thread and returns; responses go out through each request's sender until the one
    with the final flag. A fault never leaves a sender without that flag: its client would wait for ever.
    """

    pb: Any  # triton_python_backend_utils

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine, with the parameters of config.pbtxt."""
        logging.basicConfig(level=logging.INFO)
        found = json.loads(args["model_config"])["parameters"]
        options = {name: value["string_value"] for name, value in found.items()}
        cache = PrefixCache(int(options["prefix_cache_mb"]) << 20) if int(options["prefix_cache_mb"]) else None
        budget = int(options["cache_budget_mb"]) << 20
        self.generator = Generator(
            options["engine"],
            slots=int(options["slots"]),
            threads=int(options["threads"]) or None,
            cache_budget=budget or None,
            prefix_cache=cache,
        )
        self.max_prompt_bytes = int(options["max_prompt_bytes"])
        self.metrics = Metrics(self.pb.MetricFamily, self.generator.session.cache_bytes())
        self.worker = Worker(self.generator, max_queue=int(options["max_queue"]), observer=self.metrics)
        self._stops: dict[str, set[threading.Event]] = {}
        self._lock = threading.Lock()
        if options["drain_file"]:
            threading.Thread(target=self._watch_drain, args=(Path(options["drain_file"]),), daemon=True).start()

    def _watch_drain(self, path: Path) -> None:
        """The server's supervisor makes a file when no new requests are to be taken."""
        while not path.exists():
            time.sleep(DRAIN_POLL)
        self.worker.drain()

    def execute(self, requests: list[Any]) -> None:
        """Take requests; none waits here for its answer."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._take(request, sender)
            except QueueFullError as error:
                self._refuse(sender, str(error), "UNAVAILABLE", "queue_full")
            except ServerStoppingError as error:
                self._refuse(sender, str(error), "UNAVAILABLE", "refused")
            except CloverError as error:
                self._refuse(sender, str(error), "INVALID_ARG", "refused")
            except Exception:  # a traceback is for the log, never for a client
                self.pb.Logger.log_error(traceback.format_exc())
                self._refuse(
                    sender, "the request could not be taken because of a fault in the server; see its log", "INTERNAL", "error"
                )

    def finalize(self) -> None:
        """End what runs."""
        self.worker.stop()

    def _take(self, incoming: Any, sender: Any) -> None:
        tensors = {each.name(): each.as_numpy() for each in incoming.inputs()}
        asked = parse(tensors, self.max_prompt_bytes)
        request_id = incoming.request_id()
        if asked.stop:
            self._stop(request_id)
            self._send(sender, {"text_output": tensor("text_output", [""])}, last=True)
        elif asked.canary:
            self._canary(sender)
        else:
            limits = [asked.deadline_ms / 1e3] if asked.deadline_ms else []
            limits += [incoming.timeout() / 1e6] if incoming.timeout() else []
            self._submit(asked, request_id, sender, time.monotonic() + min(limits) if limits else None)

    def _submit(self, asked: ServingRequest, request_id: str, sender: Any, deadline: float | None) -> None:
        request = Request(build_sequence(self.generator, asked), self.generator.codec)
        maker = ResponseMaker(request, self.generator.codec, stream=asked.stream, show_passes=asked.show_passes)
        stopped = threading.Event()

        def on_event(event: PassEvent) -> None:
            last = event.finish_reason is not None
            if last:
                self._forget(request_id, stopped)
                self.metrics.ended(request)
            if event.finish_reason == "error":
                self._fail(sender, request.error or "the engine failed", "INTERNAL")
                return
            response = maker.push(event)
            if response is not None:
                self._send(sender, response, last)

        def on_failure(message: str) -> None:
            self._forget(request_id, stopped)
            self.metrics.refused("error")
            self._fail(sender, message, "INTERNAL")

        with self._lock:
            self._stops.setdefault(request_id, set()).add(stopped)
        try:
            self.worker.submit(Job(request, on_event, on_failure, lambda: stopped.is_set() or sender.is_cancelled(), deadline))
        except CloverError:
            self._forget(request_id, stopped)
            raise

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise RequestError("stop: expected the request id of a running request, found none")
        with self._lock:
            for each in self._stops.get(request_id, ()):
                each.set()

    def _forget(self, request_id: str, stopped: threading.Event) -> None:
        with self._lock:
            kept = self._stops.get(request_id, set()) - {stopped}
            if kept:
                self._stops[request_id] = kept
            else:
                self._stops.pop(request_id, None)

    def _canary(self, sender: Any) -> None:
        """Health: a small request of its own when nothing runs, else the next pass of what runs."""
        sequence = self.generator.sequence([1], max_new_tokens=1, max_forwards=2)
        request = Request(sequence, self.generator.codec)

        def on_failure(message: str) -> None:
            self.pb.Logger.log_error(f"canary: {message}")

        def answer() -> None:
            self._send(sender, {"text_output": tensor("text_output", ["ok"])}, last=True)

        self.worker.canary(answer, Job(request, lambda event: None, on_failure))

    def _send(self, sender: Any, values: Tensors, last: bool) -> None:
        response = self.pb.InferenceResponse([self.pb.Tensor(name, value) for name, value in values.items()])
        sender.send(response, flags=self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if last else 0)

    def _refuse(self, sender: Any, message: str, code: str, outcome: str) -> None:
        self.metrics.refused(outcome)
        self._fail(sender, message, code)

    def _fail(self, sender: Any, message: str, code: str) -> None:
        # Clients of a stream see the text alone, so it begins with gRPC's name of the code.
        error = self.pb.TritonError(f"{GRPC_NAMES.get(code, code)}: {message}", getattr(self.pb.TritonError, code))
        sender.send(self.pb.InferenceResponse(error=error), flags=self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def build_sequence(generator: Generator, asked: ServingRequest) -> Any:
    """The sequence of a request.

    Raises:
        RequestError: a value is out of range, or the prompt is too long.
    """
    if asked.messages is not None:
        return generator.chat(asked.messages, tools=asked.tools, enable_thinking=asked.enable_thinking, **asked.settings)
    if asked.tools is not None or asked.enable_thinking is not None:
        raise RequestError("tools and enable_thinking go with messages, not with a plain prompt")
    prompt = asked.ids if asked.ids is not None else asked.text
    assert prompt is not None
    return generator.sequence(prompt, **asked.settings)
