"""What a trial can run: the System protocol, which in-engine baselines and outside engines both fit, and what some offer
beside it."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pensieve.core.machine import Clock
from pensieve.core.plan import StartReport
from pensieve.core.request import Event, Request, TokenArray
from pensieve.errors import WorkerError
from pensieve.serve.record import Listener, TurnRecord

if TYPE_CHECKING:
    from pensieve.lab.workload.base import Following


class WallClock:
    """The machine's monotonic clock, from its start on: a change of the wall time does not reach it. start_ns: None: now."""

    virtual = False

    def __init__(self, start_ns: int | None = None) -> None:
        self._start_ns = time.perf_counter_ns() if start_ns is None else start_ns

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def now_s(self) -> float:
        return self.now_ns() / 1e9


@dataclass(frozen=True, slots=True)
class Capabilities:
    """cancels: a request can be ended before its time.
    max_in_flight: requests it takes at once; None for no limit. starts_empty: nothing is cached after `start`; a server that
    ran before may hold what others asked."""

    cancels: bool = True
    max_in_flight: int | None = None
    starts_empty: bool = True


class System(Protocol):
    """Every submitted request finishes exactly once, whatever becomes of it."""

    clock: Clock
    can: Capabilities

    def start(self) -> StartReport: ...

    def submit(self, request: Request) -> None:
        """Never blocks; a request that can never be served comes back from poll as refused."""

    def cancel(self, request_id: int, status: str) -> None:
        """End a request with status `timeout` or `cancelled`; unknown or finished ids are ignored."""

    def poll(self, until_s: float | None) -> list[Event]:
        """What happened since; returns as soon as something finished, at the latest at until_s.

        On a virtual clock this runs the engine: no step starts after until_s, and an idle engine jumps to until_s. On a
        wall clock it waits. until_s None: until something finishes, or the system is idle.
        """
        ...

    def forget(self, session: str | None) -> None:
        """Free a conversation; None: all of them, for a cold cache."""

    def counters(self) -> dict[str, float]:
        """Counts since start, by metric name (recomputed_tokens, swapped_in_bytes, evicted_chunks, ...)."""
        ...

    def settings(self) -> dict[str, Any]:
        """gpu_tokens, cpu_tokens (effective), gpu_bytes, cpu_bytes, kv_bytes_per_token, device, dtype, weights, ..."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class ExpectsReuse(Protocol):
    """A system that takes the time (its own clock) of a conversation's next turn, for its offline policies alone."""

    def expect(self, session: str, next_use_s: float) -> None: ...


@runtime_checkable
class CountsTokens(Protocol):
    """A system that can say of most tokens only how many they are (Event.tokens)."""

    def count_windows(self) -> None: ...


@runtime_checkable
class ForgetsEnded(Protocol):
    """A system that gives up what it keeps of a conversation that is over, as soon as that changes nothing for others."""

    def ended(self, session: str) -> None: ...


@runtime_checkable
class LooksAhead(Protocol):
    """A system of parts, each of which may run as far ahead of the others as nothing can reach it."""

    def look_ahead(self, foresee: Callable[[str, int], Following | None]) -> None:
        """Expect every request to be announced before it is due, from now on; `foresee` says what follows it (Foresees)."""

    def announce(self, at_ns: int, request: Request | None) -> None:
        """Announce that the request is sent, or ended early, at that time of the system's clock. request None: anything may
        happen."""

    def withdraw(self, request_id: int) -> None:
        """A request that was announced is never sent."""


class AnsweringSystem(System, Protocol):
    """A system that also serves callers who each wait for an answer of their own, from any number of threads. `poll` tells
    nothing of their requests."""

    def begin(self, request: Request, listener: Listener) -> None:
        """Submit a request without waiting for it. On a virtual clock it goes on as long as somebody drives."""

    def drive(self, awaited: Future[Any]) -> None:
        """Return when `awaited`, which some listener completes, is done; on a virtual clock by running the engine."""

    def ask(self, request: Request) -> TurnRecord:
        """Submit a request and wait for its end. Raises WorkerError where the system has crashed or was closed, now or before
        the end."""
        ...

    @property
    def chunk_tokens(self) -> int: ...

    def places(self, session: str) -> str:
        """Where each chunk of a conversation's KV is at this moment, see CacheManager.places."""
        ...

    def gauges(self) -> dict[str, tuple[float, str]]:
        """What is held and who waits at this moment, with units."""
        ...

    def release(self, session: str, tenant: str = "", left: TokenArray[int] | None = None) -> None:
        """`forget` one conversation without waiting until it is done; a listener may call it. left: its tokens in an earlier
        engine, where no turn of it has stood in this one: the disk may have their KV."""


class Outbox:
    """Any thread may put; one at a time polls. As a Listener it keeps what it hears for whoever polls. ended: why nothing
    more will come, None while something may."""

    streams = False

    def __init__(self, clock: Clock, ended: Callable[[], WorkerError | None]) -> None:
        self._clock, self._ended = clock, ended
        self._events: deque[Event] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._unfinished: set[int] = set()  # requests whose end poll has not told yet

    def expect(self, request_id: int) -> None:
        """This request will end; a poll without a limit waits for it."""
        self._unfinished.add(request_id)

    def put(self, events: list[Event]) -> None:
        """An empty list wakes a poll that waits, to see whether the system has ended."""
        self._events.extend(events)
        if not events or any(event.kind == "finished" for event in events):
            self._wakes.put(None)

    def happened(self, event: Event) -> None:
        self.put([event])

    def failed(self, error: WorkerError) -> None:
        """Poll raises it."""

    def poll(self, until_s: float | None) -> list[Event]:
        """What happened, until a request ended or `until_s` has come; as System.poll. Raises WorkerError once there is
        nothing more to tell and the system has ended."""
        events: list[Event] = []
        finished = waited = False
        while True:
            error = self._ended()
            while self._events:
                event = self._events.popleft()
                events.append(event)
                if event.kind == "finished":
                    self._unfinished.discard(event.request_id)
                    finished = True
            if finished or waited:
                return events
            if error is not None:
                if events:
                    return events
                raise error
            patience_s = None if self._unfinished else 0.0
            if until_s is not None:
                patience_s = max(0.0, until_s - self._clock.now_s())
            try:
                self._wakes.get(timeout=patience_s)
            except queue.Empty:
                waited = True
