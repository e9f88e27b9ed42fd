"""Sweeps and trials as MLflow runs, copied from the results database, from which the MLflow store can be rebuilt.

mlflow is imported here alone, and only when something is logged: the import takes seconds. A failure of MLflow never fails
a trial: the functions log one sentence and return None.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from filelock import FileLock
from sqlalchemy import Row, or_, select
from sqlalchemy.exc import SQLAlchemyError

from pensieve.errors import ResultsError
from pensieve.results.fields import leaves
from pensieve.results.frame import counts
from pensieve.results.identity import counts_for_sweep
from pensieve.results.schema import Sweep, SweepTrial, Trial, sweep_result
from pensieve.results.store import ResultsStore
from pensieve.results.sweep_table import sweep_table
from pensieve.statistics import median

P = ParamSpec("P")
T = TypeVar("T")

DATABASE_NAME, NEW_PREFIX = "mlflow.db", ".mlflow-new-"
LOCK_TIMEOUT_S = 120
PARAMS_A_BATCH, METRICS_A_BATCH = 100, 1000  # and no more than the latter of both together
PARAM_LENGTH, NAME_LENGTH, TAG_LENGTH = 6000, 250, 5000
TRIAL_TAG, SWEEP_TAG, KEY_TAG = "pensieve.trial_id", "pensieve.sweep_id", "pensieve.sweep_key"
PARENT_TAG, FINGERPRINT_TAG, SUPERSEDED_TAG = "mlflow.parentRunId", "fingerprint", "superseded"
TTFT_BY_TURN = "ttft_ms_by_turn"
_COLUMNS_AS_PARAMS = (
    "model", "baseline", "eviction", "scheduler", "cache", "workload", "hardware", "seed", "repeat", "weights", "dtype",
    "device", "device_count", "gpu_tokens", "cpu_tokens", "working_set_tokens",
)  # fmt: skip
_STORE_FILES = ("mlflow.db", "mlflow.db-wal", "mlflow.db-shm", "mlartifacts")
_RUN_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}

_log = logging.getLogger(__name__)


def mlflow_url(outputs: Path) -> str:
    """The tracking URI of the local store. The timeout lets parallel trials wait for each other."""
    return f"sqlite:///{outputs.absolute() / DATABASE_NAME}?timeout=30"


def _or_none(function: Callable[P, T | None]) -> Callable[P, T | None]:
    """Log one sentence and return None where MLflow or its disk raises."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except ImportError:
            _say_missing()
        except ResultsError:
            raise
        except Exception as error:
            if not isinstance(error, OSError | SQLAlchemyError) and not type(error).__module__.startswith("mlflow"):
                raise
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            _log.warning("Nothing was logged to MLflow (%s); the results database is complete without it.", reason)
        return None

    return guarded


@_or_none
def ensure_store(outputs: Path) -> str | None:
    """Create the MLflow database if it is missing, one process at a time; returns its tracking URI."""
    _client(outputs.absolute())
    return mlflow_url(outputs)


@_or_none
def start_parent(outputs: Path, store: ResultsStore, sweep_id: int, experiment_name: str) -> str | None:
    """The sweep's parent run, running (again); its id is kept in the sweep's row."""
    client = _client(outputs.absolute())
    with _lock(outputs):
        sweep = store.sweep(sweep_id)
        experiment = _experiment(client, outputs, experiment_name)
        run_id = sweep.mlflow_run_id if _exists(client, sweep.mlflow_run_id) else None
        # A process that died after making the run, and before its id was in the sweep's row, left one to take up.
        run_id = run_id or _first(client, experiment, **{SWEEP_TAG: str(sweep.id), KEY_TAG: sweep.key})
        if run_id is None:
            tags = {SWEEP_TAG: str(sweep.id), KEY_TAG: sweep.key}
            made = client.create_run(experiment, _milliseconds(sweep.started_at), tags, sweep.name)
            run_id = str(made.info.run_id)
        if run_id != sweep.mlflow_run_id:  # first of all: without it the sweep's trials would have no parent
            store.set_sweep(sweep_id, mlflow_run_id=run_id)
        _log_command(client, run_id, sweep)
        client.update_run(run_id, status="RUNNING")
        client.set_tag(run_id, "status", "running")
    return run_id


