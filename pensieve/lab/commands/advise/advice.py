"""pensieve advise: read the recording, replay it as its engine was, and then in every way that might help."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import BaseModel, ConfigDict, Field

from pensieve.errors import ConfigError
from pensieve.lab.commands.advise.causes import Reading, Split, split
from pensieve.lab.commands.advise.machine import machine_of
from pensieve.lab.commands.advise.replays import (
    Replayed,
    Source,
    Task,
    gain,
    moved,
    open_source,
    replay_all,
    replayed,
    sample,
)
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.plan import TrialPlan, plan_trial
from pensieve.lab.compose.settings import check, check_node, resolved
from pensieve.lab.results.size_map import Prices
from pensieve.lab.statistics import Estimate
from pensieve.lab.traffic.table import Facts
from pensieve.serve.books.books import PositionPrices
from pensieve.sim.worker import simulated_cost
from pensieve.specs import ModelSpec
from pensieve.units import format_bytes, parse_capacity

COMMON_EDGE = 0.1
"""Of the returning conversations: so many differ at one position before that is taken for the template's doing."""
WORTH = 0.005
"""Of the prompt tokens: what helps finds so much more, with its whole interval above nothing."""


class Settings(BaseModel):
    """The fields of conf/advise.yaml that no trial has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: Literal["vllm"] | None = None
    blocks: int | None = Field(None, ge=1)
    block_tokens: int | None = Field(None, ge=1)
    cpu_bytes: float | None = Field(None, ge=0)
    policy: Literal["lru", "arc"] | None = None
    machine: Literal["given", "recorded"] = "given"
    replay_s: float = Field(4.0, gt=0)
    to: str | None = None
    prices: Prices = Prices()


@dataclass(frozen=True, slots=True)
class Served:
    """What the requests were served by: a configuration, and its sizes in tokens. told: by the recording or the user; if not,
    they are those of the configuration, an assumption."""

    config: Mapping[str, Any]
    gpu_tokens: int
    cpu_tokens: int
    block_tokens: int
    told: bool

    def changed(self, share: float, cpu: int | None = None, disk: int = 0, **nodes: Any) -> dict[str, Any]:
        """The configuration of a replay. share: of the tiers, as of the conversations."""
        size = self.block_tokens
        tiers = {"gpu": self.gpu_tokens, "cpu": self.cpu_tokens if cpu is None else cpu, "disk": disk}
        tokens = {tier: max(4, round(count * share / size)) * size if count else 0 for tier, count in tiers.items()}
        sizes = {tier: f"{count} tokens" for tier, count in tokens.items()}
        return {**self.config, "cache": {**self.config["cache"], **sizes, "chunk_tokens": size}, **nodes}


@dataclass(frozen=True, slots=True)
class Option:
    """What might help. added: bytes, by tier. command: what vLLM's is given, None where vLLM cannot do it. moved: from where
    on prompts are taken to be sent in another order."""

    name: str
    why: str
    config: Mapping[str, Any]
    added: Mapping[str, int] = field(default_factory=dict)
    command: str | None = None
    moved: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    option: Option
    replayed: Replayed
    more: Estimate
    faster: Estimate

    @property
    def helps(self) -> bool:
        return self.more.value >= WORTH and (self.more.ci_low or 0.0) >= 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """All that the page shows. part: of the reading, what was replayed; share: of the recording's different tokens that it
    has. engine_found: what the engine says it found of it; None: it does not say. split_of: whose misses are divided."""

    source: Source
    plan: TrialPlan
    settings: Settings
    served: Served
    reading: Reading
    part: Reading
    share: float
    split: Split
    split_of: str
    base: Replayed
    engine_found: float | None
    largest_difference: int | None
    outcomes: Sequence[Outcome]


def recorded(cfg: DictConfig) -> tuple[Source, Served, Settings]:
    """What was asked, and what served it. Raises ConfigError and MalformedInput."""
    settings, config = _settings(cfg)
    path = Path(str(config["workload"].get("path") or "")).expanduser()
    if not config["workload"].get("path"):
        raise ConfigError("advise needs the recorded traffic: pensieve advise traffic.parquet, from pensieve record.")
    source = open_source(path, config["workload"].get("format"))
    return source, _served(config, settings, source.facts), settings


def advise(cfg: DictConfig, say: Callable[[str], None]) -> Advice:
    """Raises ConfigError and MalformedInput for what cannot be advised on."""
    source, served, settings = recorded(cfg)
    plan = plan_trial(check(served.changed(1.0)))
    reading = Reading(source.facts, source.rows, source.named)
    limit = plan.model.max_context
    longer = sum(one.prompt + one.reply > limit for one in reading.sent)
    if longer > len(reading.sent) // 100:  # some few are left out, and counted
        raise ConfigError(
            f"{longer:,} of {len(reading.sent):,} requests are longer than the {limit:,} tokens of model={plan.model.name}; "
            "choose the model that served them, or raise model.architecture.max_position_embeddings."
        )
    if reading.replicas > 1:
        served = replace(served, config={**served.config, "hardware": _routed(served, "random", reading.replicas)})
    chosen = sample(source.conversations, settings.replay_s, served.block_tokens)
    part = reading
    if len(chosen) < len(source.conversations):
        names = {one.id for one in chosen}
        part = Reading(source.facts, [row for row in source.rows if row[1] in names], source.named)
    share = 1.0 if part is reading else part.unique_tokens / reading.unique_tokens
    if settings.machine == "recorded":
        file = Path(settings.to or source.path).expanduser().with_suffix(".machine.json")
        served = on_recorded(served, source, plan.model, file)
        plan = plan_trial(check(served.changed(1.0)))
    prices = PositionPrices(simulated_cost(plan.model, plan.hardware, served.block_tokens), served.block_tokens)
    say(f"Read {len(reading.sent):,} requests; replaying {len(part.sent):,} of {part.sessions:,} conversations.")
    options = _options(served, plan, reading, share)
    tasks = [Task(served.changed(share), chosen)]
    tasks += [Task(one.config, chosen if one.moved is None else moved(chosen, one.moved)) for one in options]
    base, *others = replay_all(tasks)
    outcomes = [Outcome(one, found, *gain(base, found)) for one, found in zip(options, others, strict=True)]
    capacity = max(1, reading.replicas) * (served.gpu_tokens + served.cpu_tokens)
    said = [one.found for one in reading.sent]
    replay = base.turns.found.to_dict()
    found = [replay.get((one.session, one.turn)) for one in part.sent]
    both = [
        (one.prompt, one.found, other)
        for one, other in zip(part.sent, found, strict=True)
        if one.found is not None and other is not None
    ]
    if None not in said:
        causes, of = split(reading, said, capacity, prices), "as the engine said"
    else:
        causes, of = split(part, found, round(capacity * share), prices), "as the replay of the engine found"
    return Advice(
        source, plan, settings, served, reading, part, share, causes, of, base,
        sum(own for _, own, _ in both) / sum(prompt for prompt, _, _ in both) if both else None,
        max(abs(own - other) for _, own, other in both) if both else None,
        sorted(outcomes, key=lambda one: (-round(one.more.value, 3), sum(one.option.added.values()))),
    )  # fmt: skip


def _settings(cfg: DictConfig) -> tuple[Settings, dict[str, Any]]:
    base = cfg.copy()
    with open_dict(base):
        given = {name: base.pop(name) for name in Settings.model_fields}
        base.pop("hydra", None)
    plain = {name: OmegaConf.to_container(one) if OmegaConf.is_config(one) else one for name, one in given.items()}
    return check_node(Settings, {"advise": plain}, "advise"), resolved(base)


def _served(config: dict[str, Any], settings: Settings, facts: Facts) -> Served:
    """What served, by the user, else by the recording, else by the configuration."""
    told = facts.engine
    hashed = facts.block if facts.unit == "tokens" else None
    block = int(settings.block_tokens or told.get("block_tokens") or hashed or 16)
    gpu = (settings.blocks - 1) * block if settings.blocks else told.get("gpu_tokens")  # the first is vLLM's own
    plan = plan_trial(check({**config, "cache": {**config["cache"], "chunk_tokens": block}}))
    token_bytes = plan.model.kv_bytes_per_token
    cpu = int(settings.cpu_bytes / token_bytes) if settings.cpu_bytes is not None else told.get("cpu_tokens")
    known = (settings.engine or told.get("name")) == "vllm" and gpu is not None
    if settings.engine and not known:
        raise ConfigError(
            f"engine={settings.engine} needs blocks=, the KV blocks on its device; vLLM's log says how many."
        )
    if not known:
        return Served(config, plan.gpu_blocks * block, plan.cpu_blocks * block, block, told=False)
    baseline = read_option("baseline", "vllm_offload")  # without a CPU tier too: it keeps equal blocks twice, as vLLM
    baseline["cache"]["order"] = settings.policy or told.get("policy") or "lru"
    return Served({**config, "baseline": baseline}, int(gpu or 0), int(cpu or 0), block, told=True)


def on_recorded(served: Served, source: Source, model: ModelSpec, file: Path) -> Served:
    """The same on the machine that the recording's times tell, which is written to a file. A replay says what came from the
    CPU tier, where the rows do not. Raises ConfigError where they tell no machine."""
    loaded: list[int] = [0] * len(source.rows)
    if served.cpu_tokens and any(one.cached_cpu_tokens is None for one, _ in source.rows):
        base, turns = replayed(Task(served.changed(1.0), source.conversations)), Counter[str]()
        for place, (_, name) in enumerate(source.rows):
            turns[name] += 1
            loaded[place] = base.turns.loaded.get((name, turns[name]), 0)
    machine_of([one for one, _ in source.rows], loaded, model, served.block_tokens).write(file)
    hardware = {**read_option("hardware", "sim_profile"), "profile": str(file)}
    return replace(served, config={**served.config, "hardware": hardware})


def _routed(served: Served, router: str, replicas: int) -> dict[str, Any]:
    return {**served.config["hardware"], "router": router, "replicas": replicas}


def _options(served: Served, plan: TrialPlan, reading: Reading, share: float) -> list[Option]:
    """What might help these requests, each as one change of what served."""
    token_bytes = plan.model.kv_bytes_per_token
    gpu, cpu = served.gpu_tokens, served.cpu_tokens
    host = int(parse_capacity(plan.config.hardware.cpu_memory or "0 tokens").bytes or 0) // token_bytes

    def offload(name: str, why: str, tokens: int, policy: str = "lru", **more: Any) -> Option:
        """vLLM's OffloadingConnector with a CPU tier of so many tokens. more: of its own fields."""
        own = policy in ("lru", "arc")
        baseline = read_option("baseline", "vllm_offload")
        baseline["cache"].update(order=policy if own else "eviction", **more)
        extra = {"cpu_bytes_to_use": tokens * token_bytes, "eviction_policy": policy, **more}
        connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        if not own:  # the plug-in
            connector |= {"kv_connector": "PensieveConnector", "kv_connector_module_path": "pensieve.plugins.vllm"}
        added = {"cpu": (tokens - cpu) * token_bytes} if tokens > cpu else {}
        command = f"--kv-transfer-config '{json.dumps(connector)}'"
        return Option(name, why, served.changed(share, cpu=tokens, baseline=baseline), added, command)

    def ours(name: str, why: str, **changed: Any) -> Option:
        return Option(name, why, served.changed(share, baseline=read_option("baseline", "pensieve_shared"), **changed))

    sizes = sorted({min(size, host) for size in (gpu, 2 * gpu, 4 * gpu) if min(size, host) > 1.1 * cpu})
    least_recent = "vLLM's OffloadingConnector, least recently used first"
    found = [offload(f"CPU tier of {format_bytes(size * token_bytes)}", least_recent, size) for size in sizes]
    tier = cpu or (sizes[0] if sizes else 0)
    if tier:
        named, disk = f"CPU tier of {format_bytes(tier * token_bytes)}", 10 * gpu * token_bytes
        own, order = str(served.config["eviction"]["name"]), "the order of this project's policy, in vLLM as a plug-in"
        replies = "vLLM stores prompts alone unless it is told"
        why = "by this project's engine: baseline=pensieve_shared"
        behind = ours(f"Disk of {format_bytes(disk)} behind a {named}", why, cpu=tier, disk=10 * gpu)
        found += [
            offload(f"ARC in a {named}", "vLLM's other order of it", tier, "arc"),
            offload(f"{own.replace('_', ' ').capitalize()} in a {named}", order, tier, own),
            offload(f"Replies stored too, in a {named}", replies, tier, offload_prompt_only=False),
            replace(behind, added={**({} if cpu else {"cpu": tier * token_bytes}), "disk": disk}),
        ]
    for edge, sessions in reading.edges.most_common(1):
        if sessions >= COMMON_EDGE * reading.returning:
            name = f"Move what changes at token {edge:,} to the end of the prompt"
            why = f"{sessions:,} of {reading.returning:,} returning conversations differ there first"
            found.append(Option(name, why, served.changed(share), moved=edge))
    if reading.replicas > 1:
        why = "each conversation on one replica; beside it, any replica at random"
        sticky = served.changed(share, hardware=_routed(served, "affinity", reading.replicas))
        found.append(Option("Sticky routing", why, sticky))
    if served.config["baseline"]["name"] not in ("prefix_cache", "vllm_offload", "pensieve_shared"):
        found.append(ours("Sharing equal beginnings of conversations", "baseline=pensieve_shared"))
    return found
