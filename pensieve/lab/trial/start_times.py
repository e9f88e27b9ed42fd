"""What a start will take, said before it: as it took last time on this machine, or as a part of the work takes now."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from sqlalchemy import func, select

from pensieve.lab.compose import TrialPlan, model_is_loaded
from pensieve.lab.compose.weights import local_weights
from pensieve.lab.results.environment import host
from pensieve.lab.results.schema import MetricRow, Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.units import format_bytes

WORTH_SAYING_S = 10.0  # of a start whose time is known
LARGE_BYTES = 2**30  # weights whose start takes long enough to wonder, where it is not known
_PART_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LastStart:
    """How long an earlier trial of this model on this device took to start: load_s, and warmup_s, from then until it was
    ready."""

    trial_id: int
    load_s: float
    warmup_s: float


Seconds = Callable[[], float | None]
"""Measures a part of something, and gives the seconds of the whole; None where it cannot."""


def announce(plan: TrialPlan, store: ResultsStore | None, say: Callable[[str], None]) -> None:
    """Say what the start of a real engine will take, where somebody would wonder; not where its own model is in memory.
    store: of the trials that started it before, if there is one."""
    if model_is_loaded(plan):
        return
    last = None if store is None else last_start(plan, store)
    found = sentence(plan, last, lambda: reading_s(plan), lambda: locking_s(plan))
    if found is not None:
        say(found)


def sentence(plan: TrialPlan, last: LastStart | None, reading: Seconds, locking: Seconds) -> str | None:
    """None where the start is short, or none of ours."""
    device, model = plan.device, plan.model
    if device.simulated or plan.config.baseline.engine is not None:
        return None
    if last is not None:
        if last.load_s + last.warmup_s < WORTH_SAYING_S:
            return None
        return (
            f"The start takes about {last.load_s + last.warmup_s:.0f} s, as it did in trial {last.trial_id}: "
            f"{last.load_s:.0f} s to load {format_bytes(model.weight_bytes)} of weights, {last.warmup_s:.0f} s for "
            "page-locked memory, kernels and first iterations."
        )
    if model.weight_bytes < LARGE_BYTES and device.kind != "cuda":
        return None
    parts = [f"{_verb(plan)} {format_bytes(model.weight_bytes)} of weights{_about(reading())}"]
    if device.kind == "cuda":
        if plan.cpu_bytes:
            parts.append(f"page-locks {format_bytes(plan.cpu_bytes)} for the CPU tier{_about(locking())}")
        parts.append("compiles kernels, which are kept for later starts, and records graphs (not yet timed here)")
    return f"The first start of {model.name} on {device.label} {', '.join(parts)}."


def _verb(plan: TrialPlan) -> str:
    return "draws" if plan.config.model.weights == "random" else "loads"


def _about(seconds: float | None) -> str:
    return "" if seconds is None else f" (about {max(1.0, seconds):.0f} s, by a part of it)"


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


def reading_s(plan: TrialPlan) -> float | None:
    """Seconds to read the weights' files, by a part of one; None for weights that are drawn, or not here yet."""
    file = None if plan.config.model.weights == "random" else local_weights(plan.config.model)
    if file is None:
        return None
    files = {part.name: part.stat().st_size for part in file.parent.glob("*.safetensors")}
    return _read_part(file.parent, files)


def _read_part(folder: Path, files: Mapping[str, int]) -> float | None:
    """Time the reading of a part of the largest file, from its middle: its beginning may have been read to look at the
    header."""
    if not files or not any(files.values()):
        return None
    name, size = max(files.items(), key=lambda item: item[1])
    with (folder / name).open("rb", buffering=0) as opened:
        opened.seek(size // 2)
        began = perf_counter()
        read = len(opened.read(min(_PART_BYTES, size - size // 2)))
        took = perf_counter() - began
    return took / read * sum(files.values())


def locking_s(plan: TrialPlan) -> float | None:
    """Seconds to page-lock the CPU tier, by a part of it."""
    import torch

    from pensieve.device.transfers.pinned import pinned_bytes

    part = min(_PART_BYTES, plan.cpu_bytes)
    with torch.cuda.device(plan.device.name):
        torch.cuda.current_stream()  # the device's context, whose seconds are not those of the memory
        began = perf_counter()
        pinned_bytes(part)
        return (perf_counter() - began) / part * plan.cpu_bytes
