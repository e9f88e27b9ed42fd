"""Sweeps and trials as MLflow runs, copied from the results database.

A run is found again by its tags, so each copy may be made twice: after a trial, after its sweep, by `pensieve mlflow sync`.
Nothing is copied while a trial runs. mlflow is imported when something is logged: the import takes seconds. A failure of
MLflow never fails a trial: functions marked `or_none` log one sentence and return None.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from filelock import FileLock
from sqlalchemy import select, union
from sqlalchemy.exc import SQLAlchemyError

from pensieve.errors import ResultsError
from pensieve.lab.results.identity import counts_for_sweep
from pensieve.lab.results.schema import Sweep, SweepTrial, Trial, sweep_result
from pensieve.lab.results.slo import PREFIX, slo_of_sweep, slo_of_trial
from pensieve.lab.results.store import ResultsStore, figures_folder, report_file
from pensieve.lab.results.trials import axis_value, leaves, swept_axes

if TYPE_CHECKING:
    from pensieve.lab.results.sweep_table import SweepTable

P = ParamSpec("P")
T = TypeVar("T")

DATABASE_NAME = "mlflow.db"
URL_ENV = "PENSIEVE_MLFLOW_URL"
TRIAL_TAG, SWEEP_TAG, KEY_TAG = "pensieve.trial_id", "pensieve.sweep_id", "pensieve.sweep_key"
PARENT_TAG, FINGERPRINT_TAG = "mlflow.parentRunId", "fingerprint"
TTFT_BY_TURN = "ttft_ms_by_turn"

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
_COLUMNS_AS_PARAMS = (
    "model", "baseline", "eviction", "scheduler", "cache", "workload", "hardware", "seed", "repeat", "weights", "dtype",
    "device", "device_count", "gpu_tokens", "cpu_tokens", "working_set_tokens",
)  # fmt: skip
_NOT_PARAMS = ("hydra", "tracking", "trial", "force", "resume", "sweep", "experiment", "experiment_name", "slo")
_ONLY_HYDRA = re.compile(r"_\w+_")  # _target_, _partial_, ...
_RUN_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
_RUNS_FIRST = {"mlflow.experimentKind": "custom_model_development"}  # else its page begins with an empty page of traces
_AT_ONCE = 100  # parameters, and metrics, of one call
_PARAM_LENGTH, _NAME_LENGTH, _TAG_LENGTH = 6000, 250, 5000

Held = Callable[[], AbstractContextManager[object]]
"""A block that Ctrl-C does not end: no run is left half written."""

_log = logging.getLogger(__name__)


# Where MLflow keeps runs


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
    """MLflow's client of the store in this folder, or of the server; a local store is made where it is missing."""
    return _client(outputs.absolute(), remote_url())


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
    with _lock(outputs):  # its schema is made by the client or its first question, and two at once would fail
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

    with tempfile.TemporaryDirectory(prefix=".mlflow-new-", dir=outputs, ignore_cleanup_errors=True) as name:
        made, closed = Path(name, DATABASE_NAME), Path(name, "closed.db")
        MlflowClient(tracking_uri=mlflow_url(made.parent)).search_experiments(max_results=1)
        shutil.copyfile(made, closed)  # MLflow keeps the other one open, under its name
        closed.replace(outputs / DATABASE_NAME)


def _lock(outputs: Path) -> FileLock:
    """Hold it while a run is looked for and then made, so that two processes do not make it twice."""
    return FileLock(outputs / f"{DATABASE_NAME}.lock", timeout=_LOCK_TIMEOUT_S)


# Copies of what was recorded


@or_none
def copy_sweep(
    outputs: Path, store: ResultsStore, sweep_id: int, table: SweepTable | None = None, held: Held = nullcontext
) -> tuple[str, int]:
    """Log a sweep as a parent run, and as its children the trials that have ended: what each job shows, and its last
    attempt. A sweep that has ended closes its run with what it found. Returns the parent's id and how many trials were
    written.

    table: of the sweep, where the caller has it.
    """
    return _Copy(outputs, store, held).sweep(store.sweep(sweep_id), table)


@or_none
def copy_trial(outputs: Path, store: ResultsStore, trial_id: int, held: Held = nullcontext) -> str:
    """Log a trial of no sweep that has ended; returns the run's id."""
    return _Copy(outputs, store, held).trial(store.trial(trial_id))


@or_none
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


