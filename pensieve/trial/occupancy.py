"""What the engine holds and who waits, over the time of the trial: a bounded number of readings, on either clock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, runtime_checkable

from pensieve.baselines.base import System
from pensieve.clock import VirtualClock
from pensieve.errors import ResultsError
from pensieve.results.store import Reading, ResultsStore

INTERVAL_S = 0.1
MOST_MOMENTS = 1_000
DEVICE = "engine"

log = logging.getLogger(__name__)


@runtime_checkable
class Gauged(Protocol):
    """A system that tells what it holds; outside engines do not."""

    def gauges(self) -> Mapping[str, tuple[float, str]]: ...


class Occupancy:
    """Reads a system's gauges into table `sample` while the block runs; times count from when the block was entered.

    On a virtual clock the readings are at even simulated times: what was true until the clock moved past one is what it
    reads. On the wall a thread takes them. After MOST_MOMENTS every second one is dropped and the interval doubles, so that
    a trial of any length has between half as many and as many, evenly spaced. They are stored when the block ends.
    """

    def __init__(
        self,
        store: ResultsStore,
        trial_id: int,
        system: System,
        interval_s: float = INTERVAL_S,
        most: int = MOST_MOMENTS,
    ) -> None:
        self._store, self._trial_id, self._most = store, trial_id, most
        self._system = system if isinstance(system, Gauged) else None
        self._clock = system.clock
        self._interval_s = interval_s
        self._moments: list[tuple[float, Mapping[str, tuple[float, str]]]] = []
        self._origin_s = self._due_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"occupancy-{trial_id}", daemon=True)

    def __enter__(self) -> Occupancy:
        self._origin_s = self._clock.now_s()
        if self._system is None:
            pass
        elif isinstance(self._clock, VirtualClock):
            self._clock.on_advance = self._advance
        else:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(self._clock, VirtualClock):
            self._clock.on_advance = None
        elif self._thread.is_alive():
            self._stop.set()
            self._thread.join()
        readings = [
            Reading(at_s, DEVICE, name, value, unit)
            for at_s, gauges in self._moments
            for name, (value, unit) in gauges.items()
        ]
        try:
            self._store.add_samples(self._trial_id, readings)
        except ResultsError as problem:
            log.warning("the occupancy of trial %s is not kept: %s", self._trial_id, problem)

    def _advance(self, ns: int) -> None:
        """A stretch of any length costs one look, and no more readings than are kept."""
        until_s = ns / 1e9 - self._origin_s
        if until_s <= self._due_s:
            return
        assert self._system is not None
        gauges = self._system.gauges()
        while self._due_s < until_s:
            self._take(self._due_s, gauges)

    def _watch(self) -> None:
        assert self._system is not None
        while not self._stop.wait(max(0.0, self._due_s - (self._clock.now_s() - self._origin_s))):
            now_s = self._clock.now_s() - self._origin_s
            self._take(now_s, self._system.gauges())
            while self._due_s <= now_s:  # a late reading is one reading
                self._due_s += self._interval_s

    def _take(self, at_s: float, gauges: Mapping[str, tuple[float, str]]) -> None:
        self._moments.append((at_s, gauges))
        if len(self._moments) >= self._most:
            del self._moments[1::2]
            self._interval_s *= 2
        self._due_s = self._moments[-1][0] + self._interval_s
