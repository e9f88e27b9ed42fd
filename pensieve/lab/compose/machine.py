"""Find the device that a trial runs on, and its memory. torch is imported only to ask about a real GPU."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pensieve.errors import ConfigError, HardwareMissing
from pensieve.lab.compose.schema import HardwareConfig, filled
from pensieve.plugins.device import shelf
from pensieve.specs import HardwareSpec
from pensieve.units import parse_capacity

if TYPE_CHECKING:
    from pensieve.sim.machine_profile import MachineProfile

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Device:
    """name: for torch ("cpu", "cuda:0") or "sim", of the first where there are several. identity: names the device's lock; a
    GPU's UUID. others: identities of the further GPUs of the trial. On a CPU count is processes.

    gpu_bytes: memory for the weights and the GPU tier. cpu_bytes: for the CPU tier. shared: both are the same memory.
    """

    kind: str
    name: str
    identity: str
    label: str
    count: int
    gpu_bytes: int
    cpu_bytes: int
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """For torch, of all of them."""
        if self.kind != "cuda":
            return (self.name,) * self.count
        first = int(self.name.partition(":")[2])
        return tuple(f"cuda:{first + number}" for number in range(self.count))

    @property
    def divided(self) -> bool:
        """A real model runs on several of them, a process each."""
        return self.count > 1 and not self.simulated

    @property
    def simulated(self) -> bool:
        return self.kind == "sim"

    @property
    def shared(self) -> bool:
        return self.kind == "cpu"


def host_memory_bytes() -> int:
    """What this process may use: the machine's memory, or the container's limit where that is lower."""
    total = int(psutil.virtual_memory().total)
    for path in _CGROUP_LIMITS:
        try:
            limit = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def free_host_memory_bytes() -> int:
    """What a trial finds free, or gets: also what this process keeps for it."""
    return min(int(psutil.virtual_memory().available) + shelf.kept_host_bytes(), host_memory_bytes())


def cpu_label() -> str:
    """The processor's name, where the system gives one."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    import platform

    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_device(hardware: HardwareConfig) -> Device:
    """The device that hardware= means here. Raises HardwareMissing for a GPU that is not there."""
    if hardware.simulated:
        return _simulated(hardware)
    asked = hardware.torch.device
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", asked):
        raise ConfigError(f"hardware.device={asked!r} is unknown; it is auto, cpu, cuda or cuda:<index>.")
    if asked == "cpu":
        return _cpu(hardware)
    import torch

    if not torch.cuda.is_available():
        if asked == "auto":
            return _cpu(hardware)
        raise HardwareMissing(
            f"hardware.device={asked} needs a GPU that torch {torch.__version__} can use, and there is none; "
            "use hardware=cpu, or a simulated one such as hardware=sim_h100."
        )
    index, there = int(asked.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= there:
        raise HardwareMissing(f"hardware.device={asked} does not exist; this machine has {there} GPU(s).")
    if index + hardware.gpus > there:
        raise HardwareMissing(
            f"hardware.gpus={hardware.gpus}: from cuda:{index} on this machine has {there - index} GPU(s); use "
            f"hardware.gpus={there - index}, or simulate more with hardware=sim_a100_80g hardware.gpus={hardware.gpus}."
        )
    taken = min(
        hardware.gpus * hardware.cluster.replicas, there - index
    )  # whether they suffice is for replicas to check
    each = [torch.cuda.get_device_properties(index + number) for number in range(taken)]
    return Device(
        kind="cuda",
        name=f"cuda:{index}",
        identity=f"GPU-{each[0].uuid}",
        label=str(each[0].name),
        count=hardware.gpus,
        gpu_bytes=hardware.gpus * min(int(one.total_memory) for one in each[: hardware.gpus]),
        cpu_bytes=host_memory_bytes(),
        others=tuple(f"GPU-{one.uuid}" for one in each[1:]),
    )


def free_device_bytes(device: Device) -> int:
    """The device's free memory. What this process holds of a GPU counts as free: the next trial shares the model in it, or
    gets the memory."""
    if device.kind == "cuda":
        import torch

        free = (torch.cuda.mem_get_info(name)[0] + torch.cuda.memory_reserved(name) for name in device.names)
        return int(min(free)) * device.count
    return free_host_memory_bytes() if device.kind == "cpu" else device.gpu_bytes


def _cpu(hardware: HardwareConfig) -> Device:
    if hardware.gpus > cores():
        raise HardwareMissing(
            f"hardware.gpus={hardware.gpus}: on the CPU each of them is a process with a core to itself, and there are "
            f"{cores()} cores. Use hardware.gpus={cores()} or fewer, or simulate several GPUs with hardware=sim_a100_80g "
            f"hardware.gpus={hardware.gpus}."
        )
    limit = memory_limit_bytes(hardware)
    memory = host_memory_bytes() if limit is None else min(limit, host_memory_bytes())
    return Device("cpu", "cpu", "cpu", cpu_label(), hardware.gpus, memory, memory)


def memory_limit_bytes(hardware: HardwareConfig) -> int | None:
    """What the processes of a real trial may have resident together (hardware.cpu_memory); None: whatever is there."""
    return None if hardware.simulated or hardware.cpu_memory is None else _bytes(hardware, "cpu_memory")


def _simulated(hardware: HardwareConfig) -> Device:
    rates = () if hardware.profile else ("flops", "memory_bw", "h2d_bw", "d2h_bw")
    given = hardware.model_dump()
    for field in ("gpu_memory", "cpu_memory", *rates):
        if not given[field]:
            raise ConfigError(
                f"hardware.{field} has no value, and a simulated machine needs it; set it, or hardware.profile (for "
                "hardware=sim_paired trial.measure_machine, as experiment=machine/fidelity does)."
            )
    gpu, cpu = _bytes(hardware, "gpu_memory"), _bytes(hardware, "cpu_memory")
    return Device("sim", "sim", "sim", hardware.name, hardware.gpus, gpu * hardware.gpus, cpu * hardware.gpus)


def _bytes(hardware: HardwareConfig, field: str) -> int:
    size = parse_capacity(getattr(hardware, field), f"hardware.{field}").bytes
    if size is None:
        raise ConfigError(f'hardware.{field} is a size of memory; write "80GiB" or "80GB".')
    return size


def hardware_spec(hardware: HardwareConfig, device: Device, measured: MachineProfile | None = None) -> HardwareSpec:
    """The hardware in numbers, for the engine, the cost model and the simulated worker. measured: what hardware.profile
    names."""
    spec = filled(
        HardwareSpec,
        hardware,
        device=device.name,
        gpu_memory_bytes=device.gpu_bytes // device.count,
        cpu_memory_bytes=device.cpu_bytes // device.count,
    )
    if measured is None:
        return spec
    return replace(
        spec,
        h2d_bw=measured.block_bytes / measured.h2d_block_s,
        d2h_bw=measured.block_bytes / measured.d2h_block_s,
        step_overhead_s=measured.overhead_s,
        overlaps=measured.overlaps,
    )
