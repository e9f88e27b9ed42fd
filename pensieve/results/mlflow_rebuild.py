"""The MLflow store made anew from the results database, after it was lost, damaged or could not be written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import or_, select

from pensieve.errors import ResultsError
from pensieve.results.comparison import comparison_table
from pensieve.results.mlflow_log import ensure_store, finish_parent, forget_clients, log_trial, start_parent
from pensieve.results.schema import Sweep, SweepTrial, Trial, sweep_result
from pensieve.results.store import ResultsStore

_PARTS = ("mlflow.db", "mlflow.db-wal", "mlflow.db-shm", "mlartifacts")


def rebuild_mlflow(outputs: Path, store: ResultsStore, say: Callable[[str], None]) -> int:
    """Every sweep as a parent with its trials as children, and every trial of no sweep by itself; returns the runs made.

    What was there is moved to mlflow-before-<time>, never deleted. Trials that run are left to their own process.
    Raises ResultsError where MLflow still cannot be written.
    """
    store.interrupt_dead()
    kept = _move_away(outputs)
    if kept is not None:
        say(f"The MLflow store that was there is now in {kept}; delete it when you no longer need it.")
    forget_clients()
    if ensure_store(outputs) is None:
        raise ResultsError(f"MLflow cannot be written in {outputs}; the warning above says why. Mend it and run again.")
    with store.database.reading() as connection:
        sweeps = connection.execute(select(Sweep.id, Sweep.name, Sweep.status).order_by(Sweep.id)).all()
        here = (sweep_result.c.sweep_id == SweepTrial.sweep_id) & (sweep_result.c.job == SweepTrial.job)
        links = connection.execute(  # a job's last attempt, and what it shows where that is another
            select(SweepTrial.sweep_id, Trial.id.label("trial_id"), SweepTrial.reused, Trial.status)
            .outerjoin(sweep_result, here)
            .join(Trial, or_(Trial.id == SweepTrial.trial_id, Trial.id == sweep_result.c.trial_id))
            .order_by(SweepTrial.sweep_id, SweepTrial.reused, SweepTrial.job, Trial.id)
        ).all()
        linked = {link.trial_id for link in links}
        alone = connection.execute(
            select(Trial.id, Trial.experiment).where(Trial.status != "running").order_by(Trial.id)
        ).all()
    made = 0
    for sweep in sweeps:
        parent = start_parent(outputs, store, sweep.id, sweep.name)
        if parent is None:
            raise ResultsError(f"Sweep {sweep.id} cannot be written to MLflow; the warning above says why.")
        made += 1
        serving = {one.trial_id: one.reused for one in links if one.sweep_id == sweep.id and one.status != "running"}
        for trial_id, reused in serving.items():
            made += log_trial(outputs, store, trial_id, sweep.name, parent, reused, fresh=True) is not None
        if sweep.status != "running":
            finish_parent(outputs, store, sweep.id, comparison_table(store, sweep.id).text(), sweep.status)
        say(f"Sweep {sweep.id} is in MLflow again.")
    for trial in alone:
        if trial.id not in linked:
            made += log_trial(outputs, store, trial.id, trial.experiment or "pensieve", fresh=True) is not None
    return made


def _move_away(outputs: Path) -> Path | None:
    found = [outputs / part for part in _PARTS if (outputs / part).exists()]
    if not found:
        return None
    kept = outputs / f"mlflow-before-{datetime.now(UTC):%Y-%m-%d-%H-%M-%S-%f}"
    try:
        kept.mkdir()
        for path in found:
            path.rename(kept / path.name)
    except OSError as error:
        raise ResultsError(
            f"The MLflow store in {outputs} cannot be moved away ({error.strerror or error}); "
            "end what uses it (make ui), and check that this user may write there."
        ) from None
    return kept
