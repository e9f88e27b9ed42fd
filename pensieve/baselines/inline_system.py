"""An engine on a virtual clock: it runs in the thread of whoever polls."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from pensieve.baselines.engine_system import ENGINE_CLOSED, EngineSystem
from pensieve.clock import VirtualClock
from pensieve.cost.base import CostModel
from pensieve.cost.simulated import simulated_cost
from pensieve.errors import WorkerError
from pensieve.plan import StartReport
from pensieve.record import Event, TurnRecord
from pensieve.request import Request
from pensieve.worker.simulated import SimulatedWorker
from pensieve.worker.timeline import Timeline


class InlineSystem(EngineSystem):
    """`poll` and `ask` run the engine, in the thread that calls them. Several threads may use it: each call has the engine to
    itself, so that one made during a poll takes effect when that poll returns. Whoever asks runs the engine until some
    request has finished, and lets the others have it before going on: so those who ask at once are served together.
    """

    def __init__(self, **parts: Any) -> None:
        """parts: as EngineSystem takes them, with a VirtualClock."""
        super().__init__(**parts)
        self._lock = threading.Lock()
        self._untold: list[Event] = []  # happened while somebody asked, for the next poll
        self._ended: str | None = None  # why nobody can ask any more

    def submit(self, request: Request) -> None:
        with self._lock:
            self.engine.submit(request)

    def ask(self, request: Request) -> TurnRecord:
        answer: Future[TurnRecord] = Future()
        with self._lock:
            if self._ended is None:
                self._answers[request.id] = answer
                self.engine.submit(request)
        while not answer.done():
            with self._lock:
                if self._ended is not None:
                    raise WorkerError(self._ended)
                if not answer.done():
                    self._serve_those_who_asked()
        return answer.result()

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
            untold, self._untold = self._untold, []
            if _any_finished(untold):
                return untold
            events = self._run(None if until_s is None else round(until_s * 1e9))
            return untold + (self._answer(events) if self._answers else events)

    def draw_timeline(self) -> Timeline | None:
        """Collect what the machine does from now on; None for a worker that is not simulated."""
        if not isinstance(self._worker, SimulatedWorker):
            return None
        self._worker.timeline = Timeline()
        return self._worker.timeline

    def extrapolated(self) -> dict[str, Any]:
        """Terms of the cost model that were asked for more than was measured, by whoever asked: how often and how far."""
        return self._worker.cost.extrapolated() if isinstance(self._worker, SimulatedWorker) else {}

    def close(self) -> None:
        with self._lock:
            self._end(ENGINE_CLOSED)
            self._worker.close()

    # -- how ----------------------------------------------------------------------------------------------------------

    def _prices(self, report: StartReport) -> CostModel:
        return simulated_cost(self._model, self._hardware, self._chunk_tokens)

    def _begin(self) -> None:
        """Nothing runs before the first poll."""

    def _serve_those_who_asked(self) -> None:
        """Until some request has finished. A crash ends all that were asked."""
        try:
            self._untold += self._answer(self._run(None))
        except BaseException as crash:  # the engine may have stopped half way through a step, whatever it was
            sentence = f"The engine stopped: {crash}"
            self._end(sentence)
            if isinstance(crash, Exception):
                raise WorkerError(sentence) from crash
            raise

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._disappoint(WorkerError(self._ended))

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
