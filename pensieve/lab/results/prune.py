"""Deletes attempts that nothing reads any more, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import aliased

from pensieve.lab.results.schema import SweepTrial, Trial, current_trial, sweep_result
from pensieve.lab.results.store import ResultsStore


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
        store.database.compact()
    return freed


def _files(store: ResultsStore, trial_id: int) -> list[Path]:
    """The attempt's files inside the outputs folder. Folders are left alone, since several attempts may share one."""
    root = store.root
    paths = [artifact.path for artifact in store.artifacts_of(trial_id)]
    return [path for path in paths if path.is_file() and root is not None and path.is_relative_to(root)]
