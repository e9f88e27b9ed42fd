"""Sweeps and trials as MLflow runs, copied from the results database with MLflow's own client.

A run is found again by its tags, and one that was begun and not ended is filled: each copy may be made twice, after a trial,
after its sweep, and by `pensieve mlflow sync`. mlflow is imported when something is logged: the import takes a second. A
failure of MLflow never fails a trial: it is one sentence in the log, and the database is complete without the copy.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from sqlalchemy import select, union

from pensieve.errors import ResultsError
from pensieve.hub import user_cache
from pensieve.lab.metrics import Slo
from pensieve.lab.results.frame import axis_value, flat, swept_axes
from pensieve.lab.results.identity import counts_for_sweep
from pensieve.lab.results.schema import Sweep, SweepTrial, Trial, sweep_result
from pensieve.lab.results.store import ResultsStore, figures_folder, report_file, slo_of

if TYPE_CHECKING:
    from pensieve.lab.results.sweep_table import SweepTable

DATABASE_NAME = "mlflow.db"
URL_ENV = "PENSIEVE_MLFLOW_URL"
TRIAL_TAG, FINGERPRINT_TAG, PARENT_TAG = "pensieve.trial_id", "fingerprint", "mlflow.parentRunId"
TTFT_BY_TURN = "ttft_ms_by_turn"

_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # of a server, two lines a run
    # With a server that does not answer; MLflow's own defaults try for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
_COLUMNS = (
    "baseline", "weights", "dtype", "device", "device_count", "simulated", "gpu_tokens", "cpu_tokens",
    "working_set_tokens",
)  # fmt: skip
_RUN_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_PARAM_LENGTH, _NAME_LENGTH, _TAG_LENGTH = 6000, 250, 5000  # MLflow's limits; its client keeps those of a call


# Where MLflow keeps runs


def remote_url() -> str | None:
    """The tracking URI of a server of your own, from the environment so that it is never saved; None: the local store.

    Raises ResultsError for an address without a scheme, which MLflow takes for a folder."""
    url = os.environ.get(URL_ENV) or None
    if url is not None and "://" not in url and not url.startswith("databricks"):
        raise ResultsError(f"{URL_ENV}={url} has no scheme; write {URL_ENV}=http://{url}, or unset it.")
    return url


def client_of(outputs: Path) -> Any:
    """MLflow's client of the store in this folder, or of the server; a local store is made where it is missing."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # MLflow logs a traceback of its database's error before it raises it, which we tell in a sentence. A level would not
    # last: who configures logging sets it back.
    logging.getLogger("mlflow.store.db.utils").filters = [lambda _: False]
    database, remote = outputs.absolute() / DATABASE_NAME, remote_url()
    with _lock(outputs):  # its schema is made by the client or its first question, and two at once would fail
        if remote is None and not database.exists():
            with suppress(OSError, RuntimeError):  # a cache that cannot be written: MLflow makes one here
                _copy_empty(database)
        # The timeout lets parallel trials wait for each other.
        client = MlflowClient(tracking_uri=remote or f"sqlite:///{database}?timeout=30")
        client.search_experiments(max_results=1)
    return client


def _copy_empty(database: Path) -> None:
    """MLflow makes an empty one once for each of its versions: its fifty migrations take seconds. Each gets its name when it
    is whole: MLflow cannot repair a schema that a dead process left incomplete."""
    import mlflow

    empty = user_cache() / f"mlflow-{mlflow.__version__}.db"
    if not empty.exists():
        empty.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=".mlflow-new-", dir=empty.parent, ignore_cleanup_errors=True) as folder:
            mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder}/made.db").search_experiments(max_results=1)
            Path(folder, "made.db").replace(empty)
    shutil.copyfile(empty, database.with_suffix(".new"))
    database.with_suffix(".new").replace(database)


def _lock(outputs: Path) -> FileLock:
    """Hold it while runs are looked for and made, so that two processes do not make one twice."""
    return FileLock(outputs / f"{DATABASE_NAME}.lock", timeout=120)


@contextmanager
def _or_none() -> Iterator[None]:
    """Log one sentence where MLflow, or the disk, fails; what this decorates then returns None."""
    try:
        yield
    except ImportError:
        say_not_logged("MLflow is not installed; `pip install mlflow` changes that")
    except Exception as error:
        say_not_logged(next(iter(str(error).strip().splitlines()), type(error).__name__))


@functools.lru_cache(maxsize=8)  # a sweep meets the same full disk at each trial
def say_not_logged(reason: str) -> None:
    logging.getLogger(__name__).warning(
        "Nothing was logged to MLflow (%s); the results database is complete without it.", reason
    )


# Copies of what was recorded


