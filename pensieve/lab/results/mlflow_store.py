"""MLflow's own store, under the outputs folder or on a server: made once, opened, moved away.

mlflow is imported here and in mlflow_runs alone, and only when something is logged: the import takes seconds. A failure of
MLflow never fails a trial: functions marked `or_none` log one sentence and return None.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from filelock import FileLock
from sqlalchemy.exc import SQLAlchemyError

from pensieve.errors import ResultsError

P = ParamSpec("P")
T = TypeVar("T")

DATABASE_NAME, NEW_PREFIX = "mlflow.db", ".mlflow-new-"
URL_ENV = "PENSIEVE_MLFLOW_URL"
_LOCK_TIMEOUT_S = 120
_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # of a server, two lines a run
    "GIT_PYTHON_REFRESH": "quiet",  # the commit comes from our own environment record
    # With a server that does not answer; MLflow's own defaults try for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
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
        except Exception as error:
            say_not_logged(reason_of(error))
        return None

    return guarded


def reason_of(error: Exception) -> str:
    """In a line why MLflow or its disk failed. Raises any other error again."""
    if isinstance(error, ImportError):
        return "MLflow is not installed; `pip install mlflow` changes that"
    failed = isinstance(error, OSError | SQLAlchemyError) or type(error).__module__.startswith("mlflow")
    if not failed or isinstance(error, ResultsError):
        raise error
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@functools.lru_cache(maxsize=8)  # a sweep meets the same full disk at each trial
def say_not_logged(reason: str) -> None:
    _log.warning("Nothing was logged to MLflow (%s); the results database is complete without it.", reason)


def client_of(outputs: Path) -> Any:
    """MLflow's client of the store in this folder; the store is made where it is missing."""
    return _client(outputs.absolute(), remote_url())


def forget_clients() -> None:
    """The store was moved: a client of this process would go on writing to the files where they are now."""
    _client.cache_clear()


@functools.lru_cache(maxsize=4)
def _client(outputs: Path, remote: str | None) -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # MLflow logs a traceback of its database's error before it raises it, which we tell in a sentence. A level would not
    # last: who configures logging sets it back.
    logging.getLogger("mlflow.store.db.utils").addFilter(_never)
    with lock(outputs):  # its schema is made by the client or its first question, and two at once would fail
        if remote is None and not (outputs / DATABASE_NAME).exists():
            _create_database(outputs)
        client = MlflowClient(tracking_uri=mlflow_url(outputs))
        client.search_experiments(max_results=1)
    return client


def _never(_: logging.LogRecord) -> bool:
    return False


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
    found = [*outputs.glob(f"{DATABASE_NAME}*"), *outputs.glob("mlartifacts")]
    if not any(path.suffix != ".lock" for path in found):
        return None
    kept = outputs / f"mlflow-before-{datetime.now(UTC):%Y-%m-%d-%H-%M-%S-%f}"
    try:
        kept.mkdir()
        for path in found:
            path.rename(kept / path.name)
    except OSError as error:
        raise ResultsError(
            f"The MLflow store in {outputs} cannot be moved away ({error.strerror or error}); end what uses it (make ui)."
        ) from None
    return kept


def lock(outputs: Path) -> FileLock:
    """Make the lock to hold while a run is looked for and then made, so that two processes do not make it twice."""
    return FileLock(outputs / f"{DATABASE_NAME}.lock", timeout=_LOCK_TIMEOUT_S)
