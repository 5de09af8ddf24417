"""Metrics of the model process, in the server's Prometheus endpoint through Triton's `MetricFamily`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from clover_trt.runtime.request import Request
from clover_trt.serving.worker import Worker

OUTCOMES = ("stop", "length", "max_forwards", "cancelled", "deadline", "error", "refused", "queue_full")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REFRESH = 0.25  # seconds between updates of gauges: each is a message to the server's process


@dataclass(frozen=True)
class Family:
    """One metric."""

    name: str
    kind: str  # COUNTER, GAUGE or HISTOGRAM
    text: str
    buckets: tuple[float, ...] = ()
    outcomes: bool = False


FAMILIES = (
    Family("clover_requests_total", "COUNTER", "Requests by outcome", outcomes=True),
    Family("clover_prompt_tokens_total", "COUNTER", "Prompt tokens of ended requests"),
    Family("clover_cached_tokens_total", "COUNTER", "Prompt tokens whose state came from an earlier request"),
    Family("clover_output_tokens_total", "COUNTER", "Output tokens of ended requests"),
    Family("clover_forwards_total", "COUNTER", "Block steps of ended requests, each row counted"),
    Family("clover_tpf", "HISTOGRAM", "Output tokens per forward of a request", (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)),
    Family("clover_time_to_first_block_seconds", "HISTOGRAM", "Arrival to first finished block", SECONDS),
    Family("clover_inter_block_seconds", "HISTOGRAM", "Time between finished blocks of a request", SECONDS),
    Family("clover_request_seconds", "HISTOGRAM", "Arrival to last token", SECONDS),
    Family("clover_experts_distinct", "GAUGE", "Distinct experts per layer and forward, mean of the last request that ended"),
    Family("clover_slots", "GAUGE", "Slots"),
    Family("clover_slots_busy", "GAUGE", "Slots in use"),
    Family("clover_queue_length", "GAUGE", "Requests that wait for a slot"),
    Family("clover_open_requests", "GAUGE", "Requests taken and not ended"),
    Family("clover_passes_total", "GAUGE", "Passes of the scheduler since the process began"),
    Family("clover_cache_bytes", "GAUGE", "Bytes of keys, values and states of all slots"),
    Family("clover_prefix_cache_bytes", "GAUGE", "Bytes of kept states"),
    Family("clover_prefix_cache_hits", "GAUGE", "Requests that began from a kept state"),
    Family("clover_prefix_cache_lookups", "GAUGE", "Requests that looked for one"),
    Family("clover_prefix_cache_evictions", "GAUGE", "Kept states that made room for others"),
)


class Metrics:
    """The families, registered with the server.

    Args:
        factory: Triton's `MetricFamily`.
        cache_bytes: bytes of the slots' caches.
    """

    def __init__(self, factory: Any, cache_bytes: int) -> None:
        self._families: list[Any] = []  # must live as long as their metrics
        self._metrics: dict[str, Any] = {}
        for each in FAMILIES:
            family = factory(name=each.name, description=each.text, kind=getattr(factory, each.kind))
            self._families.append(family)
            for outcome in OUTCOMES if each.outcomes else (None,):
                labels = {"outcome": outcome} if outcome else {}
                options = {"buckets": list(map(float, each.buckets))} if each.buckets else {}
                self._metrics[each.name + (outcome or "")] = family.Metric(labels=labels, **options)
        self._metrics["clover_cache_bytes"].set(cache_bytes)
        self._values: dict[str, float] = {}
        self._due = 0.0

    def refused(self, outcome: str) -> None:
        """A request that was not taken."""
        self._metrics["clover_requests_total" + outcome].increment(1)

    def ended(self, request: Request) -> None:
        """A request that was taken and has ended."""
        m, result = self._metrics, request.result()
        m["clover_requests_total" + result.finish_reason].increment(1)
        m["clover_prompt_tokens_total"].increment(result.prompt_tokens)
        m["clover_cached_tokens_total"].increment(result.cached_tokens)
        m["clover_output_tokens_total"].increment(len(result.token_ids))
        m["clover_forwards_total"].increment(result.forwards)
        if result.forwards:
            m["clover_tpf"].observe(result.tpf)
            m["clover_experts_distinct"].set(float(np.mean(result.distinct_experts)))
        if request.first_block is not None:
            m["clover_time_to_first_block_seconds"].observe(result.seconds_to_first_block)
        for gap in request.gaps:
            m["clover_inter_block_seconds"].observe(gap)
        m["clover_request_seconds"].observe(result.seconds)

    def passed(self, worker: Worker) -> None:
        """Refresh the gauges, now and then, and when the last request has ended."""
        now = time.monotonic()
        if now < self._due and worker.open_requests:
            return
        self._due = now + REFRESH
        values: dict[str, float] = {
            "clover_slots": worker.slots,
            "clover_slots_busy": worker.busy,
            "clover_queue_length": worker.waiting,
            "clover_open_requests": worker.open_requests,
            "clover_passes_total": worker.passes,
        }
        cache = worker.generator.prefix_cache
        if cache is not None:
            names = ("bytes", "hits", "lookups", "evictions")
            values |= {f"clover_prefix_cache_{name}": getattr(cache.statistics, name) for name in names}
        for name, value in values.items():
            if self._values.get(name) != value:
                self._metrics[name].set(value)
                self._values[name] = value