@_or_none()
def copy_sweep(outputs: Path, store: ResultsStore, sweep_id: int, table: SweepTable | None = None) -> int | None:
    """Log a sweep as a parent run, and as its children the trials that have ended: what each job shows, and its last
    attempt. A sweep that has ended closes its run with what it found. Returns how many trials were missing.

    table: of the sweep, where the caller has it.
    """
    from pensieve.lab.results.sweep_table import sweep_table

    client, sweep = client_of(outputs), store.sweep(sweep_id)
    ended = {
        trial.id: (trial, job.reused)
        for job in store.trials_of_sweep(sweep_id)
        for trial in (job.trial, job.last)
        if trial is not None and trial.status != "running"
    }
    with _lock(outputs):
        experiment = _experiment(client, outputs, sweep.name)
        parent = _parent(client, store, experiment, sweep)
        runs = _runs(client, experiment, {PARENT_TAG: parent})
        missing = sum(
            _copied(
                client,
                store,
                experiment,
                trial,
                runs,
                sweep,
                {PARENT_TAG: parent} | ({"reused": "true"} if reused else {}),
            )
            for trial, reused in ended.values()
        )
        if sweep.status != "running":
            found = table or sweep_table(store, sweep_id)
            client.set_tag(parent, "mlflow.note.content", "\n\n".join(found.answers)[:_TAG_LENGTH])
            client.log_text(parent, found.text(), "comparison.txt")
            client.set_terminated(parent, _RUN_STATUS[sweep.status], _milliseconds(sweep.finished_at))
    return missing


@_or_none()
def copy_trial(outputs: Path, store: ResultsStore, trial_id: int) -> int | None:
    """Log a trial of no sweep that has ended; returns 1 if it was missing, else 0."""
    client, trial = client_of(outputs), store.trial(trial_id)
    with _lock(outputs):
        experiment = _experiment(client, outputs, trial.experiment or "pensieve")
        runs = _runs(client, experiment, {FINGERPRINT_TAG: trial.fingerprint})
        alone = [run for run in runs if PARENT_TAG not in run.data.tags]
        return int(_copied(client, store, experiment, trial, alone))


@_or_none()
def log_drawn(outputs: Path, store: ResultsStore, sweep_id: int) -> str | None:
    """Log the sweep's figures and report, where they have been drawn, as artifacts of its run; returns the run's id, None if
    there is none."""
    run_id = store.sweep(sweep_id).mlflow_run_id
    figures, report = figures_folder(outputs, sweep_id), report_file(outputs, sweep_id)
    if run_id is not None and figures.is_dir():
        client_of(outputs).log_artifacts(run_id, str(figures), "figures")
    if run_id is not None and report.is_file():
        client_of(outputs).log_text(run_id, report.read_text(encoding="utf-8"), "report.html")
    return run_id


def sync_mlflow(outputs: Path, store: ResultsStore) -> int:
    """Log what MLflow lacks: every sweep with its trials, and every other trial; returns how many trials were written.
    A store that was moved away is made anew so.

    Raises ResultsError where MLflow lacks some after all others were written.
    """
    store.interrupt_dead()
    of_sweeps = union(select(SweepTrial.trial_id), select(sweep_result.c.trial_id))
    others = select(Trial.id).where(Trial.status != "running", Trial.id.not_in(of_sweeps))
    with store.database.reading() as connection:
        sweeps = connection.scalars(select(Sweep.id).order_by(Sweep.id)).all()
        alone = connection.scalars(others.order_by(Trial.id)).all()
    written = {f"sweep {one}": copy_sweep(outputs, store, one) for one in sweeps}
    for one in sweeps:
        log_drawn(outputs, store, one)
    written |= {f"trial {one}": copy_trial(outputs, store, one) for one in alone}
    count, failed = sum(one or 0 for one in written.values()), [name for name, one in written.items() if one is None]
    if failed:
        raise ResultsError(
            f"{count} trials were written to MLflow, but not {', '.join(failed)}. Mend it and run the same command again."
        )
    return count


def _experiment(client: Any, outputs: Path, name: str) -> str:
    if (found := client.get_experiment_by_name(name)) is not None:
        return str(found.experiment_id)
    location = None if remote_url() else (outputs.absolute() / "mlartifacts").as_uri()  # a server decides itself
    kind = {"mlflow.experimentKind": "custom_model_development"}  # else its page begins with an empty page of traces
    return str(client.create_experiment(name, artifact_location=location, tags=kind))


def _runs(client: Any, experiment: str, tags: Mapping[str, str]) -> Sequence[Any]:
    """The runs with these tags. The ids in the database are no help: a process may die before it writes one, and the store
    may be another one since."""
    asked = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
    found: Sequence[Any] = client.search_runs([experiment], filter_string=asked, max_results=50_000)
    return found


