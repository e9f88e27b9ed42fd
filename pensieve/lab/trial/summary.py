"""The results of one trial as a short table or a line, and where they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from pensieve.errors import in_checkout
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.frame import Cell, Panel, footer, mixtures
from pensieve.lab.results.mlflow_runs import URL_ENV, remote_url
from pensieve.lab.results.notes import MOSTLY, load_changed, offered_rate, starting
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.tables import grid
from pensieve.lab.trial.tracking import Tracking
from pensieve.units import NONE

ROWS = (
    ("TTFT p50", "ttft_ms_p50", "ms"),
    ("TTFT p99", "ttft_ms_p99", "ms"),
    ("time per output token", "tpot_ms_mean", "ms"),
    ("output", "throughput_output_tok_s", "tokens/s"),
    ("hits on GPU", "gpu_hit_rate", "share"),
    ("hits on CPU", "cpu_hit_rate", "share"),
    ("hits on disk", "disk_hit_rate", "share"),
    ("recomputed", "miss_rate", "share"),
    ("scheduler a step", "schedule_ms_mean", "ms"),
)
UI_ADDRESS = "http://127.0.0.1:5000"
"""Of `make ui`, unless PORT is set."""
TOLD = ("failures", "contaminated", "cache_state_unverified", "held_whole", "late_sends", "oom")
"""Flags of a trial without which its numbers would mislead, beside those for which it must not be compared (mixtures)."""


def summary(store: ResultsStore, trial_id: int) -> RenderableType:
    trial = store.trial(trial_id)
    metrics = {(m.name, m.label): m for m in store.metrics_of(trial_id)}
    kind = "simulated" if trial.simulated else f"{trial.weights} weights"
    of_turns = [(f"TTFT, {name} turn (p50)", ("ttft_ms_p50", turn), "ms") for turn, name in _turns(metrics)]
    rows = [*of_turns, *((title, (name, ""), unit) for title, name, unit in ROWS)]
    table = grid(
        [{"": title, "value": _text(metrics[key], unit)} for title, key, unit in rows if key in metrics],
        f"trial {trial_id}: {trial.model} ({kind}) on {trial.device}, baseline {trial.baseline}, seed {trial.seed}",
        heads=False,
    )
    told = [str(trial.flags[flag]) for flag in TOLD if flag in trial.flags]
    told += [f"One of the {why.what}: do not compare its times, and {why.remedy}." for why in mixtures([trial])]
    cut = load_changed([Panel({}, [Cell(trial.baseline, {}, [trial])])])
    first = [*(note.text for note in cut), *_overloaded(trial, metrics)]
    return Group(*map(Text, first), table, *(Text(line) for line in [*told, *footer([trial])]))


def _overloaded(trial: Trial, metrics: Mapping[tuple[str, str], MetricValue]) -> list[str]:
    """Where the median request mostly waits for others, its times are of the queue, and grow with the length of the run."""
    waited, ttft, rate = (
        one.value if (one := metrics.get((name, ""))) else None
        for name in ("queue_ms_p50", "ttft_ms_p50", "throughput_req_s")
    )
    if not waited or not ttft or waited <= MOSTLY * ttft:
        return []
    offered = None if starting([trial]) else offered_rate([trial])
    kept_up = f" Finished {rate:.3g} of {offered:.3g} requests/s offered." if rate and offered else ""
    return [
        f"Near saturation: {waited:,.0f} of {ttft:,.0f} ms of TTFT (p50) is queueing. It grows with the run.{kept_up}"
    ]


def places(tracking: Tracking) -> list[str]:
    """Lines that say where the records are."""
    if not tracking.kept:
        return ["Nothing was kept (tracking=off)."]
    lines = [f"Database: {tracking.store.database.shown}"]
    if tracking.mlflow and not installed("mlflow"):
        lines.append("MLflow:   not installed, so nothing is there; the database is complete without it")
    elif tracking.mlflow and remote_url() is not None:
        lines.append(f"MLflow:   the server that {URL_ENV} names")
    elif tracking.mlflow:
        lines.append(f"MLflow:   {_ui(tracking.outputs / 'mlflow.db')}, then {UI_ADDRESS}/#/experiments")
    return lines


def _ui(store: Path) -> str:
    return f"make ui (reads {store})" if in_checkout() else f"mlflow ui --backend-store-uri sqlite:///{store}"


def installed(package: str) -> bool:
    """Whether it could be imported, without the seconds that importing it takes."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def brief(store: ResultsStore, trial_id: int) -> str:
    """A completed trial's main results in one line, for a sweep."""
    metrics = {(m.name, m.label): m for m in store.metrics_of(trial_id)}
    shown = [f"TTFT {name} turn {_text(metrics[('ttft_ms_p50', turn)], 'ms')}" for turn, name in _turns(metrics)]
    output = metrics.get(("throughput_output_tok_s", ""))
    return ", ".join([*shown, _text(output, "tokens/s")] if output else shown)


def _turns(metrics: dict[tuple[str, str], MetricValue]) -> list[tuple[str, str]]:
    """The labels of the first and the last turn that were measured."""
    numbers = sorted(int(label[5:]) for name, label in metrics if name == "ttft_ms_p50" and label.startswith("turn="))
    ends = dict.fromkeys((*numbers[:1], *numbers[-1:]))
    return [(f"turn={number}", name) for number, name in zip(ends, ("first", "last"), strict=False)]


def _text(metric: MetricValue, unit: str) -> str:
    value = metric.value
    if value is None:
        return NONE
    if unit == "share":
        return f"{value:.1%}"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
