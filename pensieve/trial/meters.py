"""Read a device's load, memory and power: meters for NVIDIA devices (NVML) and for CPUs (psutil)."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import psutil

from pensieve.compose.machine import Device, cores

PCIE_INTERVAL_S = 1.0  # the driver watches the link for 20 ms each time it is asked

log = logging.getLogger(__name__)


class Quantity(NamedTuple):
    name: str
    value: float
    unit: str


class Meter(Protocol):
    device: str

    def read(self) -> list[Quantity]:
        """The present readings; a quantity that the device does not report is left out."""
        ...

    def close(self) -> None: ...


def meter_of(device: Device, elsewhere: bool = False) -> Meter | None:
    """elsewhere: processes that this one has started compute. None for a simulated device, which has no load, and where the
    driver's library cannot be used."""
    if device.simulated:
        return None
    if device.kind != "cuda":
        return CpuMeter(elsewhere)
    try:
        return NvmlMeter(device.identity, device.name)
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


class CpuMeter:
    """This process, cpu_util_pct of all cores it may use, memory_bytes resident. children: with those that it has started,
    where they compute; memory that several share is then counted for each."""

    device = "cpu"

    def __init__(self, children: bool = False) -> None:
        self._processes = {os.getpid(): psutil.Process()}
        self._children = children
        self._cores = cores()
        self._measured()  # the first answer of a process is always 0

    def read(self) -> list[Quantity]:
        load, memory = self._measured()
        return [Quantity("cpu_util_pct", load / self._cores, "%"), Quantity("memory_bytes", memory, "bytes")]

    def close(self) -> None:
        pass

    def _measured(self) -> tuple[float, float]:
        """Per cent of a core, and bytes."""
        load = memory = 0.0
        for process in self._all():
            with suppress(psutil.NoSuchProcess), process.oneshot():  # it may have ended meanwhile
                load += process.cpu_percent(None)
                memory += process.memory_info().rss
        return load, memory

    def _all(self) -> list[psutil.Process]:
        """Return the same process objects at each reading: they know how much time had passed at the last one."""
        if self._children:
            for child in self._processes[os.getpid()].children(recursive=True):
                self._processes.setdefault(child.pid, child)
        return list(self._processes.values())


class NvmlMeter:
    """An NVIDIA device through NVML, all processes on it together. Raises where the library or the device is missing.

    gpu_util_pct, gpu_mem_util_pct: share of the driver's own sample period in which a kernel ran, or memory was read or
    written. memory_bytes: in use. power_w; energy_j: since the driver was loaded. pcie_tx, pcie_rx: bytes/s.
    """

    def __init__(self, identity: str, name: str) -> None:
        import pynvml

        self.device = name
        self._nvml: Any = pynvml
        self._next_pcie_s = 0.0
        pynvml.nvmlInit()
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(identity)
        except Exception:
            pynvml.nvmlShutdown()
            raise

    def read(self) -> list[Quantity]:
        return [quantity for part in self._parts() for quantity in self._answered(part)]

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _parts(self) -> Iterator[Callable[[], list[Quantity]]]:
        yield from (self._load, self._memory, self._power, self._energy)
        if time.monotonic() >= self._next_pcie_s:
            self._next_pcie_s = time.monotonic() + PCIE_INTERVAL_S
            yield self._pcie

    def _answered(self, part: Callable[[], list[Quantity]]) -> list[Quantity]:
        try:
            return part()
        except self._nvml.NVMLError:
            return []  # this device does not report it

    def _load(self) -> list[Quantity]:
        rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return [
            Quantity("gpu_util_pct", float(rates.gpu), "%"),
            Quantity("gpu_mem_util_pct", float(rates.memory), "%"),
        ]

    def _memory(self) -> list[Quantity]:
        return [Quantity("memory_bytes", float(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used), "bytes")]

    def _power(self) -> list[Quantity]:
        return [Quantity("power_w", self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3, "W")]

    def _energy(self) -> list[Quantity]:
        return [Quantity("energy_j", self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3, "J")]

    def _pcie(self) -> list[Quantity]:
        nvml = self._nvml
        return [
            Quantity(name, nvml.nvmlDeviceGetPcieThroughput(self._handle, counter) * 1e3, "bytes/s")
            for name, counter in (
                ("pcie_tx", nvml.NVML_PCIE_UTIL_TX_BYTES),
                ("pcie_rx", nvml.NVML_PCIE_UTIL_RX_BYTES),
            )
        ]
