"""Make a server: from the arguments of the API, or from the fields of a configuration, over one engine or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pensieve.errors import ConfigError, EngineMissing, typed
from pensieve.lab.compose.build import build_system, check_free_memory, what_starts
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.model_files import build_tokenizer, model_config
from pensieve.lab.compose.plan import TrialPlan, plan_trial
from pensieve.lab.compose.settings import check, locate
from pensieve.plugins.engines.ray_cluster import check_ray
from pensieve.serve.server.api import Server


def create_server(
    mode: str = "pensieve",
    model: str = "tiny",
    weights: str | None = None,
    gpu_cache: str = "4096 tokens",
    cpu_cache: str = "8192 tokens",
    eviction: str = "retention_value",
    device: str = "auto",
    seed: int = 0,
    scheduler: str = "unified",
    disk_cache: str = "0 tokens",
) -> Server:
    """A server that is ready to answer.

    mode: pensieve, gpu_only, stateless, or another baseline in the engine. model: a name in conf/model,
    a hub id, a folder written by save_pretrained, or a GGUF file; weights: hub (what was published: of a folder, its own),
    random or a folder, by default what the model says.
    gpu_cache, cpu_cache, disk_cache: "4GiB" or "8192 tokens". device: auto, cpu, cuda, or a simulated machine such as
    sim_h100. Raises the errors of pensieve.errors, each a sentence that says what to do.
    """
    return server_of(
        {
            "seed": seed,
            "model": model_config(model, **({} if weights is None else {"weights": weights})).model_dump(),
            "cache": {"name": "api", "gpu": gpu_cache, "cpu": cpu_cache, "disk": disk_cache},
            "eviction": read_option("eviction", eviction),
            "scheduler": read_option("scheduler", scheduler),
            "baseline": read_option("baseline", mode),
            "hardware": read_option("hardware", "local" if device == "auto" else device),
            "tracking": read_option("tracking", "off"),
        }
    )


def server_of(config: Mapping[str, Any], keeps_disk: bool = False, say: Callable[[str], None] | None = None) -> Server:
    """A warm server from the configuration of a command, or the fields of a trial but `workload`: callers ask.

    keeps_disk: as of build_system. say: is told what the start will take, where that is long.
    """
    plan = plan_live(config)
    check_free_memory(plan)
    if say is not None and (starting := what_starts(plan)) is not None:
        say(starting)
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated)
    return Server(build_system(plan, tokenizer, keeps_disk=keeps_disk), tokenizer, plan.config.seed)


def replicated_server(
    config: Mapping[str, Any],
    replicas: int,
    router: str,
    environment: Mapping[str, str] | None = None,
    connected: Callable[[], object] | None = None,
) -> Server:
    """A server over several engines on Ray: conversations, tenants and HTTP are in this process; the replicas hold engines
    and KV, and nothing else. environment, connected: as of build_replicas. Raises EngineMissing without Ray."""
    check_ray("serve.replicas above 1")
    from pensieve.plugins.replicas.system import build_replicas

    plan = plan_live(config)
    if plan.device.simulated:
        raise ConfigError(
            f"serve.replicas={replicas} are processes, and hardware={plan.config.hardware.name} is simulated; use "
            "hardware=local, or simulate them with runners/run.py and hardware.replicas."
        )
    tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=False)
    system = build_replicas(plan, replicas, router, environment, connected)
    return Server(system, tokenizer, plan.config.seed)


def trial_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without the nodes of the commands that answer callers."""
    return {name: value for name, value in config.items() if name not in ("serve", "chat")}


def plan_live(fields: Mapping[str, Any]) -> TrialPlan:
    """The plan of an engine that serves callers. Raises ConfigError for a policy that cannot, EngineMissing for an engine of
    others."""
    config = check({**trial_fields(fields), "workload": read_option("workload", "chat")})
    if config.baseline.engine is not None:
        raise EngineMissing(
            f"baseline={config.baseline.name} is an outside engine, and only ours answer callers here. Compare with it in "
            f"trials ({typed('run')} baseline=pensieve,{config.baseline.name} -m), or choose one of ours, such as "
            "baseline=prefix_cache."
        )
    if getattr(
        locate(str(config.eviction["_target_"]), f"eviction={config.eviction.get('name')}"), "needs_future", False
    ):
        raise ConfigError(
            f"eviction={config.eviction.get('name')} needs a workload whose future is known, and live traffic has none; "
            "choose lru."
        )
    return plan_trial(config)