def sync_mlflow(outputs: Path, store: ResultsStore, say: Callable[[str], None]) -> int:
    """Log what MLflow lacks: every sweep with its trials, and every other trial; returns how many trials were written.

    Running trials are left to their own process. Raises ResultsError where MLflow cannot be written, or lacks some after all
    others were written.
    """
    store.interrupt_dead()
    of_sweeps = union(select(SweepTrial.trial_id), select(sweep_result.c.trial_id))
    others = select(Trial.id).where(Trial.status != "running", Trial.id.not_in(of_sweeps))
    with store.database.reading() as connection:
        sweeps = connection.scalars(select(Sweep.id).order_by(Sweep.id)).all()
        alone = connection.scalars(others.order_by(Trial.id)).all()
    try:
        copy = _Copy(outputs, store)
    except Exception as error:
        raise ResultsError(
            f"MLflow cannot be written in {outputs}: {reason_of(error)}. Mend it and run again."
        ) from None
    written, failed = 0, list[str]()
    for what, number in (*(("sweep", one) for one in sweeps), *(("trial", one) for one in alone)):
        try:
            if what == "sweep":
                _, missing = copy.sweep(store.sweep(number))
                log_drawn(outputs, store, number)
                say(f"Sweep {number} is in MLflow: {missing} trials were missing.")
            else:
                trial = store.trial(number)
                missing = copy.trial(trial) != trial.mlflow_run_id
            written += missing
        except Exception as error:
            failed.append(f"{what} {number} ({reason_of(error)})")
    if failed:
        raise ResultsError(
            f"{written} trials were written to MLflow, but not {', '.join(failed)}. Mend it and run the same command again."
        )
    return written


def rebuild_mlflow(outputs: Path, store: ResultsStore, say: Callable[[str], None]) -> int:
    """As sync_mlflow, into a new store. One that is there is moved to mlflow-before-<time>, never deleted.

    Raises ResultsError for a store on a server.
    """
    if remote_url() is not None:
        raise ResultsError(
            f"The MLflow store is a server's ({URL_ENV}), which only its owner can empty; unset {URL_ENV}."
        )
    found = [*outputs.glob(f"{DATABASE_NAME}*"), *outputs.glob("mlartifacts")]
    if any(path.suffix != ".lock" for path in found):
        kept = outputs / f"mlflow-before-{datetime.now(UTC):%Y-%m-%d-%H-%M-%S-%f}"
        try:
            kept.mkdir()
            for path in found:
                path.rename(kept / path.name)
        except OSError as error:
            raise ResultsError(
                f"The MLflow store in {outputs} cannot be moved away ({error.strerror or error}); end what uses it (make ui)."
            ) from None
        say(f"The MLflow store that was there is now in {kept}; delete it when you no longer need it.")
    _client.cache_clear()  # a client of this process would write to the files where they are now
    return sync_mlflow(outputs, store, say)


