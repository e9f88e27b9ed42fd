"""Sample the device's load and the engine's cache while a trial runs, into table `sample`."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from types import TracebackType
from typing import Protocol, runtime_checkable

from pensieve.baselines.base import System
from pensieve.clock import Clock, VirtualClock
from pensieve.errors import ResultsError
from pensieve.metrics import Metric
from pensieve.results.store import ENGINE, Reading, ResultsStore
from pensieve.trial.meters import Meter

INTERVAL_S = 0.1
FLUSH_READINGS = 5_000
MOST_MOMENTS = 1_000
MEANS = {"gpu_util_pct": "%", "gpu_mem_util_pct": "%", "cpu_util_pct": "%", "power_w": "W"}

log = logging.getLogger(__name__)


class DeviceSampler:
    """Reads the meter into table `sample` while the block runs; times count from when the block was entered.

    meter None: nothing is sampled, and every metric is null. A reading or storing that fails is logged and ends the
    sampling, not the trial.
    """

    def __init__(
        self, store: ResultsStore, trial_id: int, meter: Meter | None, clock: Clock, interval_s: float = INTERVAL_S
    ) -> None:
        self._store, self._trial_id, self._meter, self._clock = store, trial_id, meter, clock
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name=f"sampler-{trial_id}", daemon=True)
        self._waiting: list[Reading] = []
        self._kept: list[Reading] = []
        self._origin_s = 0.0
        self._began_s = 0.0
        self.cpu_s = 0.0
        self.elapsed_s = 0.0

    def __enter__(self) -> DeviceSampler:
        self._origin_s = self._clock.now_s()
        self._began_s = time.perf_counter()
        if self._meter is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.elapsed_s = time.perf_counter() - self._began_s
        self._stop.set()
        if self._meter is not None:
            self._thread.join()
            self._meter.close()

    def metrics(self, start_s: float, end_s: float, output_tok_s: float | None) -> list[Metric]:
        """Means over [start_s, end_s] and peaks over the whole trial; null where the device does not report it."""
        inside: defaultdict[str, list[float]] = defaultdict(list)
        for reading in self._kept:
            if start_s <= reading.at_s <= end_s and reading.value is not None:
                inside[reading.name].append(reading.value)
        found = [_mean(name, unit, inside[name]) for name, unit in MEANS.items()]
        power = _energy_rate_w(self._kept, start_s, end_s)
        power = power if power is not None else _average(inside["power_w"])
        joules = power / output_tok_s if power is not None and output_tok_s else None
        memory = [r.value for r in self._kept if r.name == "memory_bytes" and r.value is not None]
        cost = 100 * self.cpu_s / self.elapsed_s if memory and self.elapsed_s > 0 else None
        return [
            *found,
            Metric("energy_j_per_token", joules, "J/token"),
            Metric("device_peak_bytes", max(memory, default=None), "bytes", n=len(memory), n_unit="samples"),
            Metric(
                "memory_bw_gbps", None, "GB/s"
            ),  # no device here counts the bytes of its memory, and none is estimated
            Metric("sampling_cost_pct", cost, "%", n=len(memory), n_unit="samples"),
        ]

    def _sample(self) -> None:
        assert self._meter is not None
        due = time.monotonic()
        while True:
            at_s = self._clock.now_s() - self._origin_s
            try:
                read = [Reading(at_s, self._meter.device, *quantity) for quantity in self._meter.read()]
            except Exception as error:  # a driver that fails ends the sampling, not the trial
                log.warning("the device of trial %s is no longer sampled: %s", self._trial_id, error)
                break
            self._waiting += read
            self._kept += read
            if len(self._waiting) >= FLUSH_READINGS:
                self._flush()
            # The next due moment, not a fixed sleep: slow readings must not make the rate drift.
            due = max(due + self._interval_s, time.monotonic())
            if self._stop.wait(due - time.monotonic()):
                break
        self._flush()
        self.cpu_s = time.thread_time()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            self._store.add_samples(self._trial_id, waiting)
        except ResultsError as error:
            log.warning("samples of trial %s are not kept: %s", self._trial_id, error)


def _mean(name: str, unit: str, values: Sequence[float]) -> Metric:
    return Metric(name, _average(values), unit, n=len(values), n_unit="samples")


def _average(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _energy_rate_w(readings: Sequence[Reading], start_s: float, end_s: float) -> float | None:
    """From the device's own energy counter, which misses no peak between two readings; None below two readings."""
    inside = [(r.at_s, r.value) for r in readings if r.name == "energy_j" and start_s <= r.at_s <= end_s]
    known = [(at_s, value) for at_s, value in inside if value is not None]
    if len(known) < 2 or known[-1][0] <= known[0][0]:
        return None
    return (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])


@runtime_checkable
class Gauged(Protocol):
    """A system that reports what its cache holds; an outside engine does not."""

    def gauges(self) -> Mapping[str, tuple[float, str]]: ...


class Occupancy:
    """Reads a system's gauges into table `sample` while the block runs; times count from when the block was entered.

    On a virtual clock the readings are taken at evenly spaced simulated times: when the clock is about to move past one, the
    gauges are read before it moves. On a wall clock a thread takes them. At MOST_MOMENTS readings every second one is
    dropped and the interval doubles, so that a trial of any length keeps between half of MOST_MOMENTS and all. They are
    stored when the block ends.
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
            Reading(at_s, ENGINE, name, value, unit)
            for at_s, gauges in self._moments
            for name, (value, unit) in gauges.items()
        ]
        try:
            self._store.add_samples(self._trial_id, readings)
        except ResultsError as problem:
            log.warning("the occupancy of trial %s is not kept: %s", self._trial_id, problem)

    @property
    def latest(self) -> tuple[float, Mapping[str, float]] | None:
        """The last reading: seconds since the block was entered, and the gauges; any thread may ask."""
        if not self._moments:
            return None
        at_s, gauges = self._moments[-1]
        return at_s, {name: value for name, (value, _) in gauges.items()}

    def _advance(self, ns: int) -> None:
        """Called before the clock moves to `ns`: the gauges are read once, however many readings fall before that time."""
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
