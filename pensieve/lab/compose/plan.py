"""Plan a trial: the device that it runs on, model and cache sizes in numbers, before anything is loaded or started. torch is
imported only to ask about a real GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from pensieve.errors import ConfigError, EngineMissing, HardwareMissing, UnsupportedModel
from pensieve.lab.compose.model_files import folder_architecture, weights_kind
from pensieve.lab.compose.settings import HardwareConfig, ModelConfig, TrialConfig, filled, refuse_missing
from pensieve.plugins.device import shelf
from pensieve.specs import HardwareSpec, ModelSpec
from pensieve.units import Capacity, format_bytes, parse_capacity

if TYPE_CHECKING:
    from pensieve.sim.machine_profile import MachineProfile

AUTO = "auto"
GPU_SHARE = 0.9
"""Of a GPU's memory: weights, KV and the largest iteration together. The rest is CUDA's context and fragmentation."""
CPU_SHARE = 0.5
"""Of a CPU machine's free memory: other processes need some too, and a machine without any kills processes."""
KEEPS_WINDOWS_WHOLE = "pensieve.plugins.caches.restore.restored"
"""What makes the manager in whose place one comes that does not (cache.windows=slide)."""
LEAST_GPU_BLOCKS = 4
"""A prompt, its reply and the reserve need a few blocks. build_workload asks for those of the longest conversation."""


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


# -- the device -----------------------------------------------------------------------------------------------------------


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
    """What a trial finds free, also what this process keeps for it."""
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
    asked = hardware.device
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
    index = int(asked.partition(":")[2] or 0)
    there = max(0, torch.cuda.device_count() - index)
    if hardware.gpus > there:
        raise HardwareMissing(
            f"hardware.gpus={hardware.gpus}: from cuda:{index} on this machine has {there} GPU(s); ask for fewer, or "
            f"simulate more with hardware=sim_a100_80g hardware.gpus={hardware.gpus}."
        )
    taken = min(hardware.gpus * hardware.replicas, there)  # whether they suffice is for replicas to check
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


# -- the trial on it ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """budget_*_blocks: the sizes in cache= times the number of devices, the same for every baseline. gpu_blocks, cpu_blocks,
    disk_blocks: the tiers that this baseline makes of the budget.

    weights: hub, random or path; none in a simulation.
    """

    config: TrialConfig
    model: ModelSpec
    hardware: HardwareSpec
    device: Device
    weights: str
    budget_gpu_blocks: int
    budget_cpu_blocks: int
    gpu_blocks: int
    cpu_blocks: int
    disk_blocks: int = 0

    @property
    def chunk_tokens(self) -> int:
        return self.config.cache.chunk_tokens

    @property
    def block_bytes(self) -> int:
        return self.chunk_tokens * self.model.kept_bytes_per_token

    @property
    def computes_elsewhere(self) -> bool:
        """A real model in the engine runs in processes that the trial starts: ranks, or replicas behind a router."""
        return self.device.divided or (self.config.hardware.router != "single" and not self.device.simulated)

    @property
    def gpu_auto(self) -> bool:
        """cache.gpu=auto. On a real GPU gpu_blocks is then an estimate, and the started worker measures how many fit."""
        return self.config.cache.gpu == AUTO

    @property
    def gpu_measured(self) -> bool:
        return self.gpu_auto and self.device.kind == "cuda"

    @property
    def gpu_bytes(self) -> int:
        return self.gpu_blocks * self.block_bytes

    @property
    def cpu_bytes(self) -> int:
        return self.cpu_blocks * self.block_bytes

    @property
    def activation_bytes(self) -> int:
        """The largest tensors of one iteration: hidden states, the MLP's, and the logits in float32."""
        m, s = self.model, self.config.scheduler
        states = s.max_batch_tokens * (6 * m.hidden + 3 * m.widest_mlp + 4 * m.heads * m.head_dim) * m.dtype_bytes
        return states + s.max_batch_requests * m.vocab * 4

    def budget(self) -> str:
        """The budgets in tokens, as a line for people."""
        per = self.chunk_tokens

        def tier(blocks: int) -> str:
            return f"{blocks * per:,} tokens ({format_bytes(blocks * self.block_bytes)})"

        return (
            f"{self.model.name} {self.model.dtype} on {self.device.label}"
            f"{' (simulated)' if self.device.simulated else ''}: "
            f"cache.gpu = {'about ' if self.gpu_measured else ''}{tier(self.budget_gpu_blocks)}, "
            f"cache.cpu = {tier(self.budget_cpu_blocks)}, "
            f"{format_bytes(self.model.kv_bytes_per_token)} of KV a token"
        )