def _log_command(client: Any, run_id: str, sweep: Sweep) -> None:
    """Log the command as a tag and the overrides as parameters. MLflow never changes a parameter, so overrides that may
    differ when the sweep is resumed (trial.timeout_s, tracking) are in the tag alone."""
    if sweep.command:
        client.set_tag(run_id, "pensieve.command", sweep.command[:TAG_LENGTH])
    logged = client.get_run(run_id).data.params
    params = _params({key: text for key, text in leaves(sweep.overrides) if counts_for_sweep(key)})
    _log_batches(client, run_id, [param for param in params if param.key not in logged], [])


@_or_none
def log_trial(
    outputs: Path,
    store: ResultsStore,
    trial_id: int,
    experiment_name: str,
    parent_run_id: str | None = None,
    reused: bool = False,
    fresh: bool = False,
) -> str | None:
    """Log a trial that ended as a run, under the sweep's parent if there is one; returns the run's id.

    A run that exists already is taken, and completed if a process died while logging it. Older attempts at the same trial
    under the same parent are tagged superseded. The run's id is written to the trial's row, except that the row of a
    reused trial keeps its first run. fresh: the store is new, and is not searched for existing runs.
    """
    client = _client(outputs.absolute())
    trial = store.trial(trial_id)
    with _lock(outputs):
        experiment = _experiment(client, outputs, experiment_name)
        run_id, whole = (None, False) if fresh else _run_of(client, experiment, trial, parent_run_id)
        if run_id is None:
            run_id = _new_run(client, experiment, trial, parent_run_id, reused)
    if not whole:
        _fill_run(client, run_id, store, trial)
    if trial.status == "completed" and parent_run_id and not fresh:
        _supersede(client, experiment, trial, parent_run_id, run_id)
    if trial.mlflow_run_id != run_id and (not reused or trial.mlflow_run_id is None):
        store.set_trial(trial_id, mlflow_run_id=run_id)
    return run_id


def _new_run(client: Any, experiment: str, trial: Trial, parent_run_id: str | None, reused: bool) -> str:
    tags = {
        TRIAL_TAG: str(trial.id), "status": trial.status, "simulated": str(trial.simulated).lower(),
        "weights": str(trial.weights), FINGERPRINT_TAG: trial.fingerprint,
    }  # fmt: skip
    if parent_run_id:
        tags[PARENT_TAG] = parent_run_id
    if reused:
        tags["reused"] = "true"
    if trial.git_commit:
        tags["mlflow.source.git.commit"] = trial.git_commit
    if trial.error:
        tags["error"] = trial.error[:TAG_LENGTH]
    if "reproduces" in (trial.flags or {}):
        tags["reproduces"] = str(trial.flags["reproduces"])
    name = f"{trial.baseline} seed={trial.seed}" + (f" repeat={trial.repeat}" if trial.repeat else "")
    return str(client.create_run(experiment, _milliseconds(trial.started_at), tags, name).info.run_id)


def _fill_run(client: Any, run_id: str, store: ResultsStore, trial: Trial) -> None:
    columns = {key: getattr(trial, key) for key in _COLUMNS_AS_PARAMS}
    values = {**dict(leaves(trial.config)), **{k: v for k, v in columns.items() if v is not None}}
    turns = store.turns_of(trial.id)
    _log_batches(client, run_id, _params(values), _metrics(trial, store, turns))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in (("config.json", trial.config), ("environment.json", trial.environment)):
            (folder / file).write_text(json.dumps(content, indent=2, default=str), encoding="utf-8")
        _write_turns(folder / "turns.parquet", turns)
        client.log_artifacts(run_id, name)
    for artifact in store.artifacts_of(trial.id):
        if artifact.kind != "tokens" and artifact.path.is_file():  # tokens would double what the disk holds
            client.log_artifact(run_id, str(artifact.path), artifact.kind)
    client.set_terminated(run_id, _RUN_STATUS[trial.status], _milliseconds(trial.finished_at))


