"""The real Triton server on the CPU, started by `clover-trt serve`."""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from clover_trt.engine.package import EnginePackage
from clover_trt.runtime.generate import Generator
from clover_trt.serving.client import AsyncClient, Client, ServingError, input_tensors, request_message
from tests.serving.conftest import Served, end, get, start, wait

REVERSE = [{"role": "user", "content": 'Reverse "stone".'}]
ENDLESS: dict[str, Any] = {"max_tokens": 256, "ignore_eos": True, "threshold": 1.0}


def tensor(name: str, values: list[Any], kind: str, shape: list[int] | None = None) -> triton.InferInput:
    dtype: Any = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32}[kind]
    given = triton.InferInput(name, shape or [len(values)], kind)
    given.set_data_from_numpy(np.array(values, dtype).reshape(shape or [len(values)]))
    return given


def triton_stream(url: str, model: str, inputs: list[triton.InferInput], request_id: str = "") -> list[Any]:
    """Responses of NVIDIA's own client."""
    found: queue.Queue[Any] = queue.Queue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: found.put(error or result))
        client.async_stream_infer(model, inputs, request_id=request_id, enable_empty_final_response=True)
        responses = []
        while True:
            each = found.get(timeout=30)
            if isinstance(each, Exception):
                client.stop_stream()
                raise each
            if each.as_numpy("text_output") is not None:
                responses.append(each)
            if each.get_response().parameters["triton_final_response"].bool_param:
                client.stop_stream()
                return responses


def test_the_answer_is_that_of_the_engine(served: Served, tiny_engine: EnginePackage) -> None:
    generator = Generator(tiny_engine)
    with Client(served.grpc) as client:
        for text in ('Reverse "stone".', "What is 12 + 13?", 'Reverse "green".'):
            messages = [{"role": "user", "content": text}]
            expected = generator.run_one(generator.chat(messages, max_new_tokens=64))
            whole = client.generate(messages=messages, max_tokens=64)
            assert (whole.text, whole.token_ids, whole.finish_reason) == (expected.text, expected.token_ids, "stop")
            assert (whole.prompt_tokens, whole.output_tokens) == (expected.prompt_tokens, len(expected.token_ids))
            pieces = list(client.stream(messages=messages, max_tokens=64, return_log_probs=True))
            assert "".join(piece.text for piece in pieces) == expected.text
            assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
            assert [entry["id"] for piece in pieces for entry in piece.log_probs] == expected.token_ids


@pytest.mark.parametrize(("model", "shape"), [("clover", [1]), ("tensorrt_llm", [1, 1])])
def test_nvidias_client_streams_with_either_shape(served: Served, model: str, shape: list[int]) -> None:
    inputs = [
        tensor("messages", [json.dumps(REVERSE).encode()], "BYTES", shape),
        tensor("sampling_param_max_tokens", [64], "INT32", shape),
        tensor("streaming", [True], "BOOL", shape),
    ]
    responses = triton_stream(served.grpc, model, inputs)
    assert b"".join(each.as_numpy("text_output").reshape(-1)[0] for each in responses) == b"enots"
    assert responses[-1].as_numpy("finish_reason").reshape(-1)[0] == b"stop"
    assert responses[-1].as_numpy("forwards").reshape(-1)[0] >= 1


def test_unary_clients_have_the_companion(served: Served) -> None:
    with triton.InferenceServerClient(served.grpc) as client:
        answer = client.infer("clover_unary", [tensor("messages", [json.dumps(REVERSE).encode()], "BYTES")])
        assert answer.as_numpy("text_output")[0] == b"enots"
        with pytest.raises(Exception, match="decoupled transaction policy"):
            client.infer("clover", [tensor("messages", [json.dumps(REVERSE).encode()], "BYTES")])


