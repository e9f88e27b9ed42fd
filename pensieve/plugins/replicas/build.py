"""Replicas from a plan: what is checked before they start, and what each of them gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pensieve.device.asked import physical_cores
from pensieve.errors import ConfigError, HardwareMissing
from pensieve.lab.compose.machine import free_device_bytes, memory_limit_bytes
from pensieve.lab.compose.plan import TrialPlan
from pensieve.lab.compose.preflight import check_memory
from pensieve.lab.compose.weights import check_weights
from pensieve.plugins.replicas.system import ReplicaSystem, Scaling


def build_replicas(
    plan: TrialPlan,
    scaling: Scaling,
    router: str,
    environment: Mapping[str, str] | None = None,
    connected: Callable[[], object] | None = None,
) -> ReplicaSystem:
    """The system of a real machine's replicas, not started yet. environment, connected: as of ReplicaSystem.

    Raises HardwareMissing where so many do not fit: before the first of them starts, not after the last. WeightsMissing.
    """
    assert not plan.device.simulated
    config = plan.config
    gpus = config.hardware.gpus if plan.device.kind == "cuda" else 0
    if gpus and ":" in config.hardware.device:
        raise ConfigError(
            f"hardware.device={config.hardware.device} with replicas: each gets GPUs of its own; use hardware.device=cuda."
        )
    _check_room(plan, scaling.most, gpus)
    check_weights(config.model)
    fields = config.model_dump()
    threads = config.hardware.threads or max(1, physical_cores() // scaling.most)
    limit = memory_limit_bytes(config.hardware)  # of all of them together
    fields["hardware"] = {
        **fields["hardware"],
        "threads": threads,
        "cpu_memory": None if limit is None else f"{limit // scaling.most} B",
        "replicas": 1,
        "router": "single",
    }
    return ReplicaSystem(
        fields, scaling, router, seed=config.seed, gpus=gpus, environment=environment, connected=connected
    )


def _check_room(plan: TrialPlan, most: int, gpus: int) -> None:
    free = free_device_bytes(plan.device)
    if not gpus:
        try:
            check_memory(plan, min(free, plan.device.gpu_bytes) // most)  # the latter is hardware.cpu_memory, where set
        except HardwareMissing as error:
            raise HardwareMissing(f"Of {most} replicas each has its share of this machine's memory: {error}") from error
        return
    import torch

    count = torch.cuda.device_count()
    if count < most * gpus:
        raise HardwareMissing(
            f"{most} replicas with hardware.gpus={gpus} need {most * gpus} GPUs, and this machine has {count}; use fewer."
        )
    check_memory(plan, free)
