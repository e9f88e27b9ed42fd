"""Sweeps and trials as lines of text: quick for ten thousand of them, and easy to cut with other tools. Also which attempts
nothing reads any more, to delete them with their files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Row, and_, delete, func, select, update
from sqlalchemy.orm import aliased

from pensieve.lab.results.schema import MetricRow, Sweep, SweepTrial, Trial, current_trial, sweep_result
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


# What nothing reads any more


@dataclass(frozen=True, slots=True)
class Pruned:
    """An attempt to delete. successor: the newest completed attempt of the same trial, None if none ever completed."""

    trial_id: int
    status: str
    successor: int | None
    files: Sequence[Path]


def prunable(store: ResultsStore, failed: bool = False) -> list[Pruned]:
    """Attempts that ended, are replaced by a completed attempt of the same fingerprint, and are shown by no sweep.

    failed: also the failed and interrupted attempts of trials that never completed; their sweeps lose these jobs.
    Trials of processes that died are marked interrupted first.
    """
    store.interrupt_dead()
    current = aliased(current_trial)
    with store.database.reading() as connection:
        shown = set(connection.scalars(select(sweep_result.c.trial_id)))
        rows = connection.execute(
            select(Trial.id, Trial.status, current.c.id.label("successor"))
            .outerjoin(current, current.c.fingerprint == Trial.fingerprint)
            .where(Trial.status != "running")
            .order_by(Trial.id)
        ).all()
    return [
        Pruned(row.id, row.status, row.successor, _files(store, row.id))
        for row in rows
        if row.successor != row.id and row.id not in shown and (row.successor is not None or failed)
    ]


def prune(store: ResultsStore, chosen: Sequence[Pruned]) -> int:
    """Delete them, rows first; returns the bytes of the deleted files. Files outside the outputs folder stay.

    A job whose last attempt is deleted points to the trial that it shows, else to the successor, which it would reuse.
    """
    freed = 0
    for one in chosen:
        with store.database.writing() as connection:
            if one.successor is not None:
                here = (sweep_result.c.sweep_id == SweepTrial.sweep_id) & (sweep_result.c.job == SweepTrial.job)
                shown = select(sweep_result.c.trial_id).where(here).scalar_subquery()
                left = func.coalesce(shown, one.successor)
                connection.execute(update(SweepTrial).where(SweepTrial.trial_id == one.trial_id).values(trial_id=left))
            connection.execute(delete(Trial).where(Trial.id == one.trial_id, Trial.status != "running"))
        for path in one.files:
            size = path.stat().st_size
            path.unlink()
            freed += size
    if chosen and store.database.sqlite:
        store.database.alone("VACUUM")
    return freed


def _files(store: ResultsStore, trial_id: int) -> list[Path]:
    """The attempt's files inside the outputs folder. Folders are left alone, since several attempts may share one."""
    root = store.root
    paths = [artifact.path for artifact in store.artifacts_of(trial_id)]
    return [path for path in paths if path.is_file() and root is not None and path.is_relative_to(root)]
