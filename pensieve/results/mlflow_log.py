"""Sweeps and trials as MLflow runs, copied from the results database: that one is the truth, this one can be rebuilt.

The only importer of mlflow, and only when something is logged: the import takes seconds. What goes wrong here costs the
MLflow run, never the trial: one sentence is logged, and the functions return None.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, ParamSpec, TypeVar

from filelock import FileLock
from sqlalchemy import Row
from sqlalchemy.exc import SQLAlchemyError

from pensieve.errors import ResultsError
from pensieve.results.schema import Trial
from pensieve.results.store import ResultsStore

P = ParamSpec("P")
T = TypeVar("T")

LOCK_TIMEOUT_S = 120
PARAMS_A_BATCH, METRICS_A_BATCH = 100, 1000
PARAM_LENGTH, NAME_LENGTH, TAG_LENGTH = 6000, 250, 5000
TRIAL_TAG = "pensieve.trial_id"
TTFT_BY_TURN = "ttft_ms_by_turn"
_COLUMNS_AS_PARAMS = (
    "model", "baseline", "eviction", "scheduler", "cache", "workload", "hardware", "seed", "repeat", "weights", "dtype",
    "device", "device_count", "gpu_tokens", "cpu_tokens", "working_set_tokens",
)  # fmt: skip
_RUN_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}

_log = logging.getLogger(__name__)


def mlflow_url(outputs: Path) -> str:
    """The tracking URI of the local store. The timeout lets parallel trials wait for each other."""
    return f"sqlite:///{outputs.absolute() / 'mlflow.db'}?timeout=30"


def _or_none(function: Callable[P, T | None]) -> Callable[P, T | None]:
    """One sentence instead of an exception that comes from MLflow or its disk."""

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
    """Create the MLflow database where it is missing, once, whoever comes first; returns its tracking URI."""
    _client(outputs.absolute())
    return mlflow_url(outputs)


@_or_none
def start_parent(outputs: Path, store: ResultsStore, sweep_id: int, experiment_name: str) -> str | None:
    """The sweep's parent run, running (again); its id is kept in the sweep's row."""
    client = _client(outputs.absolute())
    with _lock(outputs):
        sweep = store.sweep(sweep_id)
        if _exists(client, sweep.mlflow_run_id):
            client.update_run(sweep.mlflow_run_id, status="RUNNING")
            return sweep.mlflow_run_id
        tags = {"pensieve.sweep_id": str(sweep.id), "pensieve.sweep_key": sweep.key, "status": "running"}
        if sweep.command:
            tags["pensieve.command"] = sweep.command[:TAG_LENGTH]
        run = client.create_run(
            _experiment(client, outputs, experiment_name), _milliseconds(sweep.started_at), tags, sweep.name
        )
        run_id = str(run.info.run_id)
        _log_params(client, run_id, dict(_flat(sweep.overrides)))
        store.set_sweep(sweep_id, mlflow_run_id=run_id)
    return run_id


@_or_none
def log_trial(
    outputs: Path,
    store: ResultsStore,
    trial_id: int,
    experiment_name: str,
    parent_run_id: str | None = None,
    reused: bool = False,
) -> str | None:
    """A run for a trial that ended, under the sweep's parent where there is one; the same child is not made twice.

    The run's id is kept in the trial's row, unless the trial was reused: then the row keeps its first run.
    """
    client = _client(outputs.absolute())
    trial = store.trial(trial_id)
    with _lock(outputs):
        experiment = _experiment(client, outputs, experiment_name)
    found = _run_of(client, experiment, trial, parent_run_id)
    if found is not None:
        return found
    tags = {
        TRIAL_TAG: str(trial.id), "status": trial.status, "simulated": str(trial.simulated).lower(),
        "weights": str(trial.weights), "fingerprint": trial.fingerprint,
    }  # fmt: skip
    if parent_run_id:
        tags["mlflow.parentRunId"] = parent_run_id
    if reused:
        tags["reused"] = "true"
    if trial.git_commit:
        tags["mlflow.source.git.commit"] = trial.git_commit
    if trial.error:
        tags["error"] = trial.error[:TAG_LENGTH]
    name = f"{trial.baseline} seed={trial.seed}" + (f" repeat={trial.repeat}" if trial.repeat else "")
    run_id = str(client.create_run(experiment, _milliseconds(trial.started_at), tags, name).info.run_id)
    columns = {key: getattr(trial, key) for key in _COLUMNS_AS_PARAMS}
    _log_params(client, run_id, {**dict(_flat(trial.config)), **{k: v for k, v in columns.items() if v is not None}})
    turns = store.turns_of(trial_id)
    _log_metrics(client, run_id, trial, store, turns)
    client.log_dict(run_id, trial.config, "config.json")
    client.log_dict(run_id, trial.environment, "environment.json")
    _log_turns(client, run_id, turns)
    for artifact in store.artifacts_of(trial_id):
        if artifact.kind != "tokens" and artifact.path.is_file():  # tokens would double what the disk holds
            client.log_artifact(run_id, str(artifact.path), artifact.kind)
    client.set_terminated(run_id, _RUN_STATUS[trial.status], _milliseconds(trial.finished_at))
    if not reused or trial.mlflow_run_id is None:
        store.set_trial(trial_id, mlflow_run_id=run_id)
    return run_id


@_or_none
def finish_parent(outputs: Path, store: ResultsStore, sweep_id: int, table: str, status: str) -> str | None:
    """Close the parent run with the comparison table as its artifact; returns its id, None if it has none."""
    run_id = store.sweep(sweep_id).mlflow_run_id
    client = _client(outputs.absolute())
    if run_id is None or not _exists(client, run_id):
        return None
    client.log_text(run_id, table, "comparison.txt")
    client.set_tag(run_id, "status", status)
    client.set_terminated(run_id, _RUN_STATUS[status])
    return run_id


@functools.lru_cache(maxsize=4)
def _client(outputs: Path) -> Any:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # the commit comes from our own environment record
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with _lock(outputs):  # its schema is made by the client or its first question, and two at once would fail
        client = MlflowClient(tracking_uri=mlflow_url(outputs))
        client.search_experiments(max_results=1)
    return client


def forget_clients() -> None:
    """After the store's files were moved: nothing of this process must write to them where they are now."""
    _client.cache_clear()


