import os
import sys
import time
from collections import namedtuple
from itertools import pairwise
from types import SimpleNamespace

import psutil
import pytest

from pensieve.errors import ResultsError
from pensieve.lab.compose.plan import Device
from pensieve.lab.results.store import open_store
from pensieve.lab.trial import samples
from pensieve.lab.trial.samples import MOST_MOMENTS, Neighbours, Quantity, Sampler, device_metrics, gauges_of, meter_of
from pensieve.serve.systems.base import WallClock
from pensieve.sim.worker import VirtualClock
from tests.results.trials import trial_fields
from tests.trial.running import run

CPU = Device("cpu", "cpu", "cpu", "this CPU", 1, 1, 1)
GPU = Device("cuda", "cuda:0", "GPU-1", "a GPU", 1, 1, 1)
SIMULATED = Device("sim", "sim", "sim", "sim_h100", 1, 1, 1)


@pytest.fixture
def store(tmp_path):
    opened = open_store(tmp_path)
    opened.begin_trial(trial_fields())
    return opened


class Scripted:
    """200 W and 50 % of load; the energy counter says 300 W."""

    device = "cuda:0"

    def __init__(self, clock, fails_after=None):
        self.clock, self.fails_after, self.reads = clock, fails_after, 0

    def read(self):
        self.reads += 1
        if self.reads == self.fails_after:
            raise RuntimeError("lost")
        return [
            Quantity("gpu_util_pct", 50.0, "%"), Quantity("power_w", 200.0, "W"),
            Quantity("energy_j", 300.0 * self.clock.now_s(), "J"), Quantity("memory_bytes", 10.0 * self.reads, "bytes"),
        ]  # fmt: skip


def values(metrics):
    return {metric.name: metric.value for metric in metrics}


def test_readings_are_stored_and_summed_up(store):
    clock = WallClock()
    meter = Scripted(clock)
    with Sampler(store, 1, meter, clock, interval_s=0.01) as sampler:
        ends = time.monotonic() + 60
        while meter.reads < 15 and time.monotonic() < ends:  # at least 0.14 s, however slow the machine
            time.sleep(0.01)
        lasted = clock.now_s()
    readings = store.samples_of(1)
    assert len(readings) == 4 * meter.reads
    assert {r.device for r in readings} == {"cuda:0"}
    assert 0 <= readings[0].at_s <= readings[-1].at_s <= clock.now_s()  # of the trial's clock, from its beginning
    assert 15 <= meter.reads <= lasted / 0.01 + 2  # never more often than asked
    found = values(device_metrics(sampler.readings(), 0.0, 1e9, output_tok_s=100.0))
    assert (found["gpu_util_pct"], found["gpu_mem_util_pct"], found["power_w"]) == (50.0, None, 200.0)
    assert found["energy_j_per_token"] == pytest.approx(3.0, rel=0.2)  # from the counter, not from the power
    assert found["device_peak_bytes"] == 10.0 * meter.reads
    outside = values(device_metrics(sampler.readings(), 1e6, 2e6, output_tok_s=100.0))
    assert (outside["gpu_util_pct"], outside["energy_j_per_token"]) == (None, None)


def test_readings_are_stored_while_the_trial_runs(store, monkeypatch, caplog):
    """A killed trial has what its device did until then."""
    monkeypatch.setattr(samples, "MOMENTS_A_BATCH", 5)
    clock = WallClock()
    meter = Scripted(clock, fails_after=13)
    with Sampler(store, 1, meter, clock, interval_s=0.001) as sampler:
        sampler._thread.join(60)
        assert len(store.samples_of(1)) == 2 * 5 * 4
    kept = [reading.value for reading in store.samples_of(1) if reading.name == "memory_bytes"]
    assert kept == [10.0 * number for number in range(1, 13)]
    assert "no longer sampled: lost" in caplog.text, "which costs the samples only"


def test_what_cannot_be_read_or_stored_costs_the_samples_alone(store, monkeypatch, caplog):
    assert meter_of(SIMULATED) is None
    assert set(values(device_metrics((), 0.0, 1.0, 1.0)).values()) == {None}

    def full(*_):
        raise ResultsError("the disk is full")

    monkeypatch.setattr(type(store), "add_samples", full)
    with Sampler(store, 1, gauges_of(Gauged(VirtualClock())), VirtualClock()):
        pass
    assert "not kept: the disk is full" in caplog.text


class NvmlError(Exception):
    pass


def fake_nvml():
    def refuses(*_):
        raise NvmlError("Not Supported")

    return SimpleNamespace(**{
        "NVMLError": NvmlError,
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda identity: identity,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=87, memory=40),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=5_000),
        "nvmlDeviceGetPowerUsage": lambda _: 312_500,
        "nvmlDeviceGetTotalEnergyConsumption": refuses,
    })  # fmt: skip


def test_an_nvidia_device_through_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    meter = meter_of(GPU)
    assert meter is not None and meter.device == GPU.name
    assert meter.read() == [
        ("gpu_util_pct", 87.0, "%"), ("gpu_mem_util_pct", 40.0, "%"), ("memory_bytes", 5_000.0, "bytes"),
        ("power_w", 312.5, "W"),
    ]  # fmt: skip


