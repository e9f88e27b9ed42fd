"""Who observes a server: meters for /metrics of all clients together, and what records its turns (serve.record=FILE)."""

import queue
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pensieve import __version__
from pensieve.lab.traffic.journal import COMMIT_S, Journal
from pensieve.lab.traffic.table import BLOCK_TOKENS, TOKEN_BYTES, Exchange, Facts, Salt, Status
from pensieve.serve.record import TurnRecord
from pensieve.serve.server.api import Server, Turn
from pensieve.serve.server.conversations import prompt_details

_TTFT_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_FOUND = ("gpu", "cpu", "disk", "recomputed", "new")


class Meters(Collector):
    """Counters that turns are told to, and gauges that are read when somebody asks."""

    def __init__(self, server: Server) -> None:
        self._server, self._registry = server, CollectorRegistry()
        registry = self._registry
        self._requests = Counter("pensieve_requests", "Turns that ended", ["status"], registry=registry)
        self.shed = Counter("pensieve_shed_requests", "Turned away with 429", registry=registry)
        self._ttft = Histogram("pensieve_ttft_seconds", "Time to first token", buckets=_TTFT_S, registry=registry)
        self._itl = Histogram("pensieve_itl_seconds", "Time between tokens", buckets=_ITL_S, registry=registry)
        self._prompt = Counter(
            "pensieve_prompt_tokens", "Prompt tokens by where their KV was", ["found"], registry=registry
        )
        self._output = Counter("pensieve_output_tokens", "Tokens generated", registry=registry)
        registry.register(self)
        server.observe(self._turn_ended)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _turn_ended(self, _: Turn, turn: TurnRecord) -> None:
        self._requests.labels(turn.status).inc()
        self._output.inc(turn.output_tokens)
        if turn.ttft_ms is not None:
            self._ttft.observe(turn.ttft_ms / 1e3)
        for before, after in pairwise(turn.emitted_s):
            self._itl.observe(after - before)
        details = prompt_details(turn)
        for place in _FOUND:
            self._prompt.labels(place).inc(details[place])

    def collect(self) -> Iterable[GaugeMetricFamily]:
        for name, (value, unit) in self._server.system.gauges().items():
            yield GaugeMetricFamily(f"pensieve_{name}", f"{name.replace('_', ' ')}, in {unit}", value=value)
        blocks = sys.getallocatedblocks()
        yield GaugeMetricFamily("pensieve_python_blocks", "objects that Python's allocator holds", value=blocks)
        if hasattr(psutil, "heap_info"):  # psutil knows the heaps of glibc, macOS and Windows
            heap = psutil.heap_info()
            in_use = heap.heap_used + heap.mmap_used
            yield GaugeMetricFamily("pensieve_malloc_bytes", "in use of the C library's memory", value=in_use)
        yield GaugeMetricFamily("pensieve_sessions", "conversations", value=len(self._server.conversations))
        yield GaugeMetricFamily("pensieve_turns_under_way", "turns that run or wait", value=self._server.under_way)


_STATUS: dict[str, Status] = {"completed": "completed", "cancelled": "cancelled", "timeout": "cancelled"}


class Recording:
    """Turns that ended go to a thread of its own, which hashes and writes them: no client waits for that. Neither texts nor
    tokens are kept. Raises ConfigError where the file cannot be made."""

    def __init__(self, server: Server, path: Path, config: Mapping[str, Any]) -> None:
        """config: of the command, for the name of its policy."""
        settings, clock = server.system.settings(), server.system.clock
        known = {name: settings.get(name) for name in ("gpu_tokens", "cpu_tokens", "disk_tokens")}
        names = {name: config[name]["name"] for name in ("baseline", "eviction", "model")}
        engine = {"name": "pensieve", "version": __version__, "policy": names["eviction"], **names, **known}
        engine["block_tokens"] = config["cache"]["chunk_tokens"]
        self._origin_s = clock.now_s()
        facts = Facts("serve", block=BLOCK_TOKENS, engine=engine, started_unix_s=server.moment(self._origin_s))
        self._journal, self._salt = Journal(path, facts), Salt()
        self.path = self._journal.path
        self._turns: queue.SimpleQueue[tuple[Turn, TurnRecord] | None] = queue.SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._write, name="pensieve-recording", daemon=True)
        self._thread.start()
        server.observe(lambda turn, record: self._turns.put((turn, record)))

    def close(self) -> None:
        """Write the turns that have ended, and complete the file."""
        self._turns.put(None)
        self._thread.join()
        self._journal.close()

    def _write(self) -> None:
        number = 0
        while (ended := self._turns.get()) is not None:
            self._journal.put(self._row(number, *ended))
            number += 1
            if self._turns.empty():
                time.sleep(COMMIT_S / 2)
                self._journal.commit()

    def _row(self, number: int, turn: Turn, record: TurnRecord) -> Exchange:
        prompt = turn.asked.tokens if turn.asked is not None else None
        said = [record.gpu_hit_tokens, record.cpu_hit_tokens, record.disk_hit_tokens]
        row = Exchange(number, record.intended_s - self._origin_s, status=_STATUS.get(record.status, "failed"))
        row.first_token_s, row.end_s = self._time(record.first_token_s), self._time(record.finished_s)
        row.session, row.session_from = self._salt.name(turn.conversation.id), "server"
        row.tenant = self._salt.name(turn.conversation.tenant) if turn.conversation.tenant else None
        row.finish_reason, row.output_tokens = record.finish_reason, record.output_tokens
        row.cached_gpu_tokens, row.cached_cpu_tokens, row.cached_disk_tokens = said
        row.cached_tokens = None if said[0] is None else sum(one or 0 for one in said)
        if prompt is not None:
            size = BLOCK_TOKENS * TOKEN_BYTES
            row.prompt_tokens, row.blocks = len(prompt), self._salt.blocks(prompt.tobytes(), size)
            row.output_blocks = self._salt.blocks((prompt + record.token_ids).tobytes(), size, len(row.blocks))
        return row

    def _time(self, clock_s: float | None) -> float | None:
        return None if clock_s is None else clock_s - self._origin_s
