"""An engine on a virtual clock: it runs in the thread of whoever polls."""

from __future__ import annotations

import threading
from typing import Any

from pensieve.baselines.engine_system import EngineSystem
from pensieve.clock import VirtualClock
from pensieve.cost.base import CostModel
from pensieve.cost.roofline import Roofline
from pensieve.plan import StartReport
from pensieve.record import Event
from pensieve.request import Request


class InlineSystem(EngineSystem):
    """`poll` runs the engine. Several threads may use it: each call has the engine to itself, so that one made during a
    poll takes effect when that poll returns."""

    def __init__(self, **parts: Any) -> None:
        """parts: as EngineSystem takes them, with a VirtualClock."""
        super().__init__(**parts)
        self._lock = threading.Lock()

    def submit(self, request: Request) -> None:
        with self._lock:
            self.engine.submit(request)

    def cancel(self, request_id: int, status: str) -> None:
        with self._lock:
            self.engine.cancel(request_id, status)

    def expect(self, session: str, next_use_s: float | None) -> None:
        """When the schedule will ask this conversation again; only an offline policy reads it."""
        with self._lock:
            self.engine.expect(session, next_use_s)

    def forget(self, session: str | None) -> None:
        with self._lock:
            self.engine.forget(session)

    def poll(self, until_s: float | None) -> list[Event]:
        with self._lock:
            return self._run(None if until_s is None else round(until_s * 1e9))

    def close(self) -> None:
        with self._lock:
            self._worker.close()

    # -- how ----------------------------------------------------------------------------------------------------------

    def _prices(self, report: StartReport) -> CostModel:
        return Roofline(self._model, self._hardware, self._chunk_tokens)

    def _begin(self) -> None:
        """Nothing runs before the first poll."""

    def _run(self, until_ns: int | None) -> list[Event]:
        engine, clock = self.engine, self.clock
        assert isinstance(clock, VirtualClock)
        events = engine.take_events()
        finished = _any_finished(events)
        while not finished:
            if until_ns is not None and clock.now_ns() >= until_ns:
                break
            if until_ns is None and not engine.busy:
                break
            before = clock.now_ns()
            stepped = engine.step(until_ns)
            events += stepped
            finished = _any_finished(stepped)
            if not stepped and clock.now_ns() == before and not engine.progressed:
                # Nothing to compute and no copy ends by then.
                assert until_ns is not None, "requests wait, and nothing runs that could let them in"
                expiry_ns = engine.next_expiry_ns
                clock.advance_to(until_ns if expiry_ns is None else min(until_ns, expiry_ns))
        return events


def _any_finished(events: list[Event]) -> bool:
    return any(event.kind == "finished" for event in events)
