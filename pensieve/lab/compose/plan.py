"""Plan a trial: the device that it runs on, model and cache sizes in numbers, before anything is loaded or started. torch is
imported only to ask about a real GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from pensieve.device import shelf
from pensieve.errors import ConfigError, EngineMissing, HardwareMissing, UnsupportedModel
from pensieve.lab.compose.model_files import ModelConfig, folder_architecture, weights_kind
from pensieve.lab.compose.settings import HardwareConfig, TrialConfig, filled
from pensieve.lab.results.environment import cores, cpu_model
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


def find_device(hardware: HardwareConfig) -> Device:
    """The device that hardware= means here. Raises HardwareMissing for a GPU that is not there."""
    if hardware.simulated:
        return _simulated(hardware)
    asked = hardware.device
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
    return Device("cpu", "cpu", "cpu", cpu_model(), hardware.gpus, memory, memory)


def memory_limit_bytes(hardware: HardwareConfig) -> int | None:
    """What the processes of a real trial may have resident together (hardware.cpu_memory); None: whatever is there."""
    return None if hardware.simulated or hardware.cpu_memory is None else _bytes(hardware, "cpu_memory")


def _simulated(hardware: HardwareConfig) -> Device:
    rates = () if hardware.profile else ("flops", "memory_bw", "h2d_bw", "d2h_bw")
    for field in ("gpu_memory", "cpu_memory", *rates):
        if not getattr(hardware, field):
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
    memory = device.gpu_bytes // device.count
    spec = filled(HardwareSpec, hardware, device=device.name, gpu_memory_bytes=memory)
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
    def gpu_measured(self) -> bool:
        """cache.gpu=auto on a real GPU: gpu_blocks is an estimate, and the started worker measures how many fit."""
        return self.config.cache.gpu == AUTO and self.device.kind == "cuda"

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
        m, gpu, cpu = self.model, self.budget_gpu_blocks, self.budget_cpu_blocks
        tiers = (f"{n * self.chunk_tokens:,} tokens ({format_bytes(n * self.block_bytes)})" for n in (gpu, cpu))
        return (
            f"{m.name} {m.dtype} on {self.device.label}{' (simulated)' * self.device.simulated}: cache.gpu, cache.cpu = "
            f"{'about ' * self.gpu_measured}{', '.join(tiers)}, {format_bytes(m.kv_bytes_per_token)} of KV a token"
        )


def plan_trial(config: TrialConfig) -> TrialPlan:
    """Resolve a checked configuration on this machine.

    Raises EngineMissing for an option without an engine, HardwareMissing for a device that is not there,
    ConfigError for a size that cannot be read and for choices that exclude each other.
    """
    baseline, cache, hardware = config.baseline, config.cache, config.hardware
    if baseline.cache is None and baseline.engine is None:
        raise ConfigError(
            f"baseline={baseline.name} names no cache manager and no engine; give baseline.cache a _target_."
        )
    if baseline.engine is not None and baseline.simulated is None and hardware.simulated:
        raise EngineMissing(
            f"baseline={baseline.name} runs for real, and hardware={hardware.name} is simulated; use "
            "hardware=local, or a baseline in the engine."
        )
    # Before the device, whose library takes seconds to import.
    gpu_size = None if cache.gpu == AUTO else parse_capacity(cache.gpu, "cache.gpu")
    cpu_size, disk_size = parse_capacity(cache.cpu, "cache.cpu"), parse_capacity(cache.disk, "cache.disk")
    device = find_device(hardware)
    profile = None
    if hardware.profile is not None and not awaits_profile(config):
        from pensieve.sim.machine_profile import read_profile  # brings numpy, which a mistake need not wait for

        profile = read_profile(hardware.profile)
    model = model_spec(config.model, device, str(profile.where["dtype"]) if profile and device.simulated else None)
    if profile is not None:
        profile.refuse_other(model, cache.chunk_tokens)
    slides = cache.windows == "slide" or bool(model.states)
    has_disk = bool(disk_size.bytes or disk_size.tokens)
    _refuse_what_excludes_each_other(config, device, model, slides, has_disk)
    model = replace(model, slides=slides and bool(model.windowed_layers or model.states))
    total = baseline.kv_budget == "total" and not baseline.cpu_tier
    cpu = _blocks(cpu_size, model, cache.chunk_tokens) * device.count
    disk = _blocks(disk_size, model, cache.chunk_tokens)  # of the machine, whose devices share it
    plan = TrialPlan(
        config=config,
        model=model,
        hardware=hardware_spec(hardware, device, profile),
        device=device,
        weights="none" if device.simulated else weights_kind(config.model),
        budget_gpu_blocks=0,
        budget_cpu_blocks=cpu,
        gpu_blocks=0,
        cpu_blocks=cpu if baseline.cpu_tier else 0,
        disk_blocks=disk if baseline.cpu_tier else 0,
    )
    if gpu_size is not None:
        gpu = _blocks(gpu_size, model, cache.chunk_tokens) * device.count
    else:  # the same for every baseline: memory is kept free for the CPU tier even where a baseline has none
        gpu = auto_gpu_blocks(plan, cpu * plan.block_bytes)
    return replace(plan, budget_gpu_blocks=gpu, gpu_blocks=gpu + cpu if total else gpu)


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


def _blocks(size: Capacity, model: ModelSpec, chunk_tokens: int) -> int:
    """Whole blocks that fit. A size in tokens is that of whole ones, so that it is as many bytes where KV slides."""
    return (
        size.in_tokens(model.kv_bytes_per_token)
        * model.kv_bytes_per_token
        // (chunk_tokens * model.kept_bytes_per_token)
    )


def _refuse_what_excludes_each_other(
    config: TrialConfig, device: Device, model: ModelSpec, slides: bool, has_disk: bool
) -> None:
    """slides: KV behind a window, or a state's, does not stay. Raises HardwareMissing, ConfigError."""
    cache, baseline, hardware = config.cache, config.baseline, config.hardware
    gpus, heads, windowed = device.count, model.kv_heads, bool(model.windowed_layers or model.states)
    keeps_whole = (baseline.cache or {}).get("_target_") != KEEPS_WINDOWS_WHOLE
    everywhere = not model.states and model.windowed_layers == model.attending_layers
    fewer = next(count for count in range(gpus, 0, -1) if heads % count == 0)
    outside, by_one = f"baseline={baseline.name} is an engine of others", "scheduler.copy_ahead=never loads by chunks"
    kept = f"model={model.name} keeps a state" if model.states else "cache.windows=slide gives up KV behind a window"
    routed = f"hardware.router={hardware.router} needs replicas"
    divides, disk = f"hardware.gpus={gpus} divides the model", f"cache.disk={cache.disk} keeps whole chunks"
    if slides and not device.simulated:
        raise HardwareMissing(
            f"{kept}, which no real cache here does; use a simulated machine such as hardware=sim_h100."
        )
    if device.divided and heads % gpus:
        raise ConfigError(
            f"hardware.gpus={gpus}: model={model.name} has {heads} KV heads, which cannot be divided evenly among {gpus}; "
            f"use hardware.gpus={fewer}, or another model."
        )
    for what, beside, together in (
        (kept, f"baseline={baseline.name} has no cache that does", slides and windowed and keeps_whole),
        (kept, f"all layers of model={model.name} have one", slides and windowed and everywhere),
        (kept, disk, slides and windowed and has_disk),
        (kept, by_one, slides and windowed and config.scheduler.copy_ahead == "never"),
        (divides, outside, device.divided and baseline.engine is not None),
        (divides, disk, device.divided and has_disk),
        (routed, outside, hardware.router != "single" and baseline.engine is not None),
        (disk, "no path leads to a GPU's memory yet", has_disk and device.kind == "cuda"),
        (disk, f"hardware.depth={hardware.depth}", has_disk and device.kind == "cpu" and hardware.depth == 2),
        (disk, "hardware.disk_bw has no value", has_disk and device.simulated and not hardware.disk_bw),
        (
            "cache.gpu=auto fills the device",
            "baseline.kv_budget=total adds to it",
            cache.gpu == AUTO and baseline.kv_budget == "total" and not baseline.cpu_tier and not device.shared,
        ),
    ):
        if together:
            raise ConfigError(f"{what}, and {beside}; change one of the two.")


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


