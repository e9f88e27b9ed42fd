"""What /metrics tells: counts and times of all clients together, no label of which names one of them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pensieve.serve.record import TurnRecord
from pensieve.serve.server import memory
from pensieve.serve.server.api import Server
from pensieve.serve.server.schemas import prompt_details

_TTFT_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_FOUND = ("gpu", "cpu", "disk", "recomputed", "new")


class Meters:
    """Counters that turns are told to, and gauges that are read when somebody asks."""

    def __init__(self, server: Server) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("pensieve_requests", "Turns that ended", ["status"], registry=registry)
        self._refused = Counter("pensieve_shed_requests", "Turned away with 429", registry=registry)
        self._ttft = Histogram("pensieve_ttft_seconds", "Time to first token", buckets=_TTFT_S, registry=registry)
        self._itl = Histogram("pensieve_itl_seconds", "Time between tokens", buckets=_ITL_S, registry=registry)
        self._prompt = Counter(
            "pensieve_prompt_tokens", "Prompt tokens by where their KV was", ["found"], registry=registry
        )
        self._output = Counter("pensieve_output_tokens", "Tokens generated", registry=registry)
        registry.register(_Gauges(server))

    def turn_ended(self, turn: TurnRecord) -> None:
        self._requests.labels(turn.status).inc()
        self._output.inc(turn.output_tokens)
        if turn.ttft_ms is not None:
            self._ttft.observe(turn.ttft_ms / 1e3)
        for before, after in pairwise(turn.emitted_s):
            self._itl.observe(after - before)
        details = prompt_details(turn)
        for place in _FOUND:
            self._prompt.labels(place).inc(details[place])

    def shed(self) -> None:
        self._refused.inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, (value, unit) in self._server.gauges().items():
            yield GaugeMetricFamily(f"pensieve_{name}", f"{name.replace('_', ' ')}, in {unit}", value=value)
        blocks, malloc_bytes = sys.getallocatedblocks(), memory.malloc_bytes()
        yield GaugeMetricFamily("pensieve_python_blocks", "objects that Python's allocator holds", value=blocks)
        if malloc_bytes is not None:
            yield GaugeMetricFamily("pensieve_malloc_bytes", "in use of the C library's memory", value=malloc_bytes)
        yield GaugeMetricFamily("pensieve_sessions", "conversations", value=len(self._server.conversations))
        yield GaugeMetricFamily("pensieve_turns_under_way", "turns that run or wait", value=self._server.under_way)