def _supersede(client: Any, experiment: str, trial: Trial, parent_run_id: str, run_id: str) -> None:
    """Tag the runs of older attempts: under one parent the attempt that completed last counts."""
    query = _tagged(**{PARENT_TAG: parent_run_id, FINGERPRINT_TAG: trial.fingerprint})
    for run in client.search_runs([experiment], filter_string=query):
        older = int(run.data.tags[TRIAL_TAG]) < trial.id
        if run.info.run_id != run_id and older and SUPERSEDED_TAG not in run.data.tags:
            client.set_tag(run.info.run_id, SUPERSEDED_TAG, "true")


@_or_none
def finish_parent(outputs: Path, store: ResultsStore, sweep_id: int, table: str, status: str) -> str | None:
    """Close the parent run, with the sweep's table as its artifact; returns its id, None if there is none."""
    sweep = store.sweep(sweep_id)
    run_id, client = sweep.mlflow_run_id, _client(outputs.absolute())
    if run_id is None or not _exists(client, run_id):
        return None
    client.log_text(run_id, table, "comparison.txt")
    client.set_tag(run_id, "status", status)
    client.set_terminated(run_id, _RUN_STATUS[status], _milliseconds(sweep.finished_at))
    return run_id


@_or_none
def log_text_of_sweep(outputs: Path, store: ResultsStore, sweep_id: int, text: str, name: str) -> str | None:
    """Log a text as the artifact `name` of the sweep's parent run; returns the run's id, None if there is none."""
    run_id = store.sweep(sweep_id).mlflow_run_id
    if run_id is None or not _exists(client := _client(outputs.absolute()), run_id):
        return None
    client.log_text(run_id, text, name)
    return run_id


def rebuild_mlflow(outputs: Path, store: ResultsStore, say: Callable[[str], None]) -> int:
    """Log every sweep as a parent with its trials as children, and every other trial by itself; returns the number of runs.

    An existing store is moved to mlflow-before-<time>, never deleted. Running trials are left to their own process.
    Raises ResultsError where MLflow still cannot be written.
    """
    store.interrupt_dead()
    kept = _move_away(outputs)
    if kept is not None:
        say(f"The MLflow store that was there is now in {kept}; delete it when you no longer need it.")
    _client.cache_clear()  # a client of this process would write to the files where they are now
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
            finish_parent(outputs, store, sweep.id, sweep_table(store, sweep.id).text(), sweep.status)
        say(f"Sweep {sweep.id} is in MLflow again.")
    for trial in alone:
        if trial.id not in linked:
            made += log_trial(outputs, store, trial.id, trial.experiment or "pensieve", fresh=True) is not None
    return made


@functools.lru_cache(maxsize=4)
def _client(outputs: Path) -> Any:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # the commit comes from our own environment record
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with _lock(outputs):  # its schema is made by the client or its first question, and two at once would fail
        if not (outputs / DATABASE_NAME).exists():
            _create_database(outputs)
        client = MlflowClient(tracking_uri=mlflow_url(outputs))
        client.search_experiments(max_results=1)
    return client


