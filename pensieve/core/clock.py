"""Time as an object: the wall for real devices, an integer counter for simulated ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Nanoseconds since the clock was made; never steps back."""

    virtual: bool

    def now_ns(self) -> int: ...

    def now_s(self) -> float: ...


class WallClock:
    """The machine's monotonic clock: a change of the wall time does not reach it."""

    virtual = False

    def __init__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def now_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def now_s(self) -> float:
        return self.now_ns() / 1e9


class VirtualClock:
    """A counter that only a simulated worker or an idle engine moves.

    Integer nanoseconds, so that summing many short steps gives the same time as one long one.
    """

    virtual = True

    def __init__(self) -> None:
        self._now_ns = 0
        self.on_advance: Callable[[int], None] | None = None
        """Called with the new time just before the clock moves there: nothing changes in between."""

    def now_ns(self) -> int:
        return self._now_ns

    def now_s(self) -> float:
        return self._now_ns / 1e9

    def advance_to(self, ns: int) -> None:
        """Move forward to `ns`; an earlier time leaves the clock where it is."""
        if ns > self._now_ns:
            if self.on_advance is not None:
                self.on_advance(ns)
            self._now_ns = ns
