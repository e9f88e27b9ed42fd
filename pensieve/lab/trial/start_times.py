"""What a start will take, said before it: as it took last time on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sqlalchemy import func, select

from pensieve.lab.compose import TrialPlan, model_is_loaded
from pensieve.lab.results.environment import host
from pensieve.lab.results.schema import MetricRow, Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.units import format_bytes

WORTH_SAYING_S = 10.0  # of a start whose time is known
LARGE_BYTES = 2**30  # weights whose start takes long enough to wonder, where it is not known


class LastStart(NamedTuple):
    """How long an earlier trial of this model on this device took to start: load_s, and warmup_s, from then until it was
    ready."""

    trial_id: int
    load_s: float
    warmup_s: float


def announce(plan: TrialPlan, store: ResultsStore | None, say: Callable[[str], None]) -> None:
    """Say what the start of a real engine will take, where somebody would wonder; not where its own model is in memory.
    store: of the trials that started it before, if there is one."""
    if not model_is_loaded(plan) and (found := sentence(plan, last_start(plan, store) if store else None)):
        say(found)


def sentence(plan: TrialPlan, last: LastStart | None) -> str | None:
    """None where the start is short, or none of ours."""
    device, weights = plan.device, f"{format_bytes(plan.model.weight_bytes)} of weights"
    if device.simulated or plan.config.baseline.engine is not None:
        return None
    if last is not None:
        whole_s = last.load_s + last.warmup_s
        return (
            None
            if whole_s < WORTH_SAYING_S
            else (
                f"The start takes about {whole_s:.0f} s, as it did in trial {last.trial_id}: {last.load_s:.0f} s to load "
                f"{weights}, {last.warmup_s:.0f} s for page-locked memory, kernels and first iterations."
            )
        )
    if plan.model.weight_bytes < LARGE_BYTES and device.kind != "cuda":
        return None
    parts = [f"{'draws' if plan.config.model.weights == 'random' else 'loads'} {weights}"]
    if device.kind == "cuda":
        if plan.cpu_bytes:
            parts.append(f"page-locks {format_bytes(plan.cpu_bytes)} for the CPU tier")
        parts.append("compiles kernels, which are kept for later starts, and records graphs")
    return f"The first start of {plan.model.name} on {device.label} {', '.join(parts)}. It is not yet timed here."


def last_start(plan: TrialPlan, store: ResultsStore) -> LastStart | None:
    """Of the newest completed trial that loaded this model by itself on as many of this host's devices, and in as many
    replicas."""
    names = ("load_s", "engine_warmup_ms")
    model, hardware = plan.config.model, plan.config.hardware
    query = (
        select(Trial.id, MetricRow.name, MetricRow.value)
        .join(MetricRow, MetricRow.trial_id == Trial.id)
        .where(Trial.status == "completed", Trial.simulated.is_(False), Trial.host == host())
        .where(Trial.model == plan.model.name, Trial.dtype == plan.model.dtype, Trial.weights == plan.weights)
        .where(Trial.device == plan.device.label, MetricRow.name.in_(names))
        .where(Trial.baseline == plan.config.baseline.name, Trial.device_count == plan.device.count)
        .where(Trial.config["model"]["quantization"].as_string() == model.quantization)
        .where(func.coalesce(Trial.config["hardware"]["replicas"].as_integer(), 1) == hardware.replicas)
        .order_by(Trial.id.desc())
    )
    by_trial: dict[int, dict[str, float]] = {}
    with store.database.reading() as connection:
        for trial_id, name, value in connection.execute(query):
            values = by_trial.setdefault(int(trial_id), {})
            if value is not None:  # of a model that was in memory
                values[name] = float(value)
            if len(values) == len(names):
                return LastStart(int(trial_id), values["load_s"], values["engine_warmup_ms"] / 1e3)
    return None
