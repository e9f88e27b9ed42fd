"""A server over several engines on Ray Serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pensieve.compose import build_tokenizer
from pensieve.errors import ConfigError
from pensieve.replicas.build import build_replicas
from pensieve.replicas.system import Scaling
from pensieve.server.api import Server
from pensieve.server.create import plan_live
from pensieve.server.settings import ServeSettings


def replicated_server(
    fields: Mapping[str, Any], settings: ServeSettings, connected: Callable[[], object] | None = None
) -> Server:
    """Conversations, tenants and HTTP are in this process; the replicas hold engines and KV, and nothing else. connected: as
    of ReplicaSystem."""
    plan, (least, most) = plan_live(fields), settings.replicas
    if plan.device.simulated:
        raise ConfigError(
            f"serve.replicas={least if least == most else f'{least}..{most}'} are processes, and "
            f"hardware={plan.config.hardware.name} is simulated; use hardware=local, or simulate them with runners/run.py "
            "and hardware.replicas."
        )
    scaling = Scaling(least, most, settings.replica_turns, settings.scale_up_s, settings.scale_down_s, settings.drain_s)
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=False)
    without_keys = {settings.keys_env: ""}  # the replicas know no clients
    system = build_replicas(plan, scaling, settings.router, without_keys, connected)
    return Server(system, tokenizer, plan.config.seed)