def test_the_peak_of_torchs_own_allocator(monkeypatch):
    reset, peaks = [], {0: 700, 1: 42}
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        reset_peak_memory_stats=reset.append,
        max_memory_allocated=peaks.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    samples.forget_allocator_peak()
    assert reset == [0, 1]
    assert samples.allocator_peak_bytes(GPU) == 742
    assert samples.allocator_peak_bytes(CPU) is None
    assert samples.allocator_peak_bytes(GPU, elsewhere=True) is None, "others use it, and nobody asked them"
    cuda.is_initialized = lambda: False  # nobody may start CUDA by asking
    assert samples.allocator_peak_bytes(GPU) is None
    monkeypatch.delitem(sys.modules, "torch")
    assert samples.allocator_peak_bytes(GPU) is None


# -- the cache's occupancy

NAMES = {"gpu_blocks_used", "cpu_blocks_used", "queue_length", "running_requests"}


class Gauged:
    """Holds as many blocks as the last time that somebody set."""

    def __init__(self, clock):
        self.clock, self.held, self.asked = clock, 0, 0

    def gauges(self):
        self.asked += 1
        return {"gpu_blocks_used": (self.held, "blocks")}


def test_simulated_time_is_read_at_even_moments(store):
    clock = VirtualClock()
    clock.advance_to(5_000_000_000)  # the engine was started before
    system = Gauged(clock)
    with Sampler(store, 1, gauges_of(system), clock, 0.1):
        for held, until_ms in ((3, 5_250), (7, 5_260), (9, 5_460)):
            system.held = held
            clock.advance_to(until_ms * 1_000_000)
    clock.advance_to(9_000_000_000)
    readings = store.samples_of(1)
    assert [(round(r.at_s, 9), r.value) for r in readings] == [(0.0, 3), (0.1, 3), (0.2, 3), (0.3, 9), (0.4, 9)]
    assert {(r.device, r.name, r.unit) for r in readings} == {("engine", "gpu_blocks_used", "blocks")}
    assert system.asked == 2  # once for each stretch in which a reading fell due


@pytest.mark.parametrize("steps", [1, 20_000])
def test_a_trial_of_any_length_has_a_bounded_number_of_readings(store, steps):
    clock = VirtualClock()
    with Sampler(store, 1, gauges_of(Gauged(clock)), clock, 0.1, most=64):
        for step in range(steps):
            clock.advance_to((step + 1) * 100_000 * 1_000_000_000 // steps)  # a day and a bit
    times = [r.at_s for r in store.samples_of(1)]
    assert 32 <= len(times) < 64
    gaps = {round(b - a, 6) for a, b in pairwise(times)}
    assert len(gaps) == 1  # evenly, however the clock moves
    assert times[-1] >= 100_000 - 2 * max(gaps)


def test_a_trial_shows_what_it_held(tracking):
    outcome = run(tracking, "workload.pressure=2")
    trial = tracking.store.trial(outcome.trial_id)
    readings = tracking.store.samples_of(outcome.trial_id)
    assert {r.name for r in readings} == NAMES
    assert 0 < len(readings) <= MOST_MOMENTS * len(NAMES)
    most = {name: max(r.value for r in readings if r.name == name) for name in NAMES}
    chunk = trial.config["cache"]["chunk_tokens"]
    assert 0 < most["gpu_blocks_used"] <= trial.gpu_tokens / chunk
    assert most["running_requests"] >= 1
    assert 0 < most["cpu_blocks_used"] <= trial.cpu_tokens / chunk
    assert min(r.at_s for r in readings) == 0.0
    assert max(r.at_s for r in readings) <= trial.measure_end_s + 100


# -- others' share of the CPUs, from counters that are written down

Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")
Own = namedtuple("Own", "user system children_user children_system")


@pytest.fixture
def machine(monkeypatch):
    """Two cores; what a test writes into it is what psutil and the clock say."""
    now = SimpleNamespace(s=0.0, times=Times(*[0.0] * 10), own=Own(0.0, 0.0, 0.0, 0.0), engine=None)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "cpu_times", lambda: now.times)
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda self: now.own if self.pid == os.getpid() else now.engine)
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [psutil.Process(1)] if now.engine else [])
    monkeypatch.setattr(samples.time, "monotonic", lambda: now.s)
    return now


@pytest.mark.parametrize(
    ("times", "own", "share"),
    [
        (Times(8, 0, 2, 10, 0, 0, 0, 0, 0, 0), Own(8, 2, 0, 0), 0.0),  # all of it was ours
        (Times(8, 0, 2, 10, 0, 0, 0, 0, 0, 0), Own(3, 1, 1, 0), 0.25),  # children are ours
        (Times(0, 0, 0, 0, 20, 0, 0, 0, 0, 0), Own(0, 0, 0, 0), 0.0),  # waiting for a disk is no work
        (Times(5, 0, 0, 5, 0, 0, 0, 10, 0, 0), Own(5, 0, 0, 0), 0.5),  # stolen by another machine
        (Times(10, 0, 0, 0, 0, 0, 0, 0, 10, 0), Own(0, 0, 0, 0), 0.5),  # a guest is not counted twice
        (Times(4, 0, 0, 0, 0, 0, 0, 0, 0, 0), Own(4.1, 0, 0, 0), 0.0),  # counters tick apart: never below nothing
    ],
)
def test_the_share_is_what_others_worked_of_all_that_could_be(machine, times, own, share):
    watch = Neighbours()
    machine.s, machine.times, machine.own = 10.0, times, own
    assert watch.share() == pytest.approx(share)