class _Copy:
    """Writes runs. Each is looked for and then made under the lock of this machine."""

    def __init__(self, outputs: Path, store: ResultsStore, held: Held = nullcontext) -> None:
        self.client, self.outputs, self.store, self.held = client_of(outputs), outputs, store, held

    def sweep(self, sweep: Sweep, table: SweepTable | None = None) -> tuple[str, int]:
        """As copy_sweep."""
        with self.held(), _lock(self.outputs):
            experiment = self._experiment(sweep.name)
            parent = self._parent(experiment, sweep)
        ended = {
            trial.id: (trial, job.reused)
            for job in self.store.trials_of_sweep(sweep.id)
            for trial in (job.trial, job.last)
            if trial is not None and trial.status != "running"
        }
        known = self.client.search_runs([experiment], filter_string=_tagged({PARENT_TAG: parent}), max_results=50_000)
        whole = {run.data.tags.get(TRIAL_TAG) for run in known if run.info.status != "RUNNING"}
        missing = [key for key in sorted(ended) if str(key) not in whole or ended[key][0].mlflow_run_id is None]
        for trial, reused in map(ended.__getitem__, missing):
            with self.held(), _lock(self.outputs):
                self._run(experiment, trial, sweep, parent, reused)
        if sweep.status != "running":
            self._close(parent, sweep, table)
        return parent, len(missing)

    def trial(self, trial: Trial) -> str:
        """As copy_trial."""
        with self.held(), _lock(self.outputs):
            return self._run(self._experiment(trial.experiment or "pensieve"), trial)

    def _experiment(self, name: str) -> str:
        """The experiment's id, made or restored from deletion if need be."""
        found = self.client.get_experiment_by_name(name)
        if found is None:  # a server decides itself where artifacts are
            location = None if remote_url() else (self.outputs.absolute() / "mlartifacts").as_uri()
            return str(self.client.create_experiment(name, artifact_location=location, tags=_RUNS_FIRST))
        if found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _found(self, experiment: str, own: Mapping[str, str], name: str, began: datetime) -> Any:
        """The run with these tags, a new one where there is none. The ids in the database are no help: a process may die
        before it writes one, and the store may be another one since."""
        found = self.client.search_runs([experiment], filter_string=_tagged(own), max_results=1)
        return found[0] if found else self.client.create_run(experiment, _milliseconds(began), own, name)

    def _parent(self, experiment: str, sweep: Sweep) -> str:
        """The sweep's run, whose id is kept in the sweep's row."""
        own = {SWEEP_TAG: str(sweep.id), KEY_TAG: sweep.key}
        run = self._found(experiment, own, sweep_name(sweep), sweep.started_at)
        run_id = str(run.info.run_id)
        if run_id != sweep.mlflow_run_id:
            self.store.set_sweep(sweep.id, mlflow_run_id=run_id)
        # MLflow never changes a parameter: overrides that may differ when the sweep goes on are in the command's tag alone.
        texts = {key: ",".join(one) if isinstance(one, list) else one for key, one in sweep.overrides.items()}
        params = {key: text for key, text in texts.items() if counts_for_sweep(key)}
        tags = {"status": sweep.status, **_source(sweep.command, sweep.git_commit)}
        _log_batches(self.client, run_id, {} if run.data.params else params, tags=tags)
        self.client.update_run(run_id, status="RUNNING")
        return run_id

    def _close(self, run_id: str, sweep: Sweep, table: SweepTable | None) -> None:
        """Close the parent run with what the sweep found: the sentences as its description, the table as an artifact."""
        from pensieve.lab.results.sweep_table import sweep_table

        found = table or sweep_table(self.store, sweep.id)
        if found.answers:
            self.client.set_tag(run_id, "mlflow.note.content", "\n\n".join(found.answers)[:_TAG_LENGTH])
        self.client.log_text(run_id, found.text(), "comparison.txt")
        self.client.set_terminated(run_id, _RUN_STATUS[sweep.status], _milliseconds(sweep.finished_at))

    def _run(
        self, experiment: str, trial: Trial, sweep: Sweep | None = None, parent: str | None = None, reused: bool = False
    ) -> str:
        """Log a trial, in a run that another process began and did not complete if there is one. The run's id is written to
        the trial's row, except that the row of a reused trial keeps its first run."""
        own = {TRIAL_TAG: str(trial.id), FINGERPRINT_TAG: trial.fingerprint}
        own |= {PARENT_TAG: parent} if parent is not None else {}
        run = self._found(experiment, own, trial_name(trial, sweep), trial.started_at)
        run_id = str(run.info.run_id)
        if run.info.status == "RUNNING":
            _fill_run(self.client, run_id, self.store, trial, sweep, trial_tags(trial, sweep, reused))
        if trial.mlflow_run_id != run_id and (not reused or trial.mlflow_run_id is None):
            self.store.set_trial(trial.id, mlflow_run_id=run_id)
        return run_id