def test_http_generate_and_generate_stream(served: Served) -> None:
    body = {"messages": json.dumps(REVERSE), "max_tokens": 64}
    for model in ("clover", "clover_unary", "tensorrt_llm"):
        status, answer = get(f"{served.http}/v2/models/{model}/generate", body)
        assert (status, json.loads(answer)["text_output"]) == (200, "enots"), (model, answer)
    status, stream = get(f"{served.http}/v2/models/clover/generate_stream", {**body, "stream": True, "show_passes": True})
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    assert "".join(each["text_output"] for each in events) == "enots"
    assert json.loads(events[0]["pass_event"])["block"]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "x", "max_tokens": -1}, "INVALID_ARGUMENT", "max_new_tokens"),
    ({"prompt": "x", "threshold": 1.5}, "INVALID_ARGUMENT", "threshold"),
    ({"prompt": "x", "mode": "guess"}, "INVALID_ARGUMENT", "mode"),
    ({"prompt": "x", "rule": "guess"}, "INVALID_ARGUMENT", "rule"),
    ({"prompt": ""}, "INVALID_ARGUMENT", "the prompt is empty"),
    ({"prompt": "many words " * 2000, "max_tokens": 8}, "INVALID_ARGUMENT", "the limit is"),
    ({"prompt": "x" * (1 << 20 | 1)}, "INVALID_ARGUMENT", "the server takes 1,048,576"),
    ({"prompt": [10**6]}, "INVALID_ARGUMENT", "prompt token 0 is 1000000"),
    ({"max_tokens": 4}, "INVALID_ARGUMENT", "exactly one of text_input, messages and input_ids"),
    ({"prompt": "x", "messages": REVERSE}, "INVALID_ARGUMENT", "exactly one of"),
    ({"messages": [{"content": "x"}]}, "INVALID_ARGUMENT", "'role' and 'content'"),
    ({"messages": "{"}, "INVALID_ARGUMENT", "messages: not valid JSON"),
    ({"prompt": "x", "sampling_parameters": {"tempreature": 1}}, "INVALID_ARGUMENT", "unknown setting 'tempreature'"),
]


@pytest.mark.parametrize(("request_", "code", "message"), BAD, ids=[f"{code} {message}" for _, code, message in BAD])
def test_bad_requests_have_a_status_and_leave_others_alone(
    served: Served, request_: dict[str, Any], code: str, message: str
) -> None:
    with Client(served.grpc) as client:
        running = client.stream(messages=REVERSE, max_tokens=64, threshold=1.0)
        first = next(running)
        given = dict(request_)
        with pytest.raises(ServingError, match=f"^(?!{code}).*{message}") as caught:
            client.generate(given.pop("prompt", None), **given)
        assert caught.value.code == code
        assert "Traceback" not in str(caught.value)
        assert ".py" not in str(caught.value)
        assert first.text + "".join(piece.text for piece in running) == "enots"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([tensor("text_input", ["x"], "BYTES"), tensor("max_tokens", [1.0], "FP32")], "data-type"),
        ([tensor("text_input", ["x"], "BYTES", [1, 1])], "unexpected shape"),
        ([tensor("text_input", ["x", "y"], "BYTES")], "expected one value"),
        ([tensor("text_input", [b"\xff"], "BYTES")], "not valid UTF-8"),
        ([tensor("nonsense", ["x"], "BYTES")], "unexpected inference input"),
    ],
)
def test_wrong_tensors_are_refused(served: Served, inputs: list[triton.InferInput], message: str) -> None:
    with pytest.raises(Exception, match=message):
        triton_stream(served.grpc, "clover", inputs)


def test_a_closed_stream_frees_its_slot(served: Served) -> None:
    before = served.metric("clover_requests_total", outcome="cancelled")
    with Client(served.grpc) as client:
        streams = [client.stream(messages=REVERSE, **ENDLESS) for _ in range(4)]
        for each in streams:
            next(each)
        for each in streams:
            each.close()  # type: ignore[attr-defined]
        wait(lambda: served.metric("clover_requests_total", outcome="cancelled") == before + 4, 10)
    wait(lambda: served.metric("clover_slots_busy") == 0, 10)


def test_a_cancelled_unary_call_frees_its_slot(served: Served) -> None:
    before = served.metric("clover_requests_total", outcome="cancelled")
    inputs = [tensor(name, list(value), "BYTES") for name, value in input_tensors(None, {"messages": REVERSE}).items()]
    inputs += [tensor("max_tokens", [256], "INT32"), tensor("ignore_eos", [True], "BOOL"), tensor("threshold", [1.0], "FP32")]
    with triton.InferenceServerClient(served.grpc) as client:
        call = client.async_infer("clover_unary", inputs, lambda result, error: None)
        wait(lambda: served.metric("clover_open_requests") > 0, 10)
        call.cancel()
        wait(lambda: served.metric("clover_requests_total", outcome="cancelled") == before + 1, 10)


