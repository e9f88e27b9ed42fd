"""Sweeps and trials as MLflow runs, copied from the results database with MLflow's own client.

A run is found again by its tags, and one that was begun and not ended is filled: each copy may be made twice, after a trial,
after its sweep, and by `pensieve mlflow sync`. mlflow is imported when something is logged: the import takes a second. A
failure of MLflow never fails a trial: it is one sentence in the log, and the database is complete without the copy.
"""

import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from sqlalchemy import select, union

from pensieve.errors import ResultsError
from pensieve.lab.metrics import Slo
from pensieve.lab.results.frame import axis_value, flat, swept_axes
from pensieve.lab.results.schema import Sweep, SweepTrial, Trial, sweep_result
from pensieve.lab.results.store import ResultsStore, figures_folder, report_file, slo_of
from pensieve.lab.results.sweep_table import sweep_table

DATABASE_NAME = "mlflow.db"
URL_ENV = "PENSIEVE_MLFLOW_URL"
"""The variable that names a server of your own: the URL is never saved."""

TRIAL_TAG, FINGERPRINT_TAG, PARENT_TAG = "pensieve.trial_id", "fingerprint", "mlflow.parentRunId"
TTFT_BY_TURN = "ttft_ms_by_turn"
_COLUMNS = ("baseline", "weights", "dtype", "device", "simulated", "gpu_tokens", "cpu_tokens", "working_set_tokens")
_RUN_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # of a server, two lines a run
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # MLflow tries for minutes where a server does not answer
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


def import_mlflow() -> None:
    """Import MLflow as quietly as it can be; no store is looked at."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401


def client_of(outputs: Path) -> Any:
    """MLflow's client of the server, else of the store in this folder, which it makes where it is missing."""
    import_mlflow()
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel("ERROR")
    # MLflow logs its database's traceback before it raises it. Whoever configures logging would set a level back.
    logging.getLogger("mlflow.store.db.utils").filters = [lambda _: False]
    local = f"sqlite:///{outputs.absolute() / DATABASE_NAME}?timeout=30"  # parallel trials wait for each other
    return MlflowClient(tracking_uri=os.environ.get(URL_ENV) or local)


@contextmanager
def _told() -> Iterator[None]:
    """Log one sentence where MLflow, or the disk, fails; what this decorates then returns None."""
    try:
        yield
    except Exception as error:
        say_not_logged(str(error).strip().partition("\n")[0] or type(error).__name__)


@cache  # a sweep meets the same full disk at each trial
def say_not_logged(reason: str) -> None:
    logging.getLogger(__name__).warning(
        "Nothing was logged to MLflow (%s); the results database is complete without it.", reason
    )


@_told()
def copy_sweep(
    outputs: Path, store: ResultsStore, sweep_id: int, table: str | None = None, figures: bool = True
) -> int | None:
    """Log a sweep as a parent run with its figures and report, and as its children the trials that have ended: what each job
    shows, and its last attempt. A sweep that has ended closes its run with its table. Returns how many trials were missing.

    table: as text, where the caller has it. figures: False: they are being drawn, and are copied later.
    """
    sweep, jobs = store.sweep(sweep_id), store.trials_of_sweep(sweep_id)
    trials = {trial.id: (trial, job.reused) for job in jobs for trial in (job.trial, job.last) if trial is not None}
    axes = [axis for axis in swept_axes(sweep.overrides) if axis not in ("seed", "repeat")]
    name = f"{sweep.experiment or sweep.name}: {' × '.join(axes)}".rstrip(": ")
    own = {"pensieve.sweep_id": str(sweep.id), "pensieve.sweep_key": sweep.key}
    with _experiment(outputs, sweep.name) as (client, experiment):
        at = f"{sweep.started_at.astimezone():%Y-%m-%d %H:%M}"
        parent, _ = _run(client, experiment, sweep, f"{name} {at}", own, {"mlflow.source.name": sweep.command})
        client.update_run(parent, status="RUNNING")  # it may have been taken up again
        store.set_sweep(sweep.id, mlflow_run_id=parent)
        missing = sum(_copied(client, experiment, store, *each, sweep, parent) for each in trials.values())
        if figures and (drawn := figures_folder(outputs, sweep_id)).is_dir():
            client.log_artifacts(parent, str(drawn), "figures")
        if (report := report_file(outputs, sweep_id)).is_file():
            client.log_text(parent, report.read_text(encoding="utf-8"), "report.html")
        if sweep.status != "running":
            client.log_text(parent, table or sweep_table(store, sweep_id).text(), "comparison.txt")
            client.set_terminated(parent, _RUN_STATUS[sweep.status], _milliseconds(sweep.finished_at))
    return missing


@_told()
def copy_trial(outputs: Path, store: ResultsStore, trial_id: int) -> int | None:
    """Log a trial of no sweep that has ended; returns 1 if it was missing, else 0."""
    trial = store.trial(trial_id)
    with _experiment(outputs, trial.experiment or "pensieve") as (client, experiment):
        return int(_copied(client, experiment, store, trial))