def plan_trial(config: TrialConfig) -> TrialPlan:
    """Resolve a checked configuration on this machine.

    Raises EngineMissing for an option without an engine, HardwareMissing for a device that is not there,
    ConfigError for a size that cannot be read.
    """
    baseline = config.baseline
    refuse_missing("baseline", {"name": baseline.name, "missing": baseline.missing})
    refuse_missing("workload", config.workload)
    if baseline.cache is None and baseline.engine is None:
        raise ConfigError(
            f"baseline={baseline.name} names no cache manager and no engine; give baseline.cache a _target_."
        )
    if baseline.engine is not None and baseline.simulated is None and config.hardware.simulated:
        raise EngineMissing(
            f"baseline={baseline.name} runs for real, and hardware={config.hardware.name} is simulated; use "
            "hardware=local, or a baseline in the engine."
        )
    sizes = [  # before the device, whose library takes seconds to import
        None if size == AUTO and tier == "gpu" else parse_capacity(size, f"cache.{tier}")
        for tier, size in (("gpu", config.cache.gpu), ("cpu", config.cache.cpu))
    ]
    disk_size = parse_capacity(config.cache.disk, "cache.disk")
    device = find_device(config.hardware)
    profile = _profile(config)
    model = model_spec(config.model, device, str(profile.where["dtype"]) if profile and device.simulated else None)
    chunk = config.cache.chunk_tokens
    if config.cache.windows == "slide" or model.states:
        model = _sliding(config, device, model)
    disk = _blocks(disk_size, model, chunk)  # of the machine, whose devices share it
    if device.divided:
        _check_divided(config, device, model, disk)
    if config.hardware.router != "single" and not device.simulated:
        what = f"hardware.router={config.hardware.router} starts replicas of our engine, a process each"
        _refuse_with(what, {f"baseline={baseline.name} is an engine of others": baseline.engine is not None})
    _check_disk(config, device, disk)
    if profile is not None:
        profile.refuse_other(model, chunk)
    gpu, cpu = (0 if size is None else _blocks(size, model, chunk) * device.count for size in sizes)
    total = baseline.kv_budget == "total" and not baseline.cpu_tier
    plan = TrialPlan(
        config=config,
        model=model,
        hardware=hardware_spec(config.hardware, device, profile),
        device=device,
        weights="none" if device.simulated else weights_kind(config.model),
        budget_gpu_blocks=gpu,
        budget_cpu_blocks=cpu,
        gpu_blocks=gpu + cpu if total else gpu,
        cpu_blocks=cpu if baseline.cpu_tier else 0,
        disk_blocks=disk if baseline.cpu_tier else 0,
    )
    return _sized(plan, total) if plan.gpu_auto else plan


def awaits_profile(config: TrialConfig) -> bool:
    """Whether it is simulated by a file that a real trial is to write first, and that is not there: its plan says nothing of
    the model's dtype nor of the machine yet."""
    file = config.trial.measure_machine
    return (
        config.hardware.simulated
        and file is not None
        and config.hardware.profile == file
        and not Path(file).expanduser().exists()
    )


def _profile(config: TrialConfig) -> MachineProfile | None:
    """What hardware.profile names. Raises ConfigError for a file that is not there, or is no profile."""
    if config.hardware.profile is None or awaits_profile(config):
        return None
    from pensieve.sim.machine_profile import read_profile  # brings numpy, which a mistake need not wait for

    return read_profile(config.hardware.profile)


