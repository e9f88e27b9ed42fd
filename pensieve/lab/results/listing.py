"""Sweeps and trials as lines of text: quick for ten thousand of them, and easy to cut with other tools."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Row, and_, select

from pensieve.lab.results.schema import MetricRow, Sweep, SweepTrial, Trial
from pensieve.lab.results.store import ResultsStore

NONE = "-"
SHOWN = ("ttft_ms_p50", "throughput_output_tok_s", "gpu_hit_rate")
TITLES = ("trial", "status", "baseline", "model", "cache", "eviction", "workload", "hardware", "seed", "started")


def list_sweeps(store: ResultsStore, limit: int | None = None) -> Iterable[str]:
    """A line for each sweep, the newest first."""
    query = select(Sweep).order_by(Sweep.started_at.desc(), Sweep.id.desc()).limit(limit)
    with store.database.reading() as connection:
        rows = connection.execute(query).all()
    titles = ("sweep", "status", "trials", "started", "overrides")
    cells = [(str(r.id), r.status, str(r.n_expected), _moment(r.started_at), _overrides(r.overrides)) for r in rows]
    return _columns(titles, cells)


def list_trials(
    store: ResultsStore, sweep_id: int | None = None, status: str | None = None, limit: int | None = None
) -> Iterable[str]:
    """A line for each trial, the newest first, with the metrics that tell trials apart. limit None: all trials."""
    columns = [Trial.id, *(getattr(Trial, name) for name in TITLES[1:-1]), Trial.started_at]
    query = select(*columns).order_by(Trial.id.desc()).limit(limit)
    if sweep_id is not None:
        query = query.join(SweepTrial, and_(SweepTrial.trial_id == Trial.id, SweepTrial.sweep_id == sweep_id))
    if status is not None:
        query = query.where(Trial.status == status)
    with store.database.reading() as connection:
        trials = connection.execute(query).all()
        chosen = select(MetricRow.trial_id, MetricRow.name, MetricRow.value).where(
            MetricRow.name.in_(SHOWN), MetricRow.label == ""
        )
        if trials:
            chosen = chosen.where(MetricRow.trial_id.between(trials[-1].id, trials[0].id))
        values = {(row.trial_id, row.name): row.value for row in connection.execute(chosen)} if trials else {}
    cells = [_trial_cells(row, values) for row in trials]
    return _columns((*TITLES, *SHOWN), cells)


def show_trial(store: ResultsStore, trial_id: int) -> Iterable[str]:
    """All that is recorded of one trial but its turns and samples. Raises ResultsError where there is no such trial."""
    trial = store.trial(trial_id)
    for name in (c.name for c in Trial.__table__.columns):
        value = getattr(trial, name)
        if value is None or name in ("traceback", "config", "environment", "engine", "flags"):
            continue
        yield f"{name:<20} {value}"
    for name in ("flags", "engine", "environment", "config"):
        yield f"{name}:"
        told = {key: value for key, value in (getattr(trial, name) or {}).items() if key != "code"}  # a line a file
        yield from ("  " + line for line in json.dumps(told, indent=1, default=str).splitlines())
    yield "metrics:"
    metrics = [
        (f"{m.name}[{m.label}]" if m.label else m.name, _number(m.value), m.unit, str(m.n if m.n is not None else NONE))
        for m in sorted(store.metrics_of(trial_id), key=lambda m: (m.label, m.name))
    ]
    yield from ("  " + line for line in _columns(("name", "value", "unit", "n"), metrics))
    for artifact in store.artifacts_of(trial_id):
        yield f"artifact {artifact.kind}: {artifact.path}{'' if artifact.path.exists() else ' (gone)'}"
    if trial.traceback:
        yield trial.traceback.rstrip()


def _trial_cells(row: Row[Any], values: dict[tuple[int, str], float | None]) -> tuple[str, ...]:
    texts, started = tuple(row)[:-1], row.started_at
    shown = (_number(values.get((row.id, name))) for name in SHOWN)
    return (*(NONE if text is None else str(text) for text in texts), _moment(started), *shown)


def _columns(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, without rich: its tables take seconds for ten thousand rows."""
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    form = "  ".join(f"{{:<{width}}}" for width in widths)
    return [form.format(*row).rstrip() for row in (titles, *cells)]


def _overrides(overrides: dict[str, Any]) -> str:
    texts = {key: ",".join(value) if isinstance(value, list) else value for key, value in overrides.items()}
    return " ".join(f"{key}={text}" for key, text in texts.items()) or NONE


def _moment(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.4g}"
