"""What a server tells: /metrics of all clients together, each conversation's turns and places, and its own memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pensieve.serve.record import TurnRecord
from pensieve.serve.server.api import Server
from pensieve.serve.server.conversations import Conversation
from pensieve.serve.server.replies import prompt_details


def malloc_bytes() -> int | None:
    """In use of the C library's heap, in which native libraries and larger objects have theirs; None: it does not say."""
    if not hasattr(psutil, "heap_info"):  # psutil knows the heaps of glibc, macOS and Windows
        return None
    told = psutil.heap_info()
    return told.heap_used + told.mmap_used


def give_back() -> None:
    """Free pages of the C library to the system, where it can: after long bodies or prompts its heap is else as large as
    the most that was ever needed."""
    if hasattr(psutil, "heap_trim"):
        psutil.heap_trim()


def settle() -> None:
    """All that there is now is here to stay: modules, model, engine. The cycle collector does not go through it again, which
    takes 0.1 s and more while nobody is served, nor lets what requests leave grow to a quarter of it: the second collection
    counts what is not here to stay, which is nothing."""
    gc.collect()
    gc.freeze()
    gc.collect()


_TOLD = ("status", "finish_reason", "ttft_ms", "latency_ms", "queue_ms", "prompt_tokens", "output_tokens")


def session_line(server: Server, conversation: Conversation) -> dict[str, Any]:
    """An entry of /v1/sessions. kv: where each chunk is, see CacheManager.places."""
    return {
        "id": conversation.id,
        "object": "session",
        "created_at": int(conversation.created_at),
        "used_at": int(conversation.used_at),
        "turns": len(conversation.marks),
        "tokens": len(conversation.tokens),
        "busy": not conversation.idle,
        "forked_from": conversation.parent,
        "kv": server.places(conversation),
    }


def session_body(server: Server, conversation: Conversation) -> dict[str, Any]:
    names = {one.engine_name: one.id for one in server.conversations.of(conversation.tenant)}  # and of nobody else
    marks = list(conversation.marks)
    turns = [turn_body(server, names, number, mark.turn) for number, mark in enumerate(marks, start=1)]
    return {
        **session_line(server, conversation),
        "keep_alive": conversation.keep_alive_s,
        "chunk_tokens": server.system.chunk_tokens,
        "statistics": turns,
    }


def turn_body(server: Server, names: Mapping[str, str], number: int, turn: TurnRecord) -> dict[str, Any]:
    """names: of conversations that may be told of, by their names in the engine."""
    return {
        "turn": number,
        **{name: getattr(turn, name) for name in _TOLD},
        "prompt_tokens_details": prompt_details(turn),
        "misses": [
            {
                "cause": miss.cause,
                "tokens": miss.tokens,
                "ms": miss.ms,
                "evicted_by": names.get(miss.evicted_by or ""),
                "evicted_at": miss.evicted_s and server.moment(miss.evicted_s),
            }
            for miss in turn.misses
        ],
    }


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
        for name, (value, unit) in self._server.system.gauges().items():
            yield GaugeMetricFamily(f"pensieve_{name}", f"{name.replace('_', ' ')}, in {unit}", value=value)
        blocks, in_use = sys.getallocatedblocks(), malloc_bytes()
        yield GaugeMetricFamily("pensieve_python_blocks", "objects that Python's allocator holds", value=blocks)
        if in_use is not None:
            yield GaugeMetricFamily("pensieve_malloc_bytes", "in use of the C library's memory", value=in_use)
        yield GaugeMetricFamily("pensieve_sessions", "conversations", value=len(self._server.conversations))
        yield GaugeMetricFamily("pensieve_turns_under_way", "turns that run or wait", value=self._server.under_way)