def _fill_run(
    client: Any, run_id: str, store: ResultsStore, trial: Trial, sweep: Sweep | None, tags: Mapping[str, str]
) -> None:
    """The objective is that of the sweep that the run belongs to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    slo = slo_of_sweep(sweep.overrides) if sweep else slo_of_trial(trial)
    fields = {name: value for name, value in leaves(trial.config) if is_param(name)}
    asked = {f"{PREFIX}{name}": most for name, most in asdict(slo).items() if most is not None}
    columns = {key: value for key in _COLUMNS_AS_PARAMS if (value := getattr(trial, key)) is not None}
    found = store.metrics_of(trial.id, slo)
    metrics = [(f"{m.name}/{m.label}" if m.label else m.name, m.value, 0) for m in found] + [
        (TTFT_BY_TURN, one.value, int(one.label.removeprefix("turn=")))
        for one in found
        if one.name == "ttft_ms_p50" and one.label.startswith("turn=")
    ]
    at_ms = _milliseconds(trial.finished_at or trial.started_at)
    _log_batches(client, run_id, {**fields, **asked, **columns}, metrics, tags, at_ms)
    with tempfile.TemporaryDirectory() as name:
        for file, content in (("config.json", trial.config), ("environment.json", trial.environment)):
            Path(name, file).write_text(json.dumps(content, indent=2, default=str), encoding="utf-8")
        if turns := [dict(turn._mapping) for turn in store.turns_of(trial.id)]:
            pq.write_table(pa.Table.from_pylist(turns), Path(name, "turns.parquet"))
        client.log_artifacts(run_id, name)
    for artifact in store.artifacts_of(trial.id):
        if artifact.kind != "tokens" and artifact.path.is_file():  # tokens would double what the disk holds
            client.log_artifact(run_id, str(artifact.path), artifact.kind)
    client.set_terminated(run_id, _RUN_STATUS[trial.status], _milliseconds(trial.finished_at))


# In MLflow's terms: names, tags, parameters


def _tagged(tags: Mapping[str, str]) -> str:
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def _log_batches(
    client: Any,
    run_id: str,
    params: Mapping[str, Any],
    metrics: Sequence[tuple[str, float | None, int]] = (),
    tags: Mapping[str, str] | None = None,
    at_ms: int | None = None,
) -> None:
    """metrics: name, value, step; those without a value are left out."""
    from mlflow.entities import Metric, Param, RunTag

    texts = {
        key: json.dumps(v, default=str) if isinstance(v, list | tuple) else str(v) for key, v in sorted(params.items())
    }
    told = [Param(_allowed(key), text[:_PARAM_LENGTH]) for key, text in texts.items()]
    counted = [Metric(_allowed(name), value, at_ms, step) for name, value, step in metrics if value is not None]
    client.log_batch(run_id, tags=[RunTag(name, text[:_TAG_LENGTH]) for name, text in (tags or {}).items()])
    for start in range(0, max(len(told), len(counted)), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        client.log_batch(run_id, params=told[some], metrics=counted[some])


def _allowed(text: str) -> str:
    """A name that MLflow allows, for a parameter or a metric."""
    return re.sub(r"[^\w./ -]", "_", text)[:_NAME_LENGTH]


def _milliseconds(moment: datetime | None) -> int | None:
    return int(moment.timestamp() * 1000) if moment else None


def sweep_name(sweep: Sweep) -> str:
    """ "ablation_eviction: eviction × baseline 2026-11-22 03:31": the overlay, what is swept, and this machine's time."""
    axes = " × ".join(axis for axis in swept_axes(sweep.overrides) if axis not in ("seed", "repeat"))
    what = ": ".join(filter(None, (sweep.experiment, axes))) or sweep.name
    return f"{what} {sweep.started_at.astimezone():%Y-%m-%d %H:%M}"


def trial_name(trial: Trial, sweep: Sweep | None) -> str:
    """ "pensieve eviction=lru seed=0": the baseline, and what the sweep varies."""
    axes = swept_axes(sweep.overrides) if sweep else []
    parts = [f"{axis}={axis_value(trial, axis)}" for axis in axes if axis not in ("seed", "repeat", "baseline")]
    return " ".join(
        [trial.baseline, *parts, f"seed={trial.seed}", *([f"repeat={trial.repeat}"] if trial.repeat else [])]
    )


def trial_tags(trial: Trial, sweep: Sweep | None, reused: bool) -> dict[str, str]:
    command = sweep.command if sweep else (trial.environment or {}).get("command")
    return {
        "status": trial.status, "simulated": str(trial.simulated).lower(), "weights": str(trial.weights),
        **_source(command, trial.git_commit), **({"reused": "true"} if reused else {}),
        **({"error": trial.error} if trial.error else {}),
    }  # fmt: skip


def _source(command: str | None, commit: str | None) -> dict[str, str]:
    """The script of the command and the checkout's commit, under the names that the UI shows."""
    words = [word for word in shlex.split(command or "") if not PurePath(word).name.startswith("python")]
    found = {
        "mlflow.source.name": next(iter(words), None),
        "mlflow.source.git.commit": commit,
        "pensieve.command": command,
    }
    return {name: text for name, text in found.items() if text}


def is_param(name: str) -> bool:
    """Whether a dotted field says what was measured; others tell Hydra what to build, or how a trial is run and kept."""
    parts = name.split(".")
    return parts[0] not in _NOT_PARAMS and not any(_ONLY_HYDRA.fullmatch(part) for part in parts)