def _parent(client: Any, store: ResultsStore, experiment: str, sweep: Sweep) -> str:
    """The sweep's run, which runs on where the sweep was taken up again; its id is kept in the sweep's row."""
    own = {"pensieve.sweep_id": str(sweep.id), "pensieve.sweep_key": sweep.key}
    found = _runs(client, experiment, own)
    if found:
        run_id = str(found[0].info.run_id)
        client.update_run(run_id, status="RUNNING")
    else:
        what = f"{sweep.experiment or sweep.name}: {' × '.join(_axes(sweep))}".rstrip(": ")
        name = f"{what} {sweep.started_at.astimezone():%Y-%m-%d %H:%M}"
        tags = {**own, **_source(sweep.command, sweep.git_commit)}
        run_id = str(client.create_run(experiment, _milliseconds(sweep.started_at), tags, name).info.run_id)
        # MLflow never changes a parameter: overrides that may differ when the sweep goes on are in the command's tag alone.
        texts = {key: ",".join(one) if isinstance(one, list) else one for key, one in sweep.overrides.items()}
        client.log_batch(run_id, params=_params({key: text for key, text in texts.items() if counts_for_sweep(key)}))
    store.set_sweep(sweep.id, mlflow_run_id=run_id)
    return run_id


def _copied(
    client: Any, store: ResultsStore, experiment: str, trial: Trial, runs: Sequence[Any], sweep: Sweep | None = None,
    tags: Mapping[str, str] | None = None,
) -> bool:  # fmt: skip
    """Whether the trial was missing among these runs; it is there now. Its row notes the first run that it has."""
    own = {TRIAL_TAG: str(trial.id), FINGERPRINT_TAG: trial.fingerprint}
    run = next((one for one in runs if own.items() <= one.data.tags.items()), None)
    missing = run is None or run.info.status == "RUNNING"
    if run is None:
        axes = [axis for axis in (_axes(sweep) if sweep else ()) if axis != "baseline"]
        at = [f"{axis}={axis_value(trial, axis)}" for axis in axes] + [f"repeat={trial.repeat}"] * (trial.repeat > 0)
        source = _source(sweep.command if sweep else trial.environment.get("command"), trial.git_commit)
        why = {"error": trial.error[:_TAG_LENGTH]} if trial.error else {}
        name = " ".join([trial.baseline, f"seed={trial.seed}", *at])
        told = {**own, **(tags or {}), **source, **why}
        run = client.create_run(experiment, _milliseconds(trial.started_at), told, name)
    if missing:
        _fill_run(client, run.info.run_id, store, trial, Slo.of_sweep(sweep.overrides) if sweep else slo_of(trial))
    if trial.mlflow_run_id is None or "reused" not in (tags or {}):
        store.set_trial(trial.id, mlflow_run_id=run.info.run_id)
    return missing


def _fill_run(client: Any, run_id: str, store: ResultsStore, trial: Trial, slo: Slo) -> None:
    """Output tokens stay where they are: they would double what the disk holds."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from mlflow.entities import Metric

    asked = [(name, text) for name, text in flat(trial.config) if not re.search(r"(^|\.)_", name) and text != "none"]
    fields = {name.removesuffix(".name"): text for name, text in asked}  # without what tells Hydra what to build
    fields |= {f"slo.{name}": most for name, most in asdict(slo).items()}
    fields |= {name: getattr(trial, name) for name in _COLUMNS}
    at_ms = _milliseconds(trial.finished_at or trial.started_at)
    metrics = []
    for one in (one for one in store.metrics_of(trial.id, slo) if one.value is not None):
        metrics.append(Metric(_allowed(f"{one.name}/{one.label}" if one.label else one.name), one.value, at_ms, 0))
        if one.name == "ttft_ms_p50" and one.label.startswith("turn="):
            metrics.append(Metric(TTFT_BY_TURN, one.value, at_ms, int(one.label.removeprefix("turn="))))
    client.log_batch(run_id, metrics, _params(fields))
    client.log_dict(run_id, trial.config, "config.json")
    if turns := [dict(turn._mapping) for turn in store.turns_of(trial.id)]:
        with tempfile.TemporaryDirectory() as folder:
            pq.write_table(pa.Table.from_pylist(turns), Path(folder, "turns.parquet"))
            client.log_artifacts(run_id, folder)
    client.set_terminated(run_id, _RUN_STATUS[trial.status], _milliseconds(trial.finished_at))


def _params(fields: Mapping[str, Any]) -> list[Any]:
    """Without those that have no value."""
    from mlflow.entities import Param

    return [Param(_allowed(name), str(one)[:_PARAM_LENGTH]) for name, one in sorted(fields.items()) if one is not None]


def _allowed(text: str) -> str:
    return re.sub(r"[^\w./ -]", "_", text)[:_NAME_LENGTH]


def _milliseconds(moment: datetime | None) -> int | None:
    return int(moment.timestamp() * 1000) if moment else None


def _axes(sweep: Sweep) -> list[str]:
    return [axis for axis in swept_axes(sweep.overrides) if axis not in ("seed", "repeat")]


def _source(command: str | None, commit: str | None) -> dict[str, str]:
    """The command and the checkout's commit, under the names that the UI shows."""
    found = {"mlflow.source.name": (command or "")[:_TAG_LENGTH], "mlflow.source.git.commit": commit or ""}
    return {name: text for name, text in found.items() if text}
