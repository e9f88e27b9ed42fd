"""One trial, decided: every size a number, every name resolved. Nothing is loaded or started yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pensieve.compose.capacity import AUTO, auto_gpu_blocks
from pensieve.compose.machine import Device, find_device, hardware_spec
from pensieve.compose.schema import ModelConfig, TrialConfig
from pensieve.compose.target import refuse_missing
from pensieve.compose.weights import folder_architecture, weights_kind
from pensieve.errors import ConfigError
from pensieve.specs import HardwareSpec, ModelSpec
from pensieve.units import format_bytes, parse_capacity


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """budget_*_blocks: what cache= says, times the devices. gpu_blocks, cpu_blocks: what this baseline makes of it.

    weights: hub, random or path; none where a simulation needs none.
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

    @property
    def chunk_tokens(self) -> int:
        return self.config.cache.chunk_tokens

    @property
    def block_bytes(self) -> int:
        return self.chunk_tokens * self.model.kv_bytes_per_token

    @property
    def gpu_auto(self) -> bool:
        """The GPU tier takes what fits; on a real GPU gpu_blocks is then an estimate, and the started worker measures."""
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
        states = s.max_batch_tokens * (6 * m.hidden + 3 * m.intermediate + 4 * m.heads * m.head_dim) * m.dtype_bytes
        return states + s.max_batch_requests * m.vocab * 4

    def budget(self) -> str:
        """The budgets in tokens, for people."""
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
    if baseline.cache is None:
        raise ConfigError(
            f"baseline={baseline.name} names no cache manager and no engine; give baseline.cache a _target_."
        )
    device = find_device(config.hardware)
    model = model_spec(config.model, device)
    chunk = config.cache.chunk_tokens
    gpu, cpu = (
        0
        if size == AUTO and tier == "gpu"
        else parse_capacity(size, f"cache.{tier}").in_blocks(model.kv_bytes_per_token, chunk) * device.count
        for tier, size in (("gpu", config.cache.gpu), ("cpu", config.cache.cpu))
    )
    total = baseline.kv_budget == "total" and not baseline.cpu_tier
    plan = TrialPlan(
        config=config,
        model=model,
        hardware=hardware_spec(config.hardware, device),
        device=device,
        weights="none" if device.simulated else weights_kind(config.model),
        budget_gpu_blocks=gpu,
        budget_cpu_blocks=cpu,
        gpu_blocks=gpu + cpu if total else gpu,
        cpu_blocks=cpu if baseline.cpu_tier else 0,
    )
    return _sized(plan, total) if plan.gpu_auto else plan


def _sized(plan: TrialPlan, total: bool) -> TrialPlan:
    """With the GPU tier that fits. The budget is the same for every baseline: room is kept for the CPU tier even where a
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


def model_spec(model: ModelConfig, device: Device) -> ModelSpec:
    """The model in numbers, in the dtype it will have: auto is float32 on a CPU, bfloat16 elsewhere."""
    architecture = folder_architecture(model.weights) if weights_kind(model) == "path" else model.architecture
    dtype = model.dtype
    if dtype == "auto":
        dtype = "float32" if device.kind == "cpu" else "bfloat16"
    if device.kind == "cpu" and dtype != "float32":
        raise ConfigError(
            f"model.dtype={dtype}: models run in float32 on a CPU, since 16 bits are emulated; leave it at auto."
        )
    spec = ModelSpec.from_architecture(model.name, architecture, dtype)
    return replace(spec, architecture=dict(architecture))
