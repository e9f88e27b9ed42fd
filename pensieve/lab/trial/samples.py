"""What is read while a trial runs: the device's load, memory and power and the cache's occupancy (table `sample`); how busy
others kept this machine's CPUs, whose share is in every millisecond that was measured; and the ledger of holding: what each
conversation held of each tier, and the prefill that this saved.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import psutil

from pensieve.core.machine import Clock
from pensieve.core.plan import Tier
from pensieve.errors import ResultsError
from pensieve.lab.compose.plan import Device
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.environment import cores
from pensieve.lab.results.store import ENGINE, Holding, Reading, ResultsStore
from pensieve.lab.turns import Turns
from pensieve.serve.books.books import PositionPrices
from pensieve.serve.books.holding import TIERS, Held
from pensieve.serve.systems.base import System
from pensieve.sim.worker import VirtualClock
from pensieve.units import GIB

INTERVAL_S = 0.1
MOST_MOMENTS = 1_000
MOMENTS_A_BATCH = 100
"""What a trial that is killed lacks of its last readings, at most: ten seconds."""
MEANS = ("gpu_util_pct", "gpu_mem_util_pct", "cpu_util_pct", "power_w")
_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")  # Linux counts the last two as user and nice already

log = logging.getLogger(__name__)


# -- meters: NVIDIA devices by NVML, CPUs by psutil -------------------------------------------------------------------


class Quantity(NamedTuple):
    name: str
    value: float
    unit: str


class Meter(NamedTuple):
    """read: the present readings of a device; a quantity that it does not report is left out."""

    device: str
    read: Callable[[], list[Quantity]]


def meter_of(device: Device, elsewhere: bool = False) -> Meter | None:
    """elsewhere: processes that this one has started compute. None for a simulated device, which has no load, and where the
    driver's library cannot be used."""
    if device.simulated:
        return None
    if device.kind != "cuda":
        return cpu_meter(elsewhere)
    try:
        return _nvml_meter(device.identity, device.name)
    except Exception as error:  # no library, no permission, a partition without counters: the trial runs all the same
        log.warning("the device cannot be sampled: %s", error)
        return None


def forget_allocator_peak() -> None:
    """Start the peak of torch's allocator anew: one process may run many trials."""
    torch = _cuda()
    if torch is not None:
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)


def allocator_peak_bytes(device: Device, elsewhere: bool = False) -> int | None:
    """Sum of the devices' peaks of torch's allocator since forget_allocator_peak; None where torch uses no CUDA, or where it
    is used by other processes (`elsewhere`)."""
    torch = _cuda()
    if torch is None or device.kind != "cuda" or elsewhere:
        return None
    return sum(int(torch.cuda.max_memory_allocated(number)) for number in range(torch.cuda.device_count()))