def _blocks(size: Capacity, model: ModelSpec, chunk_tokens: int) -> int:
    """Whole blocks that fit. A size in tokens is that of whole ones, so that it is as many bytes where KV slides."""
    return (
        size.in_tokens(model.kv_bytes_per_token)
        * model.kv_bytes_per_token
        // (chunk_tokens * model.kept_bytes_per_token)
    )


def _sliding(config: TrialConfig, device: Device, model: ModelSpec) -> ModelSpec:
    """The model whose KV does not stay behind its windows; as it is, if no layer has one. Of layers with a state only that
    stays. Raises HardwareMissing on a real machine, ConfigError for what keeps or needs all KV."""
    if not device.simulated:
        raise HardwareMissing(
            f"model={model.name} has layers that keep a state in place of KV, which no real cache here keeps. Use another "
            "model, or a simulated machine such as hardware=sim_h100."
            if model.states
            else "cache.windows=slide counts what a cache could save; the real one keeps the KV of sliding windows whole. "
            "Use cache.windows=whole, or a simulated machine such as hardware=sim_h100."
        )
    if not model.windowed_layers and not model.states:
        return model
    disk = parse_capacity(config.cache.disk)
    _refuse_with(
        f"model={model.name} keeps one state of a conversation"
        if model.states
        else "cache.windows=slide gives up KV that has left its window",
        {
            f"baseline={config.baseline.name} has no cache that does": (config.baseline.cache or {}).get("_target_")
            != KEEPS_WINDOWS_WHOLE,
            f"all layers of model={model.name} have one": model.windowed_layers == model.attending_layers,
            f"cache.disk={config.cache.disk} keeps whole chunks": bool(disk.bytes or disk.tokens),
            "scheduler.copy_ahead=never loads chunks one by one": config.scheduler.copy_ahead == "never",
        },
    )
    return replace(model, slides=True)


def _check_divided(config: TrialConfig, device: Device, model: ModelSpec, disk_blocks: int) -> None:
    """Raises ConfigError where the model cannot be divided among the devices, or with it what else is asked for."""
    gpus, heads = device.count, model.kv_heads
    if heads % gpus:
        fewer = next(count for count in range(gpus, 0, -1) if heads % count == 0)
        raise ConfigError(
            f"hardware.gpus={gpus}: model={model.name} has {heads} KV heads, which cannot be divided evenly among {gpus}; "
            f"use hardware.gpus={fewer}, or another model."
        )
    _refuse_with(
        f"hardware.gpus={gpus} divides the model among processes",
        {
            f"baseline={config.baseline.name} is an engine of others": config.baseline.engine is not None,
            f"cache.disk={config.cache.disk} keeps whole chunks": disk_blocks > 0,
        },
    )


def _refuse_with(what: str, given: Mapping[str, bool]) -> None:
    for reason in (reason for reason, asked in given.items() if asked):
        raise ConfigError(f"{what}, and {reason}; leave one of the two out.")


def _check_disk(config: TrialConfig, device: Device, disk_blocks: int) -> None:
    """Raises HardwareMissing where a disk tier is asked for and cannot be."""
    if not disk_blocks:
        return
    if device.kind == "cuda":
        raise HardwareMissing(
            f"cache.disk={config.cache.disk} has no path to a GPU's memory yet; use cache.disk=0, or hardware=cpu, or a "
            "simulated GPU such as hardware=sim_h100."
        )
    if device.kind == "cpu" and plans_in_flight(device, config.hardware.depth) > 1:
        raise HardwareMissing("cache.disk needs hardware.depth=1 (what auto is on a CPU): set one of the two.")
    if device.simulated and not config.hardware.disk_bw:
        raise ConfigError("hardware.disk_bw has no value, and a simulated machine with cache.disk needs it; set it.")


