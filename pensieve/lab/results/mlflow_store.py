"""MLflow's own store, under the outputs folder or on a server: made once, opened, written in batches, moved away.

mlflow is imported here and in mlflow_runs alone, and only when something is logged: the import takes seconds. A failure of
MLflow never fails a trial: functions marked `or_none` log one sentence and return None.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from filelock import FileLock
from sqlalchemy.exc import SQLAlchemyError

from pensieve.errors import ResultsError

P = ParamSpec("P")
T = TypeVar("T")

DATABASE_NAME, NEW_PREFIX = "mlflow.db", ".mlflow-new-"
URL_ENV = "PENSIEVE_MLFLOW_URL"
LOCK_TIMEOUT_S = 120
RUNS_FIRST = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment: its page begins with the runs, not with an empty page of traces."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""With a server that does not answer; MLflow's own defaults try for minutes."""

PARAMS_A_BATCH, METRICS_A_BATCH = 100, 1000  # and no more than the latter of both together
PARAM_LENGTH, NAME_LENGTH, TAG_LENGTH = 6000, 250, 5000
_STORE_FILES = ("mlflow.db", "mlflow.db-wal", "mlflow.db-shm", "mlartifacts")

_log = logging.getLogger(__name__)


def remote_url() -> str | None:
    """The tracking URI of a server of your own, from the environment so that it is never saved; None: the local store.

    Raises ResultsError for an address without a scheme, which MLflow takes for a folder."""
    url = os.environ.get(URL_ENV) or None
    if url is not None and "://" not in url and not url.startswith("databricks"):
        raise ResultsError(f"{URL_ENV}={url} has no scheme; write {URL_ENV}=http://{url}, or unset it.")
    return url


def mlflow_url(outputs: Path) -> str:
    """The tracking URI: a server's, or the local store's, whose timeout lets parallel trials wait for each other."""
    return remote_url() or f"sqlite:///{outputs.absolute() / DATABASE_NAME}?timeout=30"


def or_none(function: Callable[P, T | None]) -> Callable[P, T | None]:
    """Log one sentence and return None where MLflow or its disk raises."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except ImportError:
            say_missing()
        except Exception as error:
            reason = reason_of(error)
            if reason is None:
                raise
            say_not_logged(reason)
        return None

    return guarded


def reason_of(error: Exception) -> str | None:
    """In a line why MLflow or its disk failed; None for any other error."""
    failed = isinstance(error, OSError | SQLAlchemyError) or type(error).__module__.startswith("mlflow")
    if not failed or isinstance(error, ResultsError):
        return None
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@functools.lru_cache(maxsize=8)  # a sweep meets the same full disk at each trial
def say_not_logged(reason: str) -> None:
    _log.warning("Nothing was logged to MLflow (%s); the results database is complete without it.", reason)


@functools.lru_cache(maxsize=1)
def say_missing() -> None:
    _log.warning("MLflow is not installed, so nothing is logged there; `pip install mlflow` changes that.")


@or_none
def ensure_store(outputs: Path) -> str | None:
    """Create the MLflow database if it is missing, one process at a time; returns its tracking URI."""
    client_of(outputs)
    return mlflow_url(outputs)


def client_of(outputs: Path) -> Any:
    """MLflow's client of the store in this folder; the store is made where it is missing."""
    return _client(outputs.absolute(), remote_url())


def forget_clients() -> None:
    """The store was moved: a client of this process would go on writing to the files where they are now."""
    _client.cache_clear()


def import_mlflow() -> Any:
    """MLflow's class of clients; nothing is sent to its makers."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # of a server, two lines a run
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")  # the commit comes from our own environment record
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").addFilter(_never)
    return MlflowClient


def _never(_: logging.LogRecord) -> bool:
    """Drop the traceback that MLflow logs of each error of its database before it raises it: we tell those in a sentence. A
    level would not last: who configures logging sets it back."""
    return False


@functools.lru_cache(maxsize=4)
def _client(outputs: Path, remote: str | None) -> Any:
    make = import_mlflow()
    if remote is not None:
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        return make(tracking_uri=remote)
    with lock(outputs):  # its schema is made by the client or its first question, and two at once would fail
        if not (outputs / DATABASE_NAME).exists():
            _create_database(outputs)
        client = make(tracking_uri=mlflow_url(outputs))
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


def move_away(outputs: Path) -> Path | None:
    """Move an existing store to mlflow-before-<time>, and return that folder; None where there is none. Raises ResultsError
    for a store on a server."""
    if remote_url() is not None:
        raise ResultsError(
            f"The MLflow store is a server's ({URL_ENV}), which only its owner can empty; unset {URL_ENV}."
        )
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


def lock(outputs: Path) -> FileLock:
    """Make the lock to hold while a run is looked for and then made, so that two processes do not make it twice."""
    return FileLock(outputs / "mlflow.db.lock", timeout=LOCK_TIMEOUT_S)


def experiment_id(client: Any, outputs: Path, name: str) -> str:
    """The experiment's id, created or restored from deletion if need be. The caller holds the lock of this machine."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        location = None if remote_url() else (outputs.absolute() / "mlartifacts").as_uri()  # a server decides it itself
        try:
            return str(client.create_experiment(name, artifact_location=location, tags=RUNS_FIRST))
        except MlflowException:  # on a server another machine may be first
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def run_exists(client: Any, run_id: str | None) -> bool:
    """Whether the run exists and was not deleted."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return False
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException:
        return False


def first_run(client: Any, experiment: str, **tags: str) -> str | None:
    """The id of a run with all of these tags."""
    found = client.search_runs([experiment], filter_string=tagged(**tags), max_results=1)
    return str(found[0].info.run_id) if found else None


def tagged(**tags: str) -> str:
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def log_batches(
    client: Any, run_id: str, params: Sequence[Any], metrics: Sequence[Any], tags: Mapping[str, str] | None = None
) -> None:
    """Log parameters, metrics and tags in as few calls as MLflow's limits allow, since each is a transaction."""
    from mlflow.entities import RunTag

    if tags:
        client.log_batch(run_id, tags=[RunTag(name, text[:TAG_LENGTH]) for name, text in tags.items()])
    fitting = METRICS_A_BATCH - PARAMS_A_BATCH
    for number in range(max(ceil(len(params) / PARAMS_A_BATCH), ceil(len(metrics) / fitting))):
        client.log_batch(
            run_id,
            metrics=metrics[number * fitting : (number + 1) * fitting],
            params=params[number * PARAMS_A_BATCH : (number + 1) * PARAMS_A_BATCH],
        )


def params_of(values: Mapping[str, Any]) -> list[Any]:
    from mlflow.entities import Param

    texts = {key: json.dumps(v, default=str) if isinstance(v, list | tuple) else str(v) for key, v in values.items()}
    return [Param(allowed_name(key), text[:PARAM_LENGTH]) for key, text in sorted(texts.items())]


def metrics_of(values: Mapping[str, float | None], at_ms: int | None, step: int = 0) -> list[Any]:
    """Make MLflow's metrics of the values that are known."""
    from mlflow.entities import Metric

    return [Metric(allowed_name(name), v, at_ms, step) for name, v in values.items() if v is not None]


def allowed_name(text: str) -> str:
    """A name that MLflow allows, for a parameter or a metric."""
    return re.sub(r"[^\w./ -]", "_", text)[:NAME_LENGTH]


def milliseconds(moment: datetime | None) -> int | None:
    return int(moment.timestamp() * 1000) if moment else None
