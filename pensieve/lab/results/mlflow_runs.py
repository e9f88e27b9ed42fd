"""Sweeps and trials as MLflow runs, copied from the results database.

A run is found again by its tags, so each copy may be made twice: after a trial, after its sweep, by `pensieve mlflow sync`.
Nothing is copied while a trial runs.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import select, union

from pensieve.errors import ResultsError
from pensieve.lab.results.identity import counts_for_sweep
from pensieve.lab.results.mlflow_store import client_of, forget_clients, lock, move_away, or_none, reason_of, remote_url
from pensieve.lab.results.schema import Sweep, SweepTrial, Trial, sweep_result
from pensieve.lab.results.slo import PREFIX, slo_of_sweep, slo_of_trial
from pensieve.lab.results.store import ResultsStore, figures_folder, report_file
from pensieve.lab.results.sweep_table import SweepTable, sweep_table
from pensieve.lab.results.trials import axis_value, leaves, swept_axes

TRIAL_TAG, SWEEP_TAG, KEY_TAG = "pensieve.trial_id", "pensieve.sweep_id", "pensieve.sweep_key"
PARENT_TAG, FINGERPRINT_TAG = "mlflow.parentRunId", "fingerprint"
TTFT_BY_TURN = "ttft_ms_by_turn"
SHOWN = ("ttft_ms_mean", "ttft_ms_p99", "throughput_output_tok_s", "miss_rate")
"""Columns of the UI's table of runs, which is sorted by the first. No more fit beside its assistant."""

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
def address_of(outputs: Path, run_id: str) -> str:
    """Where the UI shows the runs below this one, the lowest TTFT first: what follows the address of the UI."""
    experiment = client_of(outputs).get_run(run_id).info.experiment_id
    # Without the type of the workflow the page is that of traces.
    query = urlencode({"viewStateShareKey": run_id, "workflowType": "machine_learning"})
    return f"/#/experiments/{experiment}/runs?{query}"


@or_none
def log_drawn(outputs: Path, store: ResultsStore, sweep_id: int) -> None:
    """Log the sweep's figures and report, where they have been drawn, as artifacts of its run."""
    figures, report = figures_folder(outputs, sweep_id), report_file(outputs, sweep_id)
    run_id = store.sweep(sweep_id).mlflow_run_id
    if run_id is not None and figures.is_dir():
        client_of(outputs).log_artifacts(run_id, str(figures), "figures")
    if report.is_file():
        log_text_of_sweep(outputs, store, sweep_id, report.read_text(encoding="utf-8"), "report.html")


@or_none
def log_text_of_sweep(outputs: Path, store: ResultsStore, sweep_id: int, text: str, name: str) -> str | None:
    """Log a text as the artifact `name` of the sweep's parent run; returns the run's id, None if there is none."""
    run_id = store.sweep(sweep_id).mlflow_run_id
    if run_id is not None:
        client_of(outputs).log_text(run_id, text, name)
    return run_id


def sync_mlflow(outputs: Path, store: ResultsStore, say: Callable[[str], None]) -> int:
    """Log what MLflow lacks: every sweep with its trials, and every other trial; returns how many trials were written.

    Running trials are left to their own process. Raises ResultsError where MLflow cannot be written, or lacks some after all
    others were written.
    """
    store.interrupt_dead()
    of_sweeps = union(select(SweepTrial.trial_id), select(sweep_result.c.trial_id))
    with store.database.reading() as connection:
        sweeps = connection.scalars(select(Sweep.id).order_by(Sweep.id)).all()
        others = select(Trial.id).where(Trial.status != "running", Trial.id.not_in(of_sweeps))
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
    """As sync_mlflow, into a new store. One that is there is moved to mlflow-before-<time>, never deleted."""
    kept = move_away(outputs)
    if kept is not None:
        say(f"The MLflow store that was there is now in {kept}; delete it when you no longer need it.")
    forget_clients()  # a client of this process would write to the files where they are now
    return sync_mlflow(outputs, store, say)


class _Copy:
    """Writes runs. Each is looked for and then made under the lock of this machine."""

    def __init__(self, outputs: Path, store: ResultsStore, held: Held = nullcontext) -> None:
        self.client, self.outputs, self.store, self.held = client_of(outputs), outputs, store, held

    def sweep(self, sweep: Sweep, table: SweepTable | None = None) -> tuple[str, int]:
        """As copy_sweep."""
        client, store = self.client, self.store
        with self.held(), lock(self.outputs):
            experiment = self._experiment(sweep.name)
            parent = self._parent(experiment, sweep)
        ended = {
            trial.id: (trial, job.reused)
            for job in store.trials_of_sweep(sweep.id)
            for trial in (job.trial, job.last)
            if trial is not None and trial.status != "running"
        }
        known = client.search_runs([experiment], filter_string=_tagged({PARENT_TAG: parent}), max_results=50_000)
        whole = {run.data.tags.get(TRIAL_TAG) for run in known if run.info.status != "RUNNING"}
        missing = [key for key in sorted(ended) if str(key) not in whole or ended[key][0].mlflow_run_id is None]
        for trial, reused in map(ended.__getitem__, missing):
            with self.held(), lock(self.outputs):
                self._run(experiment, trial, sweep, parent, reused)
        if sweep.status != "running":
            self._close(parent, experiment, sweep, table or sweep_table(store, sweep.id))
        return parent, len(missing)

    def trial(self, trial: Trial) -> str:
        """As copy_trial."""
        with self.held(), lock(self.outputs):
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
        _log(self.client, run_id, {} if run.data.params else params, tags=tags)
        self.client.update_run(run_id, status="RUNNING")
        return run_id

    def _close(self, run_id: str, experiment: str, sweep: Sweep, table: SweepTable) -> None:
        """Close the parent run with what the sweep found: the sentences as its description, the table as an artifact, and
        which columns the UI shows of the runs below it."""
        if table.answers:
            self.client.set_tag(run_id, "mlflow.note.content", "\n\n".join(table.answers)[:_TAG_LENGTH])
        self.client.log_text(run_id, table.text(), "comparison.txt")
        columns = [f"metrics.`{name}`" for name in SHOWN]
        view = {
            "searchFilter": _tagged({PARENT_TAG: run_id}),
            "orderByKey": columns[0],
            "orderByAsc": True,
            "startTime": "ALL",
            "lifecycleFilter": "Active",
            "modelVersionFilter": "All Runs",
            "datasetsFilter": [],
            "selectedColumns": columns,
        }  # as the UI's button "Share" keeps it: an address alone cannot choose columns
        self.client.set_experiment_tag(experiment, f"mlflow.sharedViewState.{run_id}", json.dumps(view))
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
    _log(client, run_id, {**fields, **asked, **columns}, metrics, tags, at_ms)
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


# In MLflow's terms


def _tagged(tags: Mapping[str, str]) -> str:
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def _log(
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


# What MLflow shows: names, tags, parameters


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
