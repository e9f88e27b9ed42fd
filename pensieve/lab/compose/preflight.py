"""Check before anything starts what would otherwise fail minutes later."""

from __future__ import annotations

from pensieve.device.kernels.backends import require
from pensieve.errors import CapacityError, ConfigError, HardwareMissing
from pensieve.lab.compose.build import build_workload, find_parts, outside_engine
from pensieve.lab.compose.machine import free_device_bytes
from pensieve.lab.compose.plan import LEAST_GPU_BLOCKS, TrialPlan
from pensieve.lab.compose.tokenizer import build_tokenizer
from pensieve.lab.compose.weights import check_weights
from pensieve.units import format_bytes

GPU_USABLE = 0.95
"""Share of a GPU's memory that torch can use; the rest is CUDA's context and fragmentation."""


def preflight(plan: TrialPlan) -> None:
    """Check parts, then memory, then weights: a machine too small for a model needs no advice on downloading it.

    Raises EngineMissing, ConfigError, HardwareMissing, WeightsMissing, UnsupportedModel, CapacityError.
    """
    find_parts(plan.config)
    if plan.config.baseline.engine is not None and not plan.device.simulated:
        tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=False)
        outside_engine(plan, tokenizer=tokenizer).check()
    check_attention(plan)
    check_capacity(plan)
    check_memory(plan)
    if not plan.device.simulated:
        check_weights(plan.config.model)
        if plan.config.trial.measure_machine is not None:
            check_measurable(plan)
    if plan.device.divided:
        from pensieve.plugins.device.sharding import refuse_unsharded  # brings torch

        refuse_unsharded(plan.model, plan.device.count)
    build_workload(plan, build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated))


def check_measurable(plan: TrialPlan) -> None:
    """Raises ConfigError for a machine of which there can be no profile."""
    config = plan.config
    several = plan.device.divided or config.hardware.router != "single"
    if plan.device.simulated or config.baseline.engine is not None or several or not plan.cpu_blocks:
        raise ConfigError(
            f"A profile is of one real device, our engine, and copies between two tiers. Here are "
            f"hardware={config.hardware.name} hardware.gpus={plan.device.count} hardware.router={config.hardware.router} "
            f"baseline={config.baseline.name} cache.cpu={config.cache.cpu}; use hardware=local baseline=pensieve, one device "
            "and a cache.cpu."
        )


def check_attention(plan: TrialPlan) -> None:
    """Raises EngineMissing for a backend that was asked for by name and cannot run here."""
    name = plan.config.attention_backend
    if name != "auto" and not plan.device.simulated and plan.config.baseline.engine is None:
        require(name, plan.device.kind, plan.chunk_tokens)


def check_capacity(plan: TrialPlan) -> None:
    """Raises CapacityError for a GPU tier that no engine could work with."""
    size = plan.chunk_tokens
    if plan.gpu_blocks < LEAST_GPU_BLOCKS:
        raise CapacityError(
            f"cache.gpu={plan.config.cache.gpu!r} holds {plan.gpu_blocks * size} tokens of {plan.model.name}, and an engine "
            f'needs {LEAST_GPU_BLOCKS} blocks of {size}; use cache.gpu="{LEAST_GPU_BLOCKS * size} tokens" or more.'
        )


def check_memory(plan: TrialPlan, free_bytes: int | None = None) -> None:
    """Weights, KV and activations against what the machine has, or against `free_bytes` of its device.

    Raises HardwareMissing with one sentence: what it needs, what is there, what to use instead.
    """
    device, model = plan.device, plan.model
    # What is free decides how large a measured tier becomes; it must only be worth starting.
    kv_bytes = LEAST_GPU_BLOCKS * plan.block_bytes if plan.gpu_measured and free_bytes is not None else plan.gpu_bytes
    need = model.weight_bytes + kv_bytes + plan.activation_bytes
    parts = f"weights {format_bytes(model.weight_bytes)} in {model.dtype}, KV {format_bytes(kv_bytes)}"
    if device.shared:
        need += plan.cpu_bytes
        parts += f" + {format_bytes(plan.cpu_bytes)} for the CPU tier"
    parts += f", activations {format_bytes(plan.activation_bytes)}"
    usable = int(device.gpu_bytes * GPU_USABLE) if device.kind == "cuda" else device.gpu_bytes
    there, verb = (usable, "are there") if free_bytes is None else (free_bytes, "are free")
    if need > there:
        raise HardwareMissing(
            f"model={model.name} with cache={plan.config.cache.name} needs {format_bytes(need)} on {device.label} ({parts}) "
            f"and {format_bytes(there)} {verb}; use a smaller cache or model, more devices (hardware.gpus), or a simulated "
            "machine that holds it, such as hardware=sim_h200."
        )
    if not device.shared and plan.cpu_bytes > device.cpu_bytes:
        raise HardwareMissing(
            f"cache.cpu={plan.config.cache.cpu!r} needs {format_bytes(plan.cpu_bytes)} of host memory and "
            f"{format_bytes(device.cpu_bytes)} are there; use a smaller cache.cpu."
        )


def check_free_memory(plan: TrialPlan) -> None:
    """Check the memory that is free, once the trial holds the device. Raises HardwareMissing."""
    if not plan.device.simulated:
        check_memory(plan, free_device_bytes(plan.device))
