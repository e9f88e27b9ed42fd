"""What a map of sizes asks: the load, and the sizes and seeds of its cells, as configured or as machine and load suggest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from omegaconf import DictConfig, OmegaConf, open_dict
from pydantic import BaseModel, ConfigDict, Field

from pensieve.errors import ConfigError
from pensieve.lab.compose import TrialConfig, TrialPlan, build_tokenizer, check, make_workload, plan_trial
from pensieve.lab.compose.build import longest_conversation
from pensieve.lab.compose.plan import auto_gpu_blocks
from pensieve.lab.compose.preflight import check_memory, preflight
from pensieve.lab.compose.settings import check_node
from pensieve.lab.results.prices import Prices
from pensieve.lab.results.size_map import NO_DISK, Question
from pensieve.lab.workload.base import WorkloadPlan
from pensieve.units import parse_capacity

UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))

Size = str | int | float


class SizeSettings(BaseModel):
    """The fields of `size` in conf/size.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: list[Size] | None = None
    cpu: list[Size] | None = None
    disk: list[Size] | None = None
    points: int = Field(6, ge=1)
    seeds: list[int] = Field([0, 1, 2, 3, 4], min_length=1)
    of: Literal["history", "prompt"] = "history"
    knee: float = Field(0.99, gt=0.0, le=1.0)
    percentile: Literal["p50", "p90", "p99"] = "p90"
    processes: int | None = Field(None, ge=1)
    prices: Prices = Prices()


@dataclass(frozen=True)
class Load:
    """What is asked of every cell: the configuration without the sizes and the seed."""

    cfg: DictConfig

    def of(self, gpu: Size, cpu: Size, disk: Size, seed: int) -> DictConfig:
        cell = self.cfg.copy()
        sizes = {"cache.gpu": gpu, "cache.cpu": cpu, "cache.disk": disk if disk != NO_DISK else 0}
        for field, value in {**sizes, "seed": seed}.items():
            OmegaConf.update(cell, field, value)
        return cell

    def plan(self, gpu: Size, cpu: Size, disk: Size, seed: int) -> TrialPlan:
        return plan_trial(check(self.of(gpu, cpu, disk, seed)))


def read(cfg: DictConfig) -> tuple[SizeSettings, Load]:
    base = cfg.copy()
    with open_dict(base):
        given = OmegaConf.to_container(base.pop("size"), resolve=True)
        base.pop("hydra", None)
    settings = check_node(SizeSettings, {"size": given}, "size")
    if base.workload.get("inspect"):
        raise ConfigError("workload.inspect=true runs nothing, so there is no map; use it with runners/run.py.")
    return settings, Load(base)


def question_of(settings: SizeSettings, load: Load, config: TrialConfig) -> Question:
    plan = plan_trial(config)
    if config.baseline.engine is not None:
        raise ConfigError(
            f"baseline={config.baseline.name} sizes its cache itself; the map needs a baseline in the engine, such as "
            "baseline=pensieve."
        )
    gpu, cpu = settings.gpu, settings.cpu
    if not config.baseline.cpu_tier:
        if len(cpu or ()) > 1 or len(settings.disk or ()) > 1:
            raise ConfigError(
                f"baseline={config.baseline.name} has no CPU tier, and without one nothing reaches a disk; leave size.cpu "
                "and size.disk out, or use baseline=pensieve."
            )
        cpu = ["0GB"] if cpu is None else cpu
    disks = settings.disk if settings.disk is not None else [config.cache.disk] if plan.disk_blocks else [0]
    if gpu is None or cpu is None:
        loads = [_described(load.plan(config.cache.gpu, config.cache.cpu, 0, seed)) for seed in settings.seeds]
        suggested = default_sizes(plan, loads, settings.points)
        gpu, cpu = suggested[0] if gpu is None else gpu, suggested[1] if cpu is None else cpu
    sizes = _ascending(gpu, "size.gpu"), _ascending(cpu, "size.cpu")
    return Question(
        gpu=sizes[0],
        cpu=sizes[1],
        seeds=tuple(dict.fromkeys(settings.seeds)),
        of=settings.of,
        knee=settings.knee,
        percentile=settings.percentile,
        slo_ttft_ms=config.slo.ttft_ms,
        prices=settings.prices,
        devices=plan.device.count,
        disk=tuple(size if _amount(size) else NO_DISK for size in _ascending(disks, "size.disk")),
    )


