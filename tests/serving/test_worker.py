"""The worker's thread, over the CPU engine of clover-tiny."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from clover_trt.engine.package import EnginePackage
from clover_trt.errors import QueueFullError
from clover_trt.runtime.generate import Generator
from clover_trt.runtime.prefix_cache import PrefixCache
from clover_trt.runtime.request import PassEvent, Request
from clover_trt.serving.worker import Job, ServerStoppingError, Worker


@pytest.fixture
def worker(tiny_engine: EnginePackage) -> Iterator[Worker]:
    made = Worker(Generator(tiny_engine, slots=3, threads=1, prefix_cache=PrefixCache(8 << 20)), max_queue=20)
    yield made
    made.stop()


class Client:
    """Collects what comes for one request."""

    def __init__(self, worker: Worker, text: str, **settings: object) -> None:
        sequence = worker.generator.chat([{"role": "user", "content": text}], **{"max_new_tokens": 48, **settings})
        self.events: queue.Queue[PassEvent | str] = queue.Queue()
        self.cancelled = threading.Event()
        self.request = Request(sequence, worker.generator.codec)
        self.job = Job(self.request, self.events.put, self.events.put, self.cancelled.is_set)

    def wait(self) -> str:
        while True:
            event = self.events.get(timeout=30)
            if isinstance(event, str):
                return f"failed: {event}"
            if event.finish_reason is not None:
                return event.finish_reason


def test_requests_from_many_threads_get_their_own_answers(worker: Worker) -> None:
    words = ["stone", "river", "cloud", "apple", "green", "house"]
    found: dict[int, tuple[str, str]] = {}

    def ask(number: int) -> None:
        client = Client(worker, f'Reverse "{words[number % 6]}".')
        while True:
            try:
                worker.submit(client.job)
                break
            except QueueFullError:
                time.sleep(0.01)
        client.wait()
        found[number] = (words[number % 6], client.request.text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 60
    assert all(answer == word[::-1] for word, answer in found.values()), found
    assert worker.open_requests == 0


def test_a_full_queue_refuses_and_a_cancelled_request_makes_room(worker: Worker) -> None:
    clients = [Client(worker, "Count on.", max_new_tokens=128, ignore_eos=True, threshold=1.0) for _ in range(23)]
    for client in clients:
        worker.submit(client.job)
    with pytest.raises(QueueFullError, match="20 requests wait, the limit is 20"):
        worker.submit(Client(worker, "x").job)
    for client in clients:
        client.cancelled.set()
    assert [client.wait() for client in clients] == ["cancelled"] * 23
    assert worker.open_requests == 0


def test_a_failing_engine_ends_every_request_with_an_error_and_goes_on(worker: Worker) -> None:
    session = worker.generator.session
    step, clients = session.step, [Client(worker, "Count on.", max_new_tokens=128, ignore_eos=True) for _ in range(5)]
    failing = threading.Event()

    def fail(*_: object) -> None:
        if failing.is_set():
            raise RuntimeError("illegal address")
        return step(*_)  # type: ignore[arg-type, return-value]

    session.step = fail  # type: ignore[method-assign, assignment]
    for client in clients:
        worker.submit(client.job)
    failing.set()
    assert {client.wait() for client in clients} == {"failed: the engine failed: illegal address"}
    failing.clear()
    again = Client(worker, 'Reverse "stone".')
    worker.submit(again.job)
    assert (again.wait(), again.request.text) == ("stop", "enots")


def test_a_client_that_cannot_be_sent_to_ends_alone(worker: Worker) -> None:
    def broken(event: PassEvent) -> None:
        raise BrokenPipeError

    bad, good = Client(worker, "Count on.", max_new_tokens=128, ignore_eos=True), Client(worker, 'Reverse "stone".')
    worker.submit(Job(bad.request, broken, bad.events.put))
    worker.submit(good.job)
    assert (good.wait(), good.request.text) == ("stop", "enots")
    end = time.monotonic() + 20
    while worker.open_requests:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert bad.request.sequence.finish_reason == "cancelled"


def test_a_canary_is_a_request_of_its_own_or_the_next_pass(worker: Worker) -> None:
    def canary() -> bool:
        answered = threading.Event()
        sequence = worker.generator.sequence([1], max_new_tokens=1, max_forwards=2)
        request = Request(sequence, worker.generator.codec)
        worker.canary(answered.set, Job(request, lambda event: None, lambda message: None))
        return answered.wait(10)

    before = worker.passes
    assert canary()
    assert worker.passes > before
    clients = [Client(worker, "Count on.", max_new_tokens=128, ignore_eos=True, threshold=1.0) for _ in range(8)]
    for client in clients:
        worker.submit(client.job)
    assert all(canary() for _ in range(5)), "a full server answers too"
    for client in clients:
        client.cancelled.set()
        client.wait()


def test_draining_refuses_new_requests_and_ends_the_old(worker: Worker) -> None:
    client = Client(worker, 'Reverse "stone".')
    worker.submit(client.job)
    worker.drain()
    with pytest.raises(ServerStoppingError, match="takes no new requests"):
        worker.submit(Client(worker, "x").job)
    assert client.wait() == "stop"


def test_stopping_ends_open_requests(tiny_engine: EnginePackage) -> None:
    worker = Worker(Generator(tiny_engine, slots=2, threads=1), max_queue=4)
    clients = [Client(worker, "Count on.", max_new_tokens=128, ignore_eos=True) for _ in range(5)]
    for client in clients:
        worker.submit(client.job)
    worker.stop()
    assert {client.wait() for client in clients} <= {"cancelled", "length"}
