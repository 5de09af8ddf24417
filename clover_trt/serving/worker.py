"""One thread that drives the scheduler for requests that come from anywhere."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from clover_trt.errors import EngineError, QueueFullError
from clover_trt.runtime.generate import Generator
from clover_trt.runtime.request import PassEvent, Request
from clover_trt.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)
WAITING_POLL = 0.2  # seconds


class ServerStoppingError(EngineError):
    """The server takes no new requests."""


@dataclass(eq=False)
class Job:
    """A request on its way; the functions are called from the worker's thread and must not block."""

    request: Request
    on_event: Callable[[PassEvent], None]
    on_failure: Callable[[str], None]  # the engine failed; nothing more comes
    is_cancelled: Callable[[], bool] = lambda: False
    deadline: float | None = None  # time.monotonic()


class Observer(Protocol):
    """What metrics see, from the worker's thread."""

    def passed(self, worker: Worker) -> None:
        """A pass of the scheduler has ended."""
        ...


class Worker:
    """Takes jobs from any thread and runs them over the slots of a generator's session.

    Args:
        generator: engine, tokenizer and prefix cache.
        max_queue: jobs that may wait for a slot.
        observer: sees every pass.
    """

    def __init__(self, generator: Generator, *, max_queue: int, observer: Observer | None = None) -> None:
        self.generator, self.max_queue, self._observer = generator, max_queue, observer
        self.slots = generator.session.slots
        self.passes = 0
        self._jobs: dict[Request, Job] = {}
        self._inbox: list[Job] = []
        self._canaries: list[tuple[int, Callable[[], None]]] = []
        self._open = 0
        self._stopping = self._draining = False
        self._ask_all_at = 0.0
        self._wake = threading.Condition()
        self._scheduler = self._new_scheduler()
        self._thread = threading.Thread(target=self._run, name="clover-worker", daemon=True)
        self._thread.start()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.generator.session, prefix_cache=self.generator.prefix_cache)

    @property
    def open_requests(self) -> int:
        """Requests taken and not ended."""
        return self._open

    @property
    def busy(self) -> int:
        """Slots in use."""
        return self._scheduler.busy

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return max(0, self._open - self.busy)

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            QueueFullError: as many wait as may; nothing changed.
            ServerStoppingError: the worker is draining or stopped.
        """
        with self._wake:
            self._refuse_when_stopping()
            if self._open >= self.slots + self.max_queue:
                raise QueueFullError(
                    f"the queue is full: {self._open - self.slots} requests wait, the limit is {self.max_queue}; try again later"
                )
            self._open += 1
            self._inbox.append(job)
            self._wake.notify()

    def canary(self, answer: Callable[[], None], job: Job) -> None:
        """Call `answer` after the next whole pass: of `job`, a small request, when nothing runs; else of what runs.

        Raises:
            ServerStoppingError: the worker is stopped.
        """
        with self._wake:
            self._refuse_when_stopping(also_draining=False)
            self._canaries.append((self.passes, answer))
            if not self._open:
                self._open += 1
                self._inbox.append(job)
            self._wake.notify()

    def _refuse_when_stopping(self, also_draining: bool = True) -> None:
        if self._stopping or (also_draining and self._draining):
            raise ServerStoppingError("the server is stopping and takes no new requests; try another one")

    def drain(self) -> None:
        """Take no new requests from now on."""
        self._draining = True

    def stop(self) -> None:
        """End every open request with what it has, and the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._inbox or self._jobs or self._stopping)
                fresh, self._inbox = self._inbox, []
                stopping = self._stopping
            for job in fresh:
                self._jobs[job.request] = job
                self._scheduler.add(job.request, deadline=job.deadline)
            for job in list(self._jobs.values()) if stopping else self._due_to_ask():
                if stopping or job.is_cancelled():
                    self._scheduler.cancel(job.request)
            try:
                events = self._scheduler.step()
            except Exception as error:  # whatever the engine's library raises: open requests must hear of it
                logger.exception("the engine failed")
                self._fail(f"the engine failed: {error}")
                events = []
            for event in events:
                self._deliver(event)
            self.passes += 1
            self._answer_canaries()
            if self._observer is not None:
                self._observer.passed(self)
            if stopping and not self._jobs:
                return

    def _due_to_ask(self) -> list[Job]:
        """Jobs whose clients are asked whether they are still there: each costs a message to the server's process, so those that
        run are asked in every pass and those that wait a few times a second."""
        now = time.monotonic()
        if now >= self._ask_all_at:
            self._ask_all_at = now + WAITING_POLL
            return list(self._jobs.values())
        return [self._jobs[request] for request in self._scheduler.running if request in self._jobs]

    def _deliver(self, event: PassEvent) -> None:
        job = self._jobs[event.request]
        if event.finish_reason is not None:
            del self._jobs[event.request]
            with self._wake:
                self._open -= 1
        try:
            job.on_event(event)
        except Exception:  # a client that can't be reached must not stop the others
            logger.exception("a response could not be sent")
            self._scheduler.cancel(event.request)

    def _answer_canaries(self) -> None:
        with self._wake:
            due = [answer for since, answer in self._canaries if self.passes > since]
            self._canaries = [each for each in self._canaries if self.passes <= each[0]]
        for answer in due:
            answer()

    def _fail(self, message: str) -> None:
        """End every open request with an error and start afresh."""
        jobs, self._jobs = list(self._jobs.values()), {}
        with self._wake:
            self._open -= len(jobs)
        for job in jobs:
            try:
                job.on_failure(message)
            except Exception:
                logger.exception("an error could not be sent")
        self._scheduler = self._new_scheduler()