def _ascending(sizes: Sequence[Size], field: str) -> tuple[str, ...]:
    """As typed, in order and each once. Bytes and tokens cannot be ordered without a model, so one map has one of them."""
    if not sizes:
        raise ConfigError(f"{field} names no size; give some, such as {field}=[4GB,8GB,16GB], or leave it out.")
    read = {str(size): parse_capacity(size, field) for size in sizes}
    amounts = {text: _amount(text) for text in read}
    if len({found.tokens is None for text, found in read.items() if amounts[text]}) > 1:
        raise ConfigError(f"{field} mixes bytes and tokens; give all sizes in one of them.")
    return tuple(sorted({amount: text for text, amount in amounts.items()}.values(), key=lambda text: amounts[text]))


def _amount(size: Size) -> int:
    """In bytes or in tokens, whichever it is given in."""
    found = parse_capacity(size)
    return (found.bytes if found.tokens is None else found.tokens) or 0


def _described(plan: TrialPlan) -> WorkloadPlan:
    return make_workload(plan, build_tokenizer(plan.config.model, plan.model.vocab, plan.device.simulated)).describe()


def default_sizes(plan: TrialPlan, loads: Sequence[WorkloadPlan], points: int) -> tuple[list[Size], list[Size]]:
    """Sizes a device, evenly spread in their logarithms. GPU: from what the longest conversation takes; CPU: from none. Both
    up to what the machine has, and no more than all conversations take together. loads: of each seed. Raises ConfigError and
    HardwareMissing without room."""
    device, count = plan.device, plan.device.count
    block = plan.block_bytes
    slots = int((plan.config.baseline.cache or {}).get("n_slots") or 1)
    longest = max(longest_conversation(one) or plan.model.max_context for one in loads)
    least = slots * (longest + 2 * plan.chunk_tokens) * plan.model.kv_bytes_per_token / count
    share = plan.config.hardware.memory_share
    room = auto_gpu_blocks(device, plan.model, plan.activation_bytes, 0, block, share) * block / count
    beside = device.cpu_bytes / count
    if device.shared:  # both tiers are in one memory
        room = beside = room / 2
    everything = 1.05 * max(one.working_set_tokens for one in loads) * plan.model.kv_bytes_per_token / count
    most_gpu, most_cpu = min(room, max(everything, least)), min(beside, max(everything, least))
    if least > most_gpu:
        raise ConfigError(
            f"The longest conversation needs {_text(_two_digits(least, math.ceil))} of KV, and {device.label} has room for "
            f"{_text(_two_digits(most_gpu, math.floor))}; use a larger machine, more devices (hardware.gpus) or a smaller "
            "workload.max_turns."
        )
    return _spread(least, most_gpu, points), ["0GB", *_spread(least, most_cpu, points - 1)]


def _spread(low: float, high: float, points: int) -> list[Size]:
    """Sizes of two digits from `low`, rounded up, to `high`, rounded down."""
    least, most = _two_digits(low, math.ceil), _two_digits(high, math.floor)
    between = (_two_digits(value, round) for value in np.geomspace(low, high, points)[1:-1])
    found = sorted({least, *between, most} if points > 1 else {least})
    sizes: list[Size] = [_text(amount) for amount in found if least <= amount <= max(least, most)]
    return sizes[:points]


def _two_digits(amount: float, to_whole: Callable[[float], int]) -> int:
    step = 10.0 ** (math.floor(math.log10(amount)) - 1)
    return round(to_whole(round(amount / step, 6)) * step)


def _text(amount: int) -> str:
    """ "43GB", "4.3GB"."""
    scale, unit = next((one for one in UNITS if amount >= one[0]), UNITS[-1])
    return f"{amount / scale:g}{unit}"


def check_question(load: Load, question: Question) -> None:
    """The smallest sizes must hold the longest conversation of every seed, the largest must fit the machine, and both must be
    asked the same. Raises PensieveError."""
    smallest, largest = question.sizes((0, 0, 0)), question.sizes(question.corner)
    most = load.plan(*largest, question.seeds[0])
    check_memory(most)
    for seed in question.seeds:
        preflight(load.plan(*smallest, seed))
    least = load.plan(*smallest, question.seeds[0])
    asked = [(one.sessions, one.turns, one.working_set_tokens) for one in (_described(least), _described(most))]
    if asked[0] != asked[1]:
        raise ConfigError(
            f"workload={most.config.workload.get('name')} asks more of a larger cache, so that the cells of a map would not "
            "be comparable; set workload.pressure=0, or use workload=sharegpt or workload=trace."
        )