def test_a_request_is_stopped_by_its_id(served: Served) -> None:
    with Client(served.grpc) as client:
        stream = client.stream(messages=REVERSE, request_id="mine", **ENDLESS)
        next(stream)
        client.stop("mine")
        last = list(stream)[-1]
        assert last.finish_reason == "cancelled"
        assert 0 < last.output_tokens < 256
        with pytest.raises(ServingError, match="expected the request id"):
            client.stop("")


def test_clients_of_tensorrt_llm_stop_a_request_by_its_id(served: Served) -> None:
    one = [1, 1]
    endless = [tensor("messages", [json.dumps(REVERSE).encode()], "BYTES", one), tensor("max_tokens", [256], "INT32", one)]
    endless += [tensor("ignore_eos", [True], "BOOL", one), tensor("threshold", [1.0], "FP32", one)]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(triton_stream(served.grpc, "tensorrt_llm", endless, "theirs")))
    thread.start()
    wait(lambda: served.metric("clover_open_requests") > 0, 10)
    triton_stream(served.grpc, "tensorrt_llm", [tensor("stop", [True], "BOOL", one)], "theirs")
    thread.join(20)
    assert found[-1].as_numpy("finish_reason").reshape(-1)[0] == b"cancelled"
    assert found[-1].as_numpy("output_tokens").reshape(-1)[0] < 256


def test_deadlines_end_a_request_with_what_it_has(served: Served) -> None:
    with Client(served.grpc) as client:
        last = client.generate(messages=REVERSE, deadline_ms=150, **ENDLESS)
        assert last.finish_reason == "deadline"
        assert last.output_tokens < 256
    with Client(served.grpc, timeout=0.3) as client:
        with pytest.raises(ServingError) as caught:
            client.generate(messages=REVERSE, **ENDLESS)
        assert caught.value.code == "DEADLINE_EXCEEDED"
    wait(lambda: served.metric("clover_open_requests") == 0, 10)


def test_a_full_queue_is_unavailable_and_the_rest_goes_on(served: Served) -> None:
    with Client(served.grpc, retries=0) as client:
        streams = [client.stream(messages=REVERSE, **ENDLESS) for _ in range(12)]
        for each in streams[:4]:
            next(each)
        results: list[BaseException | None] = []

        def take(stream: Any) -> None:
            try:
                next(stream)
                results.append(None)
            except ServingError as error:
                results.append(error)

        threads = [threading.Thread(target=take, args=(each,)) for each in streams[4:]]
        for thread in threads:
            thread.start()
        wait(lambda: served.metric("clover_queue_length") == 8, 10)
        with pytest.raises(ServingError, match="the queue is full: 8 requests wait, the limit is 8") as caught:
            client.generate(messages=REVERSE)
        assert caught.value.code == "UNAVAILABLE"
        assert served.ready(), "a full server is a healthy one"
    for thread in threads:
        thread.join(20)
    wait(lambda: served.metric("clover_open_requests") == 0, 10)
    with Client(served.grpc) as client:
        assert client.generate(messages=REVERSE).text == "enots"


def test_the_asyncio_client_keeps_answers_apart(served: Served) -> None:
    async def ask_all() -> list[tuple[str, str]]:
        async with AsyncClient(served.grpc, retries=8) as client:
            words = ["stone", "river", "cloud", "green", "house", "apple"] * 4

            async def ask(word: str) -> tuple[str, str]:
                messages = [{"role": "user", "content": f'Reverse "{word}".'}]
                return word, "".join([piece.text async for piece in client.stream(messages=messages, max_tokens=64)])

            return await asyncio.gather(*(ask(word) for word in words))

    for word, answer in asyncio.run(ask_all()):
        assert answer == word[::-1]


KILLED = """
import sys
from clover_trt.serving.client import Client
stream = Client(sys.argv[1]).stream(messages=[{"role": "user", "content": "x"}], max_tokens=256, ignore_eos=True, threshold=1.0)
next(stream)
print("first", flush=True)
for _ in stream:
    pass
"""


