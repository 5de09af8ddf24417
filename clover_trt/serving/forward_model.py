"""Models that pass requests on to `clover`, for clients that it can't serve itself.

`clover_unary` answers with exactly one response: a decoupled model can't answer unary calls. `tensorrt_llm` streams, and takes
tensors of shape [1, 1] as clients of TensorRT-LLM send them: Triton lets a model have one rank per tensor.
"""

from __future__ import annotations

import threading
import traceback
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np

from clover_trt.serving.fields import OUTPUTS

POLL = 0.05  # seconds between looks at whether a client is gone


class Forwarder:
    """What both have in common: the inner request and its end when the client goes."""

    pb: Any

    def inner(self, request: Any, stream: bool | None) -> Any:
        """The request to `clover`, with an id by which it can be stopped: the client's, or one of its own."""
        inputs = [self.pb.Tensor(each.name(), each.as_numpy().reshape(-1)) for each in request.inputs()]
        if stream is not None:
            inputs = [each for each in inputs if each.name() not in ("stream", "streaming")]
            inputs.append(self.pb.Tensor("stream", np.array([stream])))
        return self._request(request.request_id() or uuid.uuid4().hex, inputs)

    def _request(self, request_id: str, inputs: list[Any]) -> Any:
        names = [each.name for each in OUTPUTS]
        return self.pb.InferenceRequest(request_id=request_id, model_name="clover", requested_output_names=names, inputs=inputs)

    def watch(self, request_id: str, is_cancelled: Callable[[], bool], done: threading.Event) -> None:
        """Stop the inner request once the client is gone."""
        while not done.wait(POLL):
            if is_cancelled():
                for _ in self._request(request_id, [self.pb.Tensor("stop", np.array([True]))]).exec(decoupled=True):
                    pass
                return

    def responses(self, request: Any, is_cancelled: Callable[[], bool], stream: bool | None) -> Any:
        """The inner request's responses, until its last."""
        inner, done = self.inner(request, stream), threading.Event()
        watcher = threading.Thread(target=self.watch, args=(inner.request_id(), is_cancelled, done), daemon=True)
        watcher.start()
        try:
            for response in inner.exec(decoupled=True):
                if response.has_error() or response.output_tensors():
                    yield response
        finally:
            done.set()
            watcher.join()

    def passed_on(self, response: Any) -> Any:
        """A response of `clover` as one of this model's."""
        if response.has_error():
            return self.error(response.error().message(), response.error().code())
        return self.pb.InferenceResponse(response.output_tensors())

    def error(self, message: str, code: Any) -> Any:
        """A response that is an error."""
        return self.pb.InferenceResponse(error=self.pb.TritonError(message, code))

    def fault(self) -> Any:
        """What a client sees of a fault in here; the rest is for the log."""
        self.pb.Logger.log_error(traceback.format_exc())
        return self.error("a fault in the server; see its log", self.pb.TritonError.INTERNAL)


class UnaryModel(Forwarder):
    """One response to a request; an instance serves one client at a time."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            for response in self.responses(request, request.is_cancelled, stream=False):
                return self.passed_on(response)
            return self.error("no answer", self.pb.TritonError.INTERNAL)
        except Exception:
            return self.fault()


class BatchedShapesModel(Forwarder):
    """Streams; a thread for each request in flight."""

    def execute(self, requests: list[Any]) -> None:
        """Take requests; none waits here for its answer."""
        for request in requests:
            threading.Thread(target=self._forward, args=(request, request.get_response_sender()), daemon=True).start()

    def _forward(self, request: Any, sender: Any) -> None:
        ended = False
        try:
            for response in self.responses(request, sender.is_cancelled, stream=None):
                ended = response.has_error() or is_last(response)
                sender.send(self.passed_on(response), flags=self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if ended else 0)
        except Exception:
            sender.send(self.fault(), flags=self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        if not ended:
            sender.send(flags=self.pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def is_last(response: Any) -> bool:
    """Whether a response of `clover` has a finish reason."""
    for each in response.output_tensors():
        if each.name() == "finish_reason":
            return bool(each.as_numpy().reshape(-1)[0])
    return False