def _lock(outputs: Path) -> FileLock:
    return FileLock(outputs / "mlflow.db.lock", timeout=LOCK_TIMEOUT_S)


def _experiment(client: Any, outputs: Path, name: str) -> str:
    """The experiment's id; call under the lock. One that was deleted in the UI comes back."""
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=(outputs.absolute() / "mlartifacts").as_uri()))
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _exists(client: Any, run_id: str | None) -> bool:
    """False also where the user deleted the run, or the whole MLflow database."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return False
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException:
        return False


def _run_of(client: Any, experiment: str, trial: Trial, parent_run_id: str | None) -> str | None:
    if parent_run_id is None:
        return trial.mlflow_run_id if _exists(client, trial.mlflow_run_id) else None
    query = f"tags.`mlflow.parentRunId` = '{parent_run_id}' and tags.`{TRIAL_TAG}` = '{trial.id}'"
    found = client.search_runs([experiment], filter_string=query, max_results=1)
    return str(found[0].info.run_id) if found else None


def _log_params(client: Any, run_id: str, values: Mapping[str, Any]) -> None:
    from mlflow.entities import Param

    params = [Param(_name(key), str(value)[:PARAM_LENGTH]) for key, value in sorted(values.items())]
    for start in range(0, len(params), PARAMS_A_BATCH):
        client.log_batch(run_id, params=params[start : start + PARAMS_A_BATCH])


def _log_metrics(client: Any, run_id: str, trial: Trial, store: ResultsStore, turns: Sequence[Row[Any]]) -> None:
    from mlflow.entities import Metric

    at = _milliseconds(trial.finished_at) or _milliseconds(trial.started_at)
    metrics = [
        Metric(_name(f"{m.name}/{m.label}" if m.label else m.name), m.value, at, 0)
        for m in store.metrics_of(trial.id)
        if m.value is not None
    ]
    metrics += [Metric(TTFT_BY_TURN, value, at, turn) for turn, value in ttft_by_turn(turns).items()]
    for start in range(0, len(metrics), METRICS_A_BATCH):
        client.log_batch(run_id, metrics=metrics[start : start + METRICS_A_BATCH])


def ttft_by_turn(turns: Sequence[Row[Any]]) -> dict[int, float]:
    """Median TTFT in ms over sessions, by turn, of completed turns that are not warm-up."""
    values: defaultdict[int, list[float]] = defaultdict(list)
    for turn in turns:
        if turn.phase != "warmup" and turn.status == "completed" and turn.ttft_ms is not None:
            values[turn.turn].append(turn.ttft_ms)
    return {turn: median(values[turn]) for turn in sorted(values)}


def _log_turns(client: Any, run_id: str, turns: Sequence[Row[Any]]) -> None:
    if not turns:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.parquet"
        pq.write_table(pa.Table.from_pylist([dict(turn._mapping) for turn in turns]), path)
        client.log_artifact(run_id, str(path))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if name == "hydra":
            continue  # how Hydra itself is set up describes no trial
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, json.dumps(value, default=str) if isinstance(value, list | tuple) else value


def _name(text: str) -> str:
    """A name that MLflow allows, for a parameter or a metric."""
    return re.sub(r"[^\w./ -]", "_", text)[:NAME_LENGTH]


def _milliseconds(moment: datetime | None) -> int | None:
    return int(moment.timestamp() * 1000) if moment else None


@functools.lru_cache(maxsize=1)
def _say_missing() -> None:
    _log.warning("MLflow is not installed, so nothing is logged there; `pip install mlflow` changes that.")