def test_a_client_killed_in_the_middle_frees_its_slot(served: Served) -> None:
    before = served.metric("clover_requests_total", outcome="cancelled")
    process = subprocess.Popen([sys.executable, "-c", KILLED, served.grpc], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "first\n"
    process.kill()
    process.wait()
    wait(lambda: served.metric("clover_requests_total", outcome="cancelled") == before + 1, 10)


def test_metrics_count_what_happened(served: Served) -> None:
    names = ("clover_prompt_tokens_total", "clover_output_tokens_total", "clover_forwards_total", "clover_tpf_count")
    before = {name: served.metric(name) for name in names}
    with Client(served.grpc) as client:
        answer = client.generate(messages=REVERSE, max_tokens=64)
    added = [served.metric(name) - before[name] for name in names]
    assert added == [answer.prompt_tokens, answer.output_tokens, answer.forwards, 1]
    assert served.metric("clover_slots") == 4
    assert served.metric("clover_cache_bytes") > 0
    assert served.metric("clover_prefix_cache_hits") > 0


def test_a_message_that_is_not_one_is_no_harm(served: Served) -> None:
    """Bytes that are no tensor of text: a length that points past the end."""
    message = request_message("clover", "", input_tensors("x", {}))
    message.raw_input_contents[0] = b"\xff\xff\xff\x7fx"
    with Client(served.grpc) as client:
        with pytest.raises(ServingError):
            list(client._pieces(message))
        assert client.generate(messages=REVERSE).text == "enots"


def test_a_killed_model_process_comes_back_and_nobody_hangs(tiny_engine: EnginePackage) -> None:
    served = start(tiny_engine.folder, "--slots", "4", "--threads", "1")
    try:
        outcomes: queue.Queue[str] = queue.Queue()

        def ask() -> None:
            try:
                with Client(served.grpc, retries=0) as client:
                    outcomes.put(f"complete {client.generate(messages=REVERSE, **ENDLESS).output_tokens}")
            except ServingError as error:
                outcomes.put(f"error {error.code}")

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        wait(lambda: served.metric("clover_slots_busy") == 4, 10)
        began = time.monotonic()
        for each in served.model_processes():
            each.kill()
        wait(lambda: not served.ready(), 11)
        wait(served.ready, 20)
        back = time.monotonic() - began
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert outcomes.qsize() == 4
        assert back < 15
        with Client(served.grpc) as client:
            assert client.generate(messages=REVERSE).text == "enots"
    finally:
        output = end(served)
    assert "restarting the server" in output


def test_a_hung_model_process_is_replaced(tiny_engine: EnginePackage) -> None:
    served = start(tiny_engine.folder, "--slots", "2", "--threads", "1")
    try:
        for each in served.model_processes():
            each.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        wait(lambda: not served.ready(), 12)
        assert time.monotonic() - began < 10.5
        wait(served.ready, 20)
        with Client(served.grpc) as client:
            assert client.generate(messages=REVERSE).text == "enots"
    finally:
        end(served)


def test_sigterm_lets_running_and_waiting_requests_end(tiny_engine: EnginePackage) -> None:
    served = start(tiny_engine.folder, "--slots", "4", "--threads", "1")
    answers: list[tuple[str, int]] = []
    with Client(served.grpc, retries=0) as client:

        def ask() -> None:
            answer = client.generate(messages=REVERSE, **ENDLESS)
            answers.append((answer.finish_reason, answer.output_tokens))

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        wait(lambda: served.metric("clover_open_requests") == 16, 10)
        served.process.send_signal(signal.SIGTERM)
        wait(lambda: not served.ready(), 5)
        time.sleep(0.5)
        with pytest.raises(ServingError, match="the server is stopping") as caught:
            client.generate(messages=REVERSE)
        assert caught.value.code == "UNAVAILABLE"
        for thread in threads:
            thread.join(30)
    assert answers == [("length", 256)] * 16
    output, _ = served.process.communicate(timeout=30)
    assert served.process.returncode == 0
    assert "stopped" in output
    assert not list(Path("/dev/shm").glob(f"clover_trt_{served.process.pid}_*"))


def test_what_cannot_be_served_is_said_before_a_server_starts(tmp_path: Path, tiny_engine: EnginePackage) -> None:
    def refused(*options: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "clover_trt.cli", "serve", *options], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "not a folder; expected an engine package" in refused("--engine", str(tmp_path / "none"))
    assert "expected four different ones" in refused("--engine", str(tiny_engine.folder), "--http-port", "9", "--grpc-port", "9")
    assert "slots: Input should be greater" in refused("--engine", str(tiny_engine.folder), "--slots", "0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        assert f"health port {port}" in refused("--engine", str(tiny_engine.folder), "--health-port", port)