def _create_database(outputs: Path) -> None:
    """Create it in another folder, then move it: MLflow cannot repair a schema that a dead process left incomplete."""
    from mlflow import MlflowClient

    for left in outputs.glob(f"{NEW_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=outputs))
    MlflowClient(tracking_uri=mlflow_url(folder)).search_experiments(max_results=1)
    shutil.copyfile(folder / DATABASE_NAME, folder / "closed.db")  # MLflow keeps the other one open, under its name
    (folder / "closed.db").replace(outputs / DATABASE_NAME)
    shutil.rmtree(folder, ignore_errors=True)


def _move_away(outputs: Path) -> Path | None:
    found = [outputs / part for part in _STORE_FILES if (outputs / part).exists()]
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


def _lock(outputs: Path) -> FileLock:
    return FileLock(outputs / "mlflow.db.lock", timeout=LOCK_TIMEOUT_S)


def _experiment(client: Any, outputs: Path, name: str) -> str:
    """The experiment's id, created or restored from deletion if need be. The caller holds the lock."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=(outputs.absolute() / "mlartifacts").as_uri()))
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _exists(client: Any, run_id: str | None) -> bool:
    """Whether the run exists and was not deleted."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return False
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException:
        return False


def _run_of(client: Any, experiment: str, trial: Trial, parent_run_id: str | None) -> tuple[str | None, bool]:
    """The trial's run under this parent, or without one, and whether it was logged completely."""
    if parent_run_id is not None:
        run_id = _first(client, experiment, **{PARENT_TAG: parent_run_id, TRIAL_TAG: str(trial.id)})
    else:
        run_id = trial.mlflow_run_id if _exists(client, trial.mlflow_run_id) else None
        own = {TRIAL_TAG: str(trial.id), FINGERPRINT_TAG: trial.fingerprint}
        run_id = run_id or _first(client, experiment, **own)
    return run_id, run_id is not None and client.get_run(run_id).info.status != "RUNNING"


def _first(client: Any, experiment: str, **tags: str) -> str | None:
    found = client.search_runs([experiment], filter_string=_tagged(**tags), max_results=1)
    return str(found[0].info.run_id) if found else None


def _tagged(**tags: str) -> str:
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def _log_batches(client: Any, run_id: str, params: Sequence[Any], metrics: Sequence[Any]) -> None:
    """In as few calls as MLflow's limits allow, since each is a transaction."""
    fitting = METRICS_A_BATCH - PARAMS_A_BATCH
    for number in range(max(ceil(len(params) / PARAMS_A_BATCH), ceil(len(metrics) / fitting))):
        client.log_batch(
            run_id,
            metrics=metrics[number * fitting : (number + 1) * fitting],
            params=params[number * PARAMS_A_BATCH : (number + 1) * PARAMS_A_BATCH],
        )


def _params(values: Mapping[str, Any]) -> list[Any]:
    from mlflow.entities import Param

    texts = {key: json.dumps(v, default=str) if isinstance(v, list | tuple) else str(v) for key, v in values.items()}
    return [Param(_name(key), text[:PARAM_LENGTH]) for key, text in sorted(texts.items())]


def _metrics(trial: Trial, store: ResultsStore, turns: Sequence[Row[Any]]) -> list[Any]:
    from mlflow.entities import Metric

    at = _milliseconds(trial.finished_at) or _milliseconds(trial.started_at)
    summary = [
        Metric(_name(f"{m.name}/{m.label}" if m.label else m.name), m.value, at, 0)
        for m in store.metrics_of(trial.id)
        if m.value is not None
    ]
    return summary + [Metric(TTFT_BY_TURN, value, at, turn) for turn, value in ttft_by_turn(turns).items()]


def ttft_by_turn(turns: Sequence[Row[Any]]) -> dict[int, float]:
    """Median TTFT in ms over sessions, by turn, of measured turns that completed."""
    values: defaultdict[int, list[float]] = defaultdict(list)
    for turn in turns:
        if counts(turn) and turn.ttft_ms is not None:
            values[turn.turn].append(turn.ttft_ms)
    return {turn: median(values[turn]) for turn in sorted(values)}


def _write_turns(path: Path, turns: Sequence[Row[Any]]) -> None:
    if turns:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([dict(turn._mapping) for turn in turns]), path)


def _name(text: str) -> str:
    """A name that MLflow allows, for a parameter or a metric."""
    return re.sub(r"[^\w./ -]", "_", text)[:NAME_LENGTH]


def _milliseconds(moment: datetime | None) -> int | None:
    return int(moment.timestamp() * 1000) if moment else None


@functools.lru_cache(maxsize=1)
def _say_missing() -> None:
    _log.warning("MLflow is not installed, so nothing is logged there; `pip install mlflow` changes that.")
