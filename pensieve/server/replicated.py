"""A server over several engines on Ray Serve: what it checks before they start, and what each of them gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pensieve.compose import build_tokenizer, resolved
from pensieve.compose.machine import free_device_bytes
from pensieve.compose.plan import TrialPlan
from pensieve.compose.preflight import check_memory
from pensieve.compose.weights import check_weights
from pensieve.errors import ConfigError, HardwareMissing
from pensieve.replicas.system import ReplicaSystem, Scaling
from pensieve.server.api import Server, live_fields, plan_live
from pensieve.server.settings import ServeSettings
from pensieve.worker.torch.threads import physical_cores


def replicated_server(fields: Mapping[str, Any], settings: ServeSettings) -> Server:
    """Conversations, tenants and HTTP are in this process; the replicas hold engines and KV, and nothing else."""
    fields = resolved(fields)
    plan, bounds = plan_live(fields), settings.replicas
    if plan.device.simulated:
        raise ConfigError(
            f"serve.replicas={bounds.least}..{bounds.most} are processes, and hardware={plan.config.hardware.name} is "
            "simulated; use hardware=local, or simulate them with runners/run.py and hardware.replicas."
        )
    gpus = plan.config.hardware.gpus if plan.device.kind == "cuda" else 0
    _check_room(plan, bounds.most, gpus)
    check_weights(plan.config.model)
    if plan.config.hardware.threads is None:
        share = max(1, physical_cores() // bounds.most)
        fields = {**fields, "hardware": {**fields["hardware"], "threads": share}}
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=False)
    scaling = Scaling(
        bounds.least,
        bounds.most,
        settings.replica_turns,
        settings.scale_up_s,
        settings.scale_down_s,
        settings.drain_s,
    )
    system = ReplicaSystem(
        live_fields(fields),
        scaling,
        settings.router,
        seed=plan.config.seed,
        gpus=gpus,
        environment={settings.keys_env: ""},  # the replicas know no clients
    )
    return Server(system, tokenizer, plan.config.seed)


def _check_room(plan: TrialPlan, most: int, gpus: int) -> None:
    """Raises HardwareMissing where so many replicas do not fit: before the first of them starts, not after the last."""
    if not gpus:
        check_memory(plan, free_device_bytes(plan.device) // most)
        return
    import torch

    if torch.cuda.device_count() < most * gpus:
        raise HardwareMissing(
            f"serve.replicas={most} with hardware.gpus={gpus} needs {most * gpus} GPUs, and this machine has "
            f"{torch.cuda.device_count()}; use fewer replicas."
        )
    check_memory(plan, free_device_bytes(plan.device))