def auto_gpu_blocks(plan: TrialPlan, cpu_bytes: int) -> int:
    """Blocks of the GPU tier where cache.gpu=auto: what weights, one iteration and (on a CPU) the CPU tier leave.

    Simulated: exact. A GPU: from its total memory, since nothing is loaded yet; the started worker measures again, and its
    number is used. A CPU: from its free memory, rounded down to a power of two of blocks, so that consecutive trials get the
    same although a few MB more or less are free. Raises HardwareMissing with the numbers.
    """
    device, model = plan.device, plan.model
    there = free_host_memory_bytes() if device.shared else device.gpu_bytes
    share = memory_share(device, plan.config.hardware.memory_share)
    need = model.weight_bytes + plan.activation_bytes + cpu_bytes * device.shared
    blocks = max(0, int(share * there) - need) // plan.block_bytes
    if device.shared and blocks:
        blocks = 1 << (blocks.bit_length() - 1)
    if blocks >= LEAST_GPU_BLOCKS:
        return blocks
    raise HardwareMissing(
        f"cache.gpu=auto finds no room: hardware.memory_share={share:g} of the {format_bytes(there)} on {device.label} is "
        f"{format_bytes(int(share * there))}, of which model={model.name} in {model.dtype}, an iteration and what else is "
        f"there take {format_bytes(need)}. Use a smaller model or cache.cpu, or raise hardware.memory_share."
    )


def model_spec(model: ModelConfig, device: Device, measured: str | None = None) -> ModelSpec:
    """The model in numbers, in the dtype it will have: auto is bfloat16 on a GPU, and float32 on a CPU;
    measured: where a machine is simulated by its profile, the dtype of that. Raises UnsupportedModel for one whose parameters
    a simulated machine would have to guess."""
    architecture = folder_architecture(model.weights) if weights_kind(model) == "path" else model.architecture
    dtype: str = (measured or "bfloat16") if model.dtype == "auto" else model.dtype
    spec = replace(ModelSpec.from_architecture(model.name, architecture, dtype), architecture=dict(architecture))
    if device.simulated and spec.uncounted:
        raise UnsupportedModel(
            f"model={model.name} is of an architecture ({spec.model_type or 'no model_type'}) whose parameters are not "
            f"known, so its times on {device.label} cannot be simulated; use hardware=local, or another model."
        )
    return replace(spec, dtype="float32") if model.dtype == "auto" and device.kind == "cpu" else spec