def _sized(plan: TrialPlan, total: bool) -> TrialPlan:
    """The plan with the GPU tier that fits. Every baseline gets the same: memory is kept free for the CPU tier even where a
    baseline has none."""
    if total and not plan.device.shared:
        raise ConfigError(
            "cache.gpu=auto fills the device, so baseline.kv_budget=total has nothing to add to it; give cache.gpu a size, "
            "or use baseline.kv_budget=device."
        )
    cpu_bytes = plan.budget_cpu_blocks * plan.block_bytes
    share = plan.config.hardware.memory_share
    gpu = auto_gpu_blocks(plan.device, plan.model, plan.activation_bytes, cpu_bytes, plan.block_bytes, share)
    return replace(plan, budget_gpu_blocks=gpu, gpu_blocks=gpu + plan.budget_cpu_blocks if total else gpu)


def plans_in_flight(device: Device, asked: Literal["auto", 1, 2]) -> int:
    """On a GPU two: the host plans, builds and launches an iteration while the device computes the one before. A CPU computes
    inside of the launch; a simulated device has one by default, as the paper's engine has."""
    if asked != "auto":
        return asked
    return 2 if device.kind == "cuda" else 1


def memory_share(device: Device, asked: float | None) -> float:
    if asked is not None:
        return asked
    return CPU_SHARE if device.shared else GPU_SHARE


def auto_gpu_blocks(
    device: Device,
    model: ModelSpec,
    activation_bytes: int,
    cpu_bytes: int,
    block_bytes: int,
    asked_share: float | None,
    free_bytes: int | None = None,
) -> int:
    """Blocks of the GPU tier where cache.gpu=auto: what weights, one iteration and (on a CPU) the CPU tier leave.

    Simulated: exact. A GPU: from its total memory, since nothing is loaded yet; the started worker measures again, and its
    number is used. A CPU: from its free memory, rounded down to a power of two of blocks, so that consecutive trials get
    the same although a few MB more or less are free. Raises HardwareMissing with the numbers.
    """
    share = memory_share(device, asked_share)
    if device.shared:
        there = free_host_memory_bytes() if free_bytes is None else free_bytes
        room = int(share * there) - model.weight_bytes - activation_bytes - cpu_bytes
        blocks = max(0, room) // block_bytes
        blocks = 1 << (blocks.bit_length() - 1) if blocks else 0
    else:
        there = device.gpu_bytes
        room = int(share * there) - model.weight_bytes - activation_bytes
        blocks = max(0, room) // block_bytes
    if blocks >= LEAST_GPU_BLOCKS:
        return blocks
    cpu = f", the CPU tier {format_bytes(cpu_bytes)}" if device.shared else ""
    raise HardwareMissing(
        f"cache.gpu=auto finds no room: hardware.memory_share={share:g} of the {format_bytes(there)} "
        f"{'free' if device.shared else 'of memory'} on {device.label} is {format_bytes(int(share * there))}. Of that "
        f"model={model.name} takes {format_bytes(model.weight_bytes)} in {model.dtype}, an iteration "
        f"{format_bytes(activation_bytes)}{cpu}. Use a smaller model{' or cache.cpu' if device.shared else ''}, or raise "
        "hardware.memory_share."
    )


def model_spec(model: ModelConfig, device: Device, measured: str | None = None) -> ModelSpec:
    """The model in numbers, in the dtype it will have: auto is bfloat16 on a GPU, and float32 on a CPU;
    measured: where a machine is simulated by its profile, the dtype of that. Raises UnsupportedModel for one whose parameters
    a simulated machine would have to guess."""
    architecture = folder_architecture(model.weights) if weights_kind(model) == "path" else model.architecture
    dtype: str = (measured or "bfloat16") if model.dtype == "auto" else model.dtype
    spec = replace(ModelSpec.from_architecture(model.name, architecture, dtype), architecture=dict(architecture))
    if device.simulated and (why := spec.uncounted):
        raise UnsupportedModel(
            f"model={model.name} {why}, so its times on {device.label} cannot be simulated; use hardware=local, or another "
            "model."
        )
    return replace(spec, dtype="float32") if model.dtype == "auto" and device.kind == "cpu" else spec
