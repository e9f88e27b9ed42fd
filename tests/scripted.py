"""A system whose latencies are written down, on a virtual clock: what it reports is known before it runs."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Request
from pensieve.lab.workload.base import WorkloadContext
from pensieve.serve.record import TurnRecord
from pensieve.serve.systems.base import Capabilities
from pensieve.sim.worker import VirtualClock


@dataclass(frozen=True)
class Latency:
    """Milliseconds: in the queue, from admission to the first token, and between tokens."""

    queue: int = 10
    first: int = 40
    gap: int = 5
    hit: int = 0
    history: int = 0


class ScriptedSystem:
    """Serves every request at once, as slowly as `latency` says; tokens are 1, 2, 3, ... of the request's length."""

    def __init__(
        self,
        latency: Callable[[Request], Latency] = lambda request: Latency(),
        can: Capabilities | None = None,
        started_at_s: float = 0.0,
    ) -> None:
        self.clock = VirtualClock()
        self.clock.advance_to(round(started_at_s * 1e9))
        self.can = can or Capabilities()
        self.latency = latency
        self.submitted: list[Request] = []
        self.expected: list[tuple[str, float]] = []
        self.most_in_flight = 0
        self._heap: list[tuple[int, int, Event]] = []
        self._live: dict[int, TurnRecord] = {}
        self._sequence = count()

    def start(self) -> StartReport:
        return StartReport(load_s=1.5, warmup_ms=250.0)

    def submit(self, request: Request) -> None:
        self.submitted.append(request)
        latency, now = self.latency(request), self.clock.now_ns()
        turn = TurnRecord(request.session, request.turn, request_id=request.id, intended_s=request.intended_s)
        admitted = now + latency.queue * 10**6
        turn.arrived_s, turn.admitted_s = now / 1e9, admitted / 1e9
        turn.prompt_tokens, turn.history_tokens = len(request.prompt), latency.history
        turn.gpu_hit_tokens, turn.cpu_hit_tokens = latency.hit, 0
        turn.recomputed_tokens, turn.shared_hit_tokens = latency.history - latency.hit, 0
        turn.new_tokens = len(request.prompt) - latency.history
        self._live[request.id] = turn
        self.most_in_flight = max(self.most_in_flight, len(self._live))
        for index in range(request.output.max_new_tokens):
            at = admitted + (latency.first + index * latency.gap) * 10**6
            kind = "token" if index else "first_token"
            self._push(at, Event(kind, request.id, at / 1e9, token=index + 1))  # type: ignore[arg-type]
        self._push(at, Event("finished", request.id, at / 1e9, turn=turn))

    def cancel(self, request_id: int, status: str) -> None:
        turn = self._live.get(request_id)
        if turn is not None:
            turn.status = status
            now = self.clock.now_ns()
            self._push(now, Event("finished", request_id, now / 1e9, turn=turn))

    def poll(self, until_s: float | None) -> list[Event]:
        until = None if until_s is None else round(until_s * 1e9)
        happened: list[Event] = []
        while self._heap and (until is None or self._heap[0][0] <= until):
            at, _, event = heapq.heappop(self._heap)
            turn = self._live.get(event.request_id)
            if turn is None:
                continue
            self.clock.advance_to(at)
            happened.append(event)
            if event.kind == "finished":
                del self._live[event.request_id]
                turn.close(turn.status, None, event.at_s)
                return happened
            assert event.token is not None
            turn.token_ids.append(event.token)
            turn.emitted_s.append(event.at_s)
            turn.first_token_s = turn.emitted_s[0]
        if until is not None:
            self.clock.advance_to(until)
        return happened

    def forget(self, session: str | None) -> None:
        """Nothing is kept."""

    def expect(self, session: str, next_use_s: float) -> None:
        self.expected.append((session, next_use_s))

    def counters(self) -> dict[str, float]:
        served = float(len(self.submitted))
        return {
            "steps": 10 * served,
            "schedule_ms": 2 * served,
            "evicted_chunks": served,
            "swapped_in_bytes": 64 * served,
        }

    def settings(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._live.clear()

    def _push(self, at: int, event: Event) -> None:
        heapq.heappush(self._heap, (at, next(self._sequence), event))


def context(
    seed: int = 0,
    gpu_tokens: int = 0,
    cpu_tokens: int = 0,
    max_context: int = 8192,
    force_lengths: bool = True,
) -> WorkloadContext:
    return WorkloadContext(
        seed=seed,
        gpu_tokens=gpu_tokens,
        cpu_tokens=cpu_tokens,
        max_context=max_context,
        vocab=256,
        encode=lambda text: list(text.encode()),
        force_lengths=force_lengths,
    )
