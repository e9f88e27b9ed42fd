import hashlib
import sys
import time
from types import SimpleNamespace

import pytest

from pensieve.clock import WallClock
from pensieve.compose.machine import Device
from pensieve.results.store import open_store
from pensieve.trial.device_use import CpuMeter, NvmlMeter, Quantity, meter_of
from pensieve.trial.sampling import DeviceSampler
from tests.results.trials import trial_fields

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
        self.clock, self.fails_after, self.reads, self.closed = clock, fails_after, 0, False

    def read(self):
        self.reads += 1
        if self.reads == self.fails_after:
            raise RuntimeError("lost")
        return [
            Quantity("gpu_util_pct", 50.0, "%"), Quantity("power_w", 200.0, "W"),
            Quantity("energy_j", 300.0 * self.clock.now_s(), "J"), Quantity("memory_bytes", 10.0 * self.reads, "bytes"),
        ]  # fmt: skip

    def close(self):
        self.closed = True


def values(metrics):
    return {metric.name: metric.value for metric in metrics}


def test_readings_are_stored_and_summed_up(store):
    clock = WallClock()
    meter = Scripted(clock)
    with DeviceSampler(store, 1, meter, clock, interval_s=0.01) as sampler:
        time.sleep(0.3)
    readings = store.samples_of(1)
    assert meter.closed
    assert len(readings) == 4 * meter.reads
    assert {r.device for r in readings} == {"cuda:0"}
    assert 0 <= readings[0].at_s < 0.1  # of the trial's clock, from its beginning
    assert 15 <= meter.reads <= 35
    found = values(sampler.metrics(0.0, 1.0, output_tok_s=100.0))
    assert (found["gpu_util_pct"], found["gpu_mem_util_pct"], found["power_w"]) == (50.0, None, 200.0)
    assert found["energy_j_per_token"] == pytest.approx(3.0, rel=0.05)  # from the counter, not from the power
    assert found["device_peak_bytes"] == 10.0 * meter.reads
    assert 0 < found["sampling_cost_pct"] < 50
    outside = values(sampler.metrics(50.0, 60.0, output_tok_s=100.0))
    assert (outside["gpu_util_pct"], outside["energy_j_per_token"]) == (None, None)


def test_a_device_that_is_lost_costs_the_samples_only(store, caplog):
    clock = WallClock()
    with DeviceSampler(store, 1, Scripted(clock, fails_after=3), clock, interval_s=0.01):
        time.sleep(0.1)
    assert len(store.samples_of(1)) == 2 * 4
    assert "no longer sampled: lost" in caplog.text


def test_a_simulated_device_is_not_sampled(store):
    assert meter_of(SIMULATED) is None
    with DeviceSampler(store, 1, None, WallClock()) as sampler:
        pass
    assert set(values(sampler.metrics(0.0, 1.0, 1.0)).values()) == {None}
    assert store.samples_of(1) == []


def test_a_cpu_is_sampled_for_less_than_a_hundredth(store):
    meter = meter_of(CPU)
    assert isinstance(meter, CpuMeter)
    load = bytes(10_000_000)
    with DeviceSampler(store, 1, meter, WallClock()) as sampler:
        busy_until = time.monotonic() + 4.0  # the one flush at the end is paid by a trial of seconds, too
        while time.monotonic() < busy_until:
            hashlib.sha256(load)  # works outside the interpreter's lock, as an engine does nearly all the time
    found = values(sampler.metrics(0.0, 10.0, 100.0))
    assert found["sampling_cost_pct"] < 1
    assert found["cpu_util_pct"] > 5
    assert found["device_peak_bytes"] > 20e6
    assert found["gpu_util_pct"] is None
    assert found["energy_j_per_token"] is None
    assert 25 <= len([r for r in store.samples_of(1) if r.name == "memory_bytes"]) <= 42


class NvmlError(Exception):
    pass


def fake_nvml(**changed):
    def refuses(*_):
        raise NvmlError("Not Supported")

    answers = {
        "NVMLError": NvmlError, "NVML_PCIE_UTIL_TX_BYTES": 0, "NVML_PCIE_UTIL_RX_BYTES": 1,
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda identity: identity,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=87, memory=40),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=5_000),
        "nvmlDeviceGetPowerUsage": lambda _: 312_500,
        "nvmlDeviceGetTotalEnergyConsumption": refuses,
        "nvmlDeviceGetPcieThroughput": lambda _, counter: 7 + counter,
    }  # fmt: skip
    return SimpleNamespace(**{**answers, **changed})


def test_an_nvidia_device_through_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    meter = meter_of(GPU)
    assert isinstance(meter, NvmlMeter)
    assert meter.read() == [
        ("gpu_util_pct", 87.0, "%"), ("gpu_mem_util_pct", 40.0, "%"), ("memory_bytes", 5_000.0, "bytes"),
        ("power_w", 312.5, "W"), ("pcie_tx", 7_000.0, "bytes/s"), ("pcie_rx", 8_000.0, "bytes/s"),
    ]  # fmt: skip
    assert len(meter.read()) == 4  # the link is asked once a second


def test_an_nvidia_device_that_nvml_does_not_know(monkeypatch, caplog):
    def unknown(_):
        raise NvmlError("Not Found")

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlDeviceGetHandleByUUID=unknown))
    assert meter_of(GPU) is None
    assert "cannot be sampled: Not Found" in caplog.text
