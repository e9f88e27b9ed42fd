"""Events on their way from the threads of a system to whoever polls it."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from pensieve.core.clock import Clock
from pensieve.core.event import Event
from pensieve.errors import WorkerError


class Outbox:
    """Any thread may put; one at a time polls. ended: why nothing more will come, None while something may."""

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
            try:
                self._wakes.get(timeout=self._patience_s(until_s))
            except queue.Empty:
                waited = True

    def _patience_s(self, until_s: float | None) -> float | None:
        """For how long poll may wait now; None: until something happens."""
        if until_s is None:
            return None if self._unfinished else 0.0
        return max(0.0, until_s - self._clock.now_s())
