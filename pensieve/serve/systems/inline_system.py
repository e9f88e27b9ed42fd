"""An engine on a virtual clock: it runs in the thread of whoever polls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from pensieve.core.machine import CostModel, VirtualClock
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Request, TokenArray
from pensieve.errors import WorkerError
from pensieve.serve.systems.base import Listener
from pensieve.serve.systems.engine_system import ENGINE_CLOSED, EngineSystem
from pensieve.sim.cost import simulated_cost
from pensieve.sim.worker import SimulatedWorker


class InlineSystem(EngineSystem):
    """`poll`, `ask` and `drive` run the engine, in the thread that calls them. Several threads may use it: each call has the
    engine to itself, so that one made during a poll takes effect when that poll returns. Whoever asks runs the engine until
    some request has finished, and lets the others have it before going on: so those who ask at once are served together.
    """

    def __init__(self, **parts: Any) -> None:
        """parts: as EngineSystem takes them, with a VirtualClock."""
        super().__init__(**parts)
        self._lock = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()  # what was begun and released while the engine was busy
        self._untold: list[Event] = []  # happened while somebody asked, for the next poll
        self._ended: str | None = None  # why nobody can ask any more
        self._counts_windows = False
        self._told_ends = 0  # requests whose end the events have said that were taken from the engine

    def submit(self, request: Request) -> None:
        with self._lock:
            self.engine.submit(request)

    def begin(self, request: Request, listener: Listener) -> None:
        self._listeners[request.id] = listener
        self._inbox.append(lambda: self.engine.submit(request))
        if self._ended is not None:  # after it told the other listeners, or before: nobody else will tell this one
            self._fail_listeners(WorkerError(self._ended))

    def drive(self, awaited: Future[Any]) -> None:
        while not awaited.done():
            with self._lock:
                if self._ended is not None and not awaited.done():
                    raise WorkerError(self._ended)
                if not awaited.done():
                    self._serve_listeners()

    def release(self, session: str, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        self._inbox.append(lambda: self.engine.forget(session, tenant, left))

    def cancel(self, request_id: int, status: str) -> None:
        with self._lock:
            self._empty_inbox()
            self.engine.cancel(request_id, status)

    def expect(self, session: str, next_use_s: float | None) -> None:
        """When the schedule will ask this conversation again; only an offline policy reads it."""
        with self._lock:
            self.engine.sessions.expect(session, next_use_s)

    def ended(self, session: str) -> None:
        """Let go of a conversation that nobody will ask again: it is forgotten once nothing of it is in the cache."""
        with self._lock:
            self.engine.sessions.ended(session)

    def count_windows(self) -> None:
        """Tell whoever polls of most tokens only how many they are, from now on (Event.tokens)."""
        self._counts_windows = True

    def forget(self, session: str | None) -> None:
        with self._lock:
            self._empty_inbox()
            self.engine.forget(session)

    def poll(self, until_s: float | None) -> list[Event]:
        with self._lock:
            events, self._untold = self._untold, []
            if not any(event.turn is not None for event in events):
                ran = self._run(None if until_s is None else round(until_s * 1e9))
                events += self._tell(ran) if self._listeners else ran
            return events

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
        """Do nothing: the engine runs when it is polled."""

    def _serve_listeners(self) -> None:
        """Run the engine until some request has finished. A crash ends all requests."""
        try:
            self._untold += self._tell(self._run(None))
        except BaseException as crash:  # the engine may have stopped half way through a step, whatever it was
            sentence = f"The engine stopped: {crash}"
            self._end(sentence)
            if isinstance(crash, Exception):
                raise WorkerError(sentence) from crash
            raise

    def _empty_inbox(self) -> None:
        """Hand to the engine what was begun and released since the last call."""
        while self._inbox:
            self._inbox.popleft()()

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._inbox.clear()
        self._fail_listeners(WorkerError(self._ended))

    def _run(self, until_ns: int | None) -> list[Event]:
        self._empty_inbox()
        engine, clock = self.engine, self.clock
        assert isinstance(clock, VirtualClock)
        events = engine.take_events()
        engine.counts_windows = self._counts_windows and not self._listeners
        while engine.ended_requests == self._told_ends:
            if until_ns is not None and clock.now_ns() >= until_ns:
                break
            if until_ns is None and not engine.busy:
                break
            events += engine.step(until_ns)
            if not engine.progressed:
                # Nothing to compute and no copy ends by then.
                assert until_ns is not None, "requests wait, and nothing runs that could let them in"
                expiry_ns = engine.next_expiry_ns
                clock.advance_to(until_ns if expiry_ns is None else min(until_ns, expiry_ns))
        self._told_ends = engine.ended_requests
        return events