def _cuda() -> Any:
    """torch, if this process has imported it and started CUDA; asking must do neither."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return torch if cuda is not None and cuda.is_initialized() else None


def cpu_meter(children: bool = False) -> Meter:
    """This process, cpu_util_pct of all cores it may use, memory_bytes resident. children: with those that it has started,
    where they compute; memory that several share is then counted for each."""
    me, n_cores = psutil.Process(), cores()
    known = {me.pid: me}  # the same objects at each reading: they know how much time had passed at the last one

    def read() -> list[Quantity]:
        for child in me.children(recursive=True) if children else ():
            known.setdefault(child.pid, child)
        load = memory = 0.0
        for process in known.values():
            with suppress(psutil.NoSuchProcess), process.oneshot():  # it may have ended meanwhile
                load += process.cpu_percent(None)
                memory += process.memory_info().rss
        return [Quantity("cpu_util_pct", load / n_cores, "%"), Quantity("memory_bytes", memory, "bytes")]

    read()  # the first answer of a process is always 0
    return Meter("cpu", read)


def _nvml_meter(identity: str, name: str) -> Meter:
    """An NVIDIA device through NVML, all processes on it together. Raises where the library or the device is missing.

    gpu_util_pct, gpu_mem_util_pct: share of the driver's own sample period in which a kernel ran, or memory was read or
    written. memory_bytes: in use. energy_j: since the driver was loaded.
    """
    import pynvml

    nvml: Any = pynvml
    nvml.nvmlInit()  # for as long as the process lives
    handle = nvml.nvmlDeviceGetHandleByUUID(identity)
    asked: list[tuple[str, str, Callable[[], float]]] = [
        ("gpu_util_pct", "%", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        ("gpu_mem_util_pct", "%", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory),
        ("memory_bytes", "bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
        ("power_w", "W", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        ("energy_j", "J", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
    ]

    def read() -> list[Quantity]:
        found = []
        for quantity, unit, value in asked:
            with suppress(nvml.NVMLError):  # this device does not report it
                found.append(Quantity(quantity, float(value()), unit))
        return found

    return Meter(name, read)


# -- one sampler, of a device or of a cache -----------------------------------------------------------------------------


def gauges_of(system: System) -> Meter | None:
    """What the cache of a system holds, read as a meter is; None for one that does not tell, as an outside engine."""
    gauges: Callable[[], Mapping[str, tuple[float, str]]] | None = getattr(system, "gauges", None)
    if gauges is None:
        return None
    return Meter(ENGINE, lambda: [Quantity(name, *found) for name, found in gauges().items()])


class Sampler:
    """Reads a meter into table `sample` while the block runs; times count from when the block was entered.

    On a wall clock a thread reads. On a virtual clock readings are taken at evenly spaced simulated times: when the clock is
    about to move past one, the meter is read before it moves. At `most` moments every second one is dropped and the interval
    doubles, so that a trial of any length keeps between half of them and all; these are stored when the block ends, all
    others in batches. A reading or storing that fails is logged and ends the sampling, not the trial.
    """

    def __init__(
        self,
        store: ResultsStore,
        trial_id: int,
        meter: Meter,
        clock: Clock,
        interval_s: float = INTERVAL_S,
        most: int | None = None,
    ) -> None:
        self._store, self._trial_id, self._meter, self._clock = store, trial_id, meter, clock
        self._interval_s, self._most = interval_s, most
        self._moments: list[tuple[float, list[Quantity]]] = []
        self._n_stored = 0
        self._origin_s = self._due_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"sampler-{trial_id}", daemon=True)

    def __enter__(self) -> Sampler:
        self._origin_s = self._clock.now_s()
        if isinstance(self._clock, VirtualClock):
            self._clock.on_advance = self._advance
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._clock, VirtualClock):
            self._clock.on_advance = None
        else:
            self._stop.set()
            self._thread.join()
        try:
            self._store_moments()
        except ResultsError as problem:
            log.warning("samples of trial %s are not kept: %s", self._trial_id, problem)

    def readings(self, begin: int = 0) -> list[Reading]:
        """From the moment of that number on."""
        moments = self._moments[begin:]
        return [Reading(at_s, self._meter.device, *quantity) for at_s, read in moments for quantity in read]

    def _store_moments(self) -> None:
        self._store.add_samples(self._trial_id, self.readings(self._n_stored))
        self._n_stored = len(self._moments)

    def _advance(self, ns: int) -> None:
        """Called before the clock moves to `ns`: the meter is read once, however many readings fall before that time."""
        until_s = ns / 1e9 - self._origin_s
        if until_s <= self._due_s:
            return
        read = self._meter.read()
        while self._due_s < until_s:
            self._keep(self._due_s, read)

    def _watch(self) -> None:
        while not self._stop.wait(max(0.0, self._due_s - (self._clock.now_s() - self._origin_s))):
            at_s = self._clock.now_s() - self._origin_s
            try:
                self._keep(at_s, self._meter.read())
            except Exception as error:  # a driver that fails ends the sampling, not the trial
                log.warning("trial %s is no longer sampled: %s", self._trial_id, error)
                break

    def _keep(self, at_s: float, read: list[Quantity]) -> None:
        self._moments.append((at_s, read))
        if self._most is None:
            if len(self._moments) - self._n_stored >= MOMENTS_A_BATCH:
                self._store_moments()
        elif len(self._moments) >= self._most:
            del self._moments[1::2]
            self._interval_s *= 2
        self._due_s = self._moments[-1][0] + self._interval_s


def device_metrics(
    readings: Iterable[Reading], start_s: float, end_s: float, output_tok_s: float | None
) -> list[MetricValue]:
    """Means over [start_s, end_s] and peaks over the whole trial; null where the device does not report it."""
    inside: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    memory = []
    for one in readings:
        if one.value is not None and start_s <= one.at_s <= end_s:
            inside[one.name].append((one.at_s, one.value))
        if one.value is not None and one.name == "memory_bytes":
            memory.append(one.value)
    means = {name: fmean(value for _, value in found) for name, found in inside.items()}
    power, energy = means.get("power_w"), inside["energy_j"]
    if len(energy) > 1 and energy[-1][0] > energy[0][0]:  # the device's own counter misses no peak between two readings
        power = (energy[-1][1] - energy[0][1]) / (energy[-1][0] - energy[0][0])
    return [
        *(MetricValue(name, means.get(name), n=len(inside[name]), n_unit="samples") for name in MEANS),
        MetricValue("energy_j_per_token", power / output_tok_s if power is not None and output_tok_s else None),
        MetricValue("device_peak_bytes", max(memory, default=None), n=len(memory), n_unit="samples"),
        MetricValue("memory_bw_gbps", None),  # no device here counts the bytes of its memory, and none is estimated
    ]


# -- others on this machine -------------------------------------------------------------------------------------------


class Neighbours:
    """Counts from its construction on. A virtual machine's stolen time is others' time too."""

    def __init__(self) -> None:
        self._began = self._counted()

    def share(self) -> float:
        """CPU time of all other processes over that of all cores, 0 to 1. Children of this process, such as an engine
        beside it, are its own."""
        wall_s, others_s = (now - then for now, then in zip(self._counted(), self._began, strict=True))
        available_s = wall_s * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, others_s / available_s)) if available_s > 0 else 0.0

    @staticmethod
    def _counted() -> tuple[float, float]:
        """Seconds of the clock, and those that all cores together have worked for others."""
        others_s = sum(s for name, s in psutil.cpu_times()._asdict().items() if name not in _NOT_BUSY)
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):  # it ended meanwhile: its parent's times have it
                times = process.cpu_times()
                others_s -= times.user + times.system + times.children_user + times.children_system
        return time.monotonic(), others_s


NS = 10**9


def ledger_of_holding(held: Mapping[tuple[str, Tier], Held], turns: Turns, block_bytes: int) -> list[Holding]:
    """A row for each conversation and tier in which it held something or found something. turns: all of the trial."""
    sessions, words = turns.codes("session"), turns.words("session")
    saved: dict[tuple[str, Tier], float] = {}
    for tier in TIERS:
        seconds = np.bincount(sessions, np.nan_to_num(turns[f"saved_{tier}_s"]))
        saved |= {(words[session] or "", tier): float(seconds[session]) for session in np.flatnonzero(seconds)}
    none = Held(0, 0)
    return [
        Holding(
            *key,
            gib_s=held.get(key, none).block_ns * block_bytes / (GIB * NS),
            saved_s=saved.get(key, 0.0),
            idle_gib_s=held.get(key, none).idle_block_ns * block_bytes / (GIB * NS),
        )
        for key in dict.fromkeys((*held, *saved))
    ]


def holding_metrics(
    holdings: Iterable[Holding], prices: PositionPrices, turns: Turns, chunk_tokens: int
) -> list[MetricValue]:
    """Sums by tier; and what the first tokens of a conversation take to compute, at powers of two of a chunk up to the
    longest prompt: with the size of a token and what memory costs, that is how long it pays to keep them."""
    rows = list(holdings)
    longest = np.nan_to_num(turns["prompt_tokens"]).max(initial=0)
    found = []
    for tier in TIERS:
        own = [one for one in rows if one.tier == tier]
        for name, column in (("held_gib_s", "gib_s"), ("held_idle_gib_s", "idle_gib_s"), ("saved_s", "saved_s")):
            if own:
                total = sum(getattr(one, column) for one in own)
                found.append(MetricValue(name, total, label=tier, n=len(own), n_unit="conversations"))
    tokens = chunk_tokens
    while rows and tokens <= longest:
        found.append(MetricValue("prefill_s", prices.seconds(0, tokens), label=str(tokens)))
        tokens *= 2
    return found