def sync_mlflow(outputs: Path, store: ResultsStore) -> int:
    """Log what MLflow lacks, all of it where its store was moved away: every sweep with its trials, and every other trial.
    Returns how many trials were written. Raises ResultsError where MLflow lacks some after all others were written."""
    of_sweeps = union(select(SweepTrial.trial_id), select(sweep_result.c.trial_id))
    with store.database.reading() as connection:
        sweeps = connection.scalars(select(Sweep.id).order_by(Sweep.id)).all()
        alone = connection.scalars(select(Trial.id).where(Trial.id.not_in(of_sweeps)).order_by(Trial.id)).all()
    written = {f"sweep {one}": copy_sweep(outputs, store, one) for one in sweeps}
    written |= {f"trial {one}": copy_trial(outputs, store, one) for one in alone}
    count = sum(one or 0 for one in written.values())
    if failed := [name for name, one in written.items() if one is None]:
        raise ResultsError(
            f"{count} trials were written to MLflow, but not {', '.join(failed)}. Mend it and run the same command again."
        )
    return count


@contextmanager
def _experiment(outputs: Path, name: str) -> Iterator[tuple[Any, str]]:
    """Client and id, locked while runs are looked for and made: two processes do not make one, or the store, twice."""
    with FileLock(outputs / f"{DATABASE_NAME}.lock", timeout=120):
        client = client_of(outputs)
        if (found := client.get_experiment_by_name(name)) is not None:
            yield client, found.experiment_id
            return
        location = None if os.environ.get(URL_ENV) else (outputs.absolute() / "mlartifacts").as_uri()
        kind = {"mlflow.experimentKind": "custom_model_development"}  # else it begins with an empty page of traces
        yield client, client.create_experiment(name, artifact_location=location, tags=kind)


def _run(
    client: Any, experiment: str, of: Sweep | Trial, name: str, tags: Mapping[str, str], more: Mapping[str, str | None]
) -> tuple[str, bool]:
    """The id of the run with these tags, and whether it has ended; it is made where it is missing. The ids in the database
    are no help: a process may die before it writes one, and the store may be another one since. more: further tags."""
    asked = " and ".join(f"tags.`{key}` = '{text}'" for key, text in tags.items())
    if found := client.search_runs([experiment], filter_string=asked, max_results=1):
        return str(found[0].info.run_id), found[0].info.status != "RUNNING"
    given = {key: text for key, text in {**tags, **more, "mlflow.source.git.commit": of.git_commit}.items() if text}
    return str(client.create_run(experiment, _milliseconds(of.started_at), given, name).info.run_id), False


def _copied(
    client: Any, experiment: str, store: ResultsStore, trial: Trial, reused: bool = False, sweep: Sweep | None = None,
    parent: str | None = None,
) -> bool:  # fmt: skip
    """Whether the trial has ended and was missing, below the sweep's run if that is given; it is there now. Its row notes the
    run of the sweep that ran it."""
    if trial.status == "running":
        return False
    axes = dict.fromkeys(("seed", *swept_axes(sweep.overrides if sweep else {})))
    at = (f"{axis}={axis_value(trial, axis)}" for axis in axes if axis != "baseline")
    own = {TRIAL_TAG: str(trial.id), FINGERPRINT_TAG: trial.fingerprint, **({PARENT_TAG: parent} if parent else {})}
    command = sweep.command if sweep else trial.environment.get("command")
    more = {"mlflow.source.name": command, "error": trial.error, "reused": "true" if reused else None}
    run_id, ended = _run(client, experiment, trial, " ".join([trial.baseline, *at]), own, more)
    if not ended:
        _fill_run(client, run_id, store, trial, Slo.of_sweep(sweep.overrides) if sweep else slo_of(trial))
    if trial.mlflow_run_id is None or not reused:
        store.set_trial(trial.id, mlflow_run_id=run_id)
    return not ended


def _fill_run(client: Any, run_id: str, store: ResultsStore, trial: Trial, slo: Slo) -> None:
    """Output tokens stay where they are: they would double what the disk holds."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from mlflow.entities import Metric, Param

    config = {name.removesuffix(".name"): text for name, text in flat(trial.config) if not re.search(r"(^|\.)_", name)}
    columns = {name: getattr(trial, name) for name in _COLUMNS}
    params = {**config, **columns, **{f"slo.{name}": most for name, most in asdict(slo).items()}}
    at_ms = _milliseconds(trial.finished_at or trial.started_at)
    known = [(one, one.value) for one in store.metrics_of(trial.id, slo) if one.value is not None]
    metrics = [Metric(_allowed(f"{one.name}/{one.label}".rstrip("/")), value, at_ms, 0) for one, value in known]
    metrics += [
        Metric(TTFT_BY_TURN, value, at_ms, int(one.label.removeprefix("turn=")))
        for one, value in known if one.name == "ttft_ms_p50" and one.label.startswith("turn=")
    ]  # fmt: skip
    told = [Param(_allowed(name), str(one)) for name, one in params.items() if one not in (None, "none")]
    client.log_batch(run_id, metrics, told)
    client.log_dict(run_id, trial.config, "config.json")
    if turns := [dict(turn._mapping) for turn in store.turns_of(trial.id)]:
        with tempfile.TemporaryDirectory() as folder:
            pq.write_table(pa.Table.from_pylist(turns), Path(folder, "turns.parquet"))
            client.log_artifacts(run_id, folder)
    client.set_terminated(run_id, _RUN_STATUS[trial.status], _milliseconds(trial.finished_at))


def _allowed(text: str) -> str:
    return re.sub(r"[^\w./ -]", "_", text)


def _milliseconds(moment: datetime | None) -> int | None:
    return int(moment.timestamp() * 1000) if moment else None
