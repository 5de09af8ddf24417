"""In-flight batching: requests share block steps, whatever phase each is in.

One pass of the scheduler serves every request in a slot. Rows that denoise, commit a block or hold a short prompt go
through one step together. Prompts that need more advance in a step of their own, neighbours together as long as they make up one
chunk: they delay the others by that chunk at most, and no denoising row is padded to their length.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Many

import numpy as np

from clover_trt.errors import QueueFullError
from clover_trt.runtime.controls import stack
from clover_trt.runtime.prefix_cache import PrefixCache
from clover_trt.runtime.request import PassEvent, Request
from clover_trt.runtime.sequence import Sequence
from clover_trt.runtime.session import Session, StepInput


def build_step(sequences: Many[Sequence | None], filler: int, first_slot: int = 0) -> StepInput:
    """Plan the next step of `sequences`, one a row; None is an idle row.

    Args:
        filler: id of padding and of unused control entries (the mask token).
        first_slot: slot of the first row.
    """
    plans = [sequence.plan() if sequence else None for sequence in sequences]
    B = len(plans)
    commit = np.array([len(plan.commit) if plan else 0 for plan in plans], np.int32)
    noisy = np.array([len(plan.noisy) if plan else 0 for plan in plans], np.int32)
    T, L = int((commit + noisy).max()), max(1, *(len(plan.positions) if plan else 0 for plan in plans))
    ids, index = np.full((B, T), filler, np.int64), np.zeros((B, L), np.int64)
    for b, plan in enumerate(plans):
        if plan:
            ids[b, : commit[b] + noisy[b]] = plan.commit + plan.noisy
            index[b, : len(plan.positions)] = plan.positions
    mass = np.array([s.settings.expert_subset_mass if s else 1.0 for s in sequences], np.float32)
    answering = [s if plan and plan.positions else None for s, plan in zip(sequences, plans, strict=True)]
    controls = stack([(s.row_controls(), s.settings) if s else None for s in answering], L, filler)
    wanted = max((s.candidates for s in sequences if s), default=1)
    return StepInput(ids, commit, noisy, index, mass, controls, candidates=wanted, first_slot=first_slot)


class Scheduler:
    """Runs requests over the slots of a session; not thread-safe, one caller drives it.

    Args:
        session: the engine.
        max_queue: requests that may wait for a slot; None for no limit.
        prefix_cache: reuse of earlier requests' states; None for none.
    """

    def __init__(self, session: Session, *, max_queue: int | None = None, prefix_cache: PrefixCache | None = None) -> None:
        self.session, self.max_queue, self.prefix_cache = session, max_queue, prefix_cache
        self._queue: deque[Request] = deque()
        self._slots: list[Request | None] = [None] * session.slots
        self._deadlines: dict[Request, float] = {}
        self._cancelled: set[Request] = set()
        self._prefilled_last = -1  # slot whose prompt advanced last

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._queue and not any(self._slots)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def busy(self) -> int:
        """Slots in use."""
        return sum(request is not None for request in self._slots)

    @property
    def running(self) -> list[Request]:
        """Requests in a slot."""
        return [request for request in self._slots if request is not None]

    def add(self, request: Request, *, deadline: float | None = None) -> None:
        """Queue a request.

        Args:
            deadline: `time.monotonic()` after which it ends with what it has.

        Raises:
            QueueFullError: the queue is full; nothing changed.
        """
        free = self.session.slots - self.busy
        if self.max_queue is not None and len(self._queue) >= self.max_queue + free:
            raise QueueFullError(
                f"the queue is full: {len(self._queue)} requests wait, the limit is {self.max_queue}; try again later"
            )
        self._queue.append(request)
        if deadline is not None:
            self._deadlines[request] = deadline

    def cancel(self, request: Request) -> None:
        """End a request at the next pass, before any work is done for it; one that has ended is left alone."""
        if not request.ended:
            self._cancelled.add(request)

    def step(self) -> list[PassEvent]:
        """One pass: end what is cancelled or late, fill free slots, run at most two steps; an event for each request touched."""
        events = self._end_early()
        self._admit()
        prefill = self._next_prefills()
        together = [None if r is None or self._is_long(r) else r for r in self._slots]
        used = [slot for slot, request in enumerate(together) if request]
        if used:
            events += self._run(together[used[0] : used[-1] + 1], used[0])
        if prefill:
            self._prefilled_last = prefill[-1]
            events += self._run(self._slots[prefill[0] : prefill[-1] + 1], prefill[0])
        for event in events:
            if event.finish_reason is not None:
                self._forget(event.request)
        return events

    def _end_early(self) -> list[PassEvent]:
        now = time.monotonic()
        events = []
        for request in [r for r in (*self._slots, *self._queue) if r is not None]:
            if request in self._cancelled:
                events.append(request.end_early("cancelled"))
            elif self._deadlines.get(request, now) < now:
                events.append(request.end_early("deadline"))
        for event in events:
            self._forget(event.request)
        return events

    def _forget(self, request: Request) -> None:
        self._slots = [None if each is request else each for each in self._slots]
        if request in self._queue:
            self._queue.remove(request)
        self._deadlines.pop(request, None)
        self._cancelled.discard(request)

    def _admit(self) -> None:
        """Give waiting requests the lowest free slots, in order."""
        for slot, request in enumerate(self._slots):
            if request is None and self._queue:
                self.session.reset(slot)
                self._slots[slot] = self._queue.popleft()
                self._reuse(slot)

    def _reuse(self, slot: int) -> None:
        """Start a request from the longest known beginning of its prompt."""
        request = self._slots[slot]
        if self.prefix_cache is None or request is None:
            return
        chain = self.prefix_cache.match(request.sequence.reusable)
        if chain:
            self.session.load(slot, chain)
            request.sequence.skip(chain[-1].end)

    def _keep(self, slot: int, request: Request) -> None:
        """Remember a slot's state for requests that begin with the same tokens."""
        count = int(self.session.prefix_len[slot])
        if self.prefix_cache is not None and count and request.error is None:
            self.prefix_cache.store(request.sequence.committed(count), self.session, slot)

    def _is_long(self, request: Request) -> bool:
        """Whether the next step commits more than a block, so that it would pad the others."""
        return request.sequence.next_commit > request.sequence.settings.block_size

    def _next_prefills(self) -> list[int]:
        """The slots whose prompts advance in this pass: the next one in turn, and neighbours while they fit into its chunk."""
        long = {
            slot: request.sequence.next_commit for slot, request in enumerate(self._slots) if request and self._is_long(request)
        }
        first = min(long, key=lambda slot: (slot <= self._prefilled_last, slot), default=None)
        if first is None:
            return []
        chosen, limit = [first], max(long[first], self._slots[first].sequence.prefill_chunk)  # type: ignore[union-attr]
        while (slot := chosen[-1] + 1) in long and (len(chosen) + 1) * max(long[each] for each in (*chosen, slot)) <= limit:
            chosen.append(slot)
        return chosen

    def _run(self, rows: Many[Request | None], first_slot: int) -> list[PassEvent]:
        filler = self.session.config.mask_token_id or 0
        long = [slot for slot, row in enumerate(rows, first_slot) if row and self._is_long(row)]
        step = build_step([row.sequence if row else None for row in rows], filler, first_slot)
        before = {
            slot: self.session.save(slot, int(self.session.prefix_len[slot]))
            for slot, row in enumerate(rows, first_slot)
            if row and row.sequence.tentative
        }
        output = self.session.step(step)
        events = [row.apply(output, index) for index, row in enumerate(rows) if row]
        for slot, row in enumerate(rows, first_slot):
            if row and slot in before and row.sequence.undo:
                self.session.load(slot, [before[slot]])
            if row and (slot in long or row.ended or row.sequence.worth_keeping):
                self._keep(slot, row)
        return events
