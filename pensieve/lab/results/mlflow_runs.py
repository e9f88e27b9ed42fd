"""Sweeps and trials as MLflow runs, copied from the results database.

A run that is there already is found again, so each copy may be made twice: after a trial, after its sweep, by
`pensieve mlflow sync`. Nothing is copied while a trial runs.
"""

from __future__ import annotations

import getpass
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import datetime
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import urlencode

from sqlalchemy import select, union

from pensieve.errors import ResultsError
from pensieve.lab.results.findings import LAST_TTFT
from pensieve.lab.results.identity import counts_for_sweep
from pensieve.lab.results.mlflow_store import client_of, forget_clients, lock, move_away, or_none, reason_of, remote_url
from pensieve.lab.results.schema import Sweep, SweepTrial, Trial, sweep_result
from pensieve.lab.results.slo import PREFIX, slo_of_sweep, slo_of_trial
from pensieve.lab.results.store import ResultsStore, figures_folder, report_file
from pensieve.lab.results.sweep_table import SweepTable, sweep_table
from pensieve.lab.results.trials import axis_value, leaves, swept_axes

T = TypeVar("T")

TRIAL_TAG, SWEEP_TAG, KEY_TAG = "pensieve.trial_id", "pensieve.sweep_id", "pensieve.sweep_key"
PARENT_TAG, FINGERPRINT_TAG = "mlflow.parentRunId", "fingerprint"
TTFT_BY_TURN = "ttft_ms_by_turn"
SHOWN = ("ttft_ms_mean", "ttft_ms_p99", "throughput_output_tok_s", "miss_rate")
"""Columns of the UI's table of runs, which is sorted by the first. No more fit beside its assistant."""

_OF_ROWS = (
    "ttft_ms_p50", "ttft_ms_p99", "throughput_output_tok_s", "gpu_hit_rate", "cpu_hit_rate", "miss_rate", "bound_hit_rate",
)  # fmt: skip
_COLUMNS_AS_PARAMS = (
    "model", "baseline", "eviction", "scheduler", "cache", "workload", "hardware", "seed", "repeat", "weights", "dtype",
    "device", "device_count", "gpu_tokens", "cpu_tokens", "working_set_tokens",
)  # fmt: skip
_NOT_PARAMS = ("hydra", "tracking", "trial", "force", "resume", "sweep", "experiment", "experiment_name", "slo")
_ONLY_HYDRA = re.compile(r"_\w+_")  # _target_, _partial_, ...
_RUN_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
_RUNS_FIRST = {"mlflow.experimentKind": "custom_model_development"}  # else its page begins with an empty page of traces
_PARAMS, _METRICS = 100, 900  # of one call; MLflow allows 1000 of both together
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

    table: of the sweep, where the caller has it. Older attempts at the same trial are tagged superseded.
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
def log_drawn(outputs: Path, store: ResultsStore, sweep_id: int) -> str | None:
    """Log the sweep's figures and report, where they have been drawn, as artifacts of its run; None if it has no run."""
    figures, report = figures_folder(outputs, sweep_id), report_file(outputs, sweep_id)
    run_id = store.sweep(sweep_id).mlflow_run_id
    if figures.is_dir() and _exists(client := client_of(outputs), run_id):
        client.log_artifacts(run_id, str(figures), "figures")
    if report.is_file():
        log_text_of_sweep(outputs, store, sweep_id, report.read_text(encoding="utf-8"), "report.html")
    return run_id


@or_none
def log_text_of_sweep(outputs: Path, store: ResultsStore, sweep_id: int, text: str, name: str) -> str | None:
    """Log a text as the artifact `name` of the sweep's parent run; returns the run's id, None if there is none."""
    run_id = store.sweep(sweep_id).mlflow_run_id
    if run_id is None or not _exists(client := client_of(outputs), run_id):
        return None
    client.log_text(run_id, text, name)
    return run_id


def sync_mlflow(outputs: Path, store: ResultsStore, say: Callable[[str], None]) -> int:
    """Log what MLflow lacks: every sweep with its trials, and every other trial; returns how many trials were written.

    Running trials are left to their own process. Raises ResultsError where MLflow cannot be written, or lacks some after all
    others were written.
    """
    failed: list[str] = []

    def attempted(what: str, copy: Callable[[], T]) -> T | None:
        try:
            return copy()
        except Exception as error:
            failed.append(f"{what} ({reason_of(error)})")
            return None

    store.interrupt_dead()
    copy = attempted("no run", lambda: _Copy(outputs, store))
    if copy is None:
        raise ResultsError(f"MLflow cannot be written in {outputs}: {failed[0]}. Mend it and run again.")
    of_sweeps = union(select(SweepTrial.trial_id), select(sweep_result.c.trial_id))
    with store.database.reading() as connection:
        sweeps = connection.scalars(select(Sweep.id).order_by(Sweep.id)).all()
        others = select(Trial.id).where(Trial.status != "running", Trial.id.not_in(of_sweeps))
        alone = connection.scalars(others.order_by(Trial.id)).all()
    written = 0
    for sweep in map(store.sweep, sweeps):
        copied = attempted(f"sweep {sweep.id}", lambda sweep=sweep: copy.sweep(sweep))  # type: ignore[misc]
        if copied is not None:
            log_drawn(outputs, store, sweep.id)
            written += copied[1]
            say(f"Sweep {sweep.id} is in MLflow: {copied[1]} trials were missing.")
    for trial in map(store.trial, alone):
        run_id = attempted(f"trial {trial.id}", lambda trial=trial: copy.trial(trial))  # type: ignore[misc]
        written += run_id not in (None, trial.mlflow_run_id)
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


# Runs


class _Copy:
    """Writes runs. Each is looked for and then made under the lock of this machine."""

    def __init__(self, outputs: Path, store: ResultsStore, held: Held = nullcontext) -> None:
        self.client, self.outputs, self.store, self.held = client_of(outputs), outputs, store, held

    def sweep(self, sweep: Sweep, table: SweepTable | None = None) -> tuple[str, int]:
        """As copy_sweep."""
        client, store = self.client, self.store
        with self.held(), lock(self.outputs):
            experiment = self.experiment(sweep.name)
            parent = self._parent(experiment, sweep)
        ended = {
            trial.id: (trial, job.reused)
            for job in store.trials_of_sweep(sweep.id)
            for trial in (job.trial, job.last)
            if trial is not None and trial.status != "running"
        }
        known = client.search_runs([experiment], filter_string=_tagged(**{PARENT_TAG: parent}), max_results=50_000)
        whole = {run.data.tags.get(TRIAL_TAG) for run in known if run.info.status != "RUNNING"}
        missing = [
            trial_id
            for trial_id, (trial, _) in sorted(ended.items())
            if str(trial_id) not in whole or trial.mlflow_run_id is None
        ]
        for trial, reused in map(ended.__getitem__, missing):
            with self.held(), lock(self.outputs):
                self._run(experiment, trial, sweep, parent, reused)
            for run in known if trial.status == "completed" else ():
                tags = run.data.tags  # without ours where a person made the run
                if tags.get(FINGERPRINT_TAG) == trial.fingerprint and int(tags[TRIAL_TAG]) < trial.id:
                    client.set_tag(run.info.run_id, "superseded", "true")
        if sweep.status != "running":
            found = table or sweep_table(store, sweep.id)
            self._close(parent, experiment, sweep, found)
        return parent, len(missing)

    def trial(self, trial: Trial) -> str:
        """As copy_trial."""
        with self.held(), lock(self.outputs):
            return self._run(self.experiment(trial.experiment or "pensieve"), trial)

    def experiment(self, name: str) -> str:
        """The experiment's id, made or restored from deletion if need be. The caller holds the lock of this machine."""
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is None:  # a server decides itself where artifacts are
            location = None if remote_url() else (self.outputs.absolute() / "mlartifacts").as_uri()
            try:
                return str(self.client.create_experiment(name, artifact_location=location, tags=_RUNS_FIRST))
            except MlflowException:  # on a server another machine may be first
                found = self.client.get_experiment_by_name(name)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            self.client.restore_experiment(found.experiment_id)
        return str(found.experiment_id)

    def _found(
        self, experiment: str, run_id: str | None, own: Sequence[str], tags: Mapping[str, str], at: datetime, name: str
    ) -> Any:
        """This run, where it exists, else one with those of the tags that are its `own`, else a new one. A process may die
        after it made a run, and before the run's id was in the database."""
        if run_id is not None and _exists(self.client, run_id):
            return self.client.get_run(run_id)
        same = _tagged(**{tag: tags[tag] for tag in own if tag in tags})
        found = self.client.search_runs([experiment], filter_string=same, max_results=1)
        return found[0] if found else self.client.create_run(experiment, _milliseconds(at), tags, name)

    def _parent(self, experiment: str, sweep: Sweep) -> str:
        """The sweep's run, whose id is kept in the sweep's row. The caller holds the lock."""
        tags, own = sweep_tags(sweep), (SWEEP_TAG, KEY_TAG)
        run = self._found(experiment, sweep.mlflow_run_id, own, tags, sweep.started_at, sweep_name(sweep))
        run_id = str(run.info.run_id)
        if run_id != sweep.mlflow_run_id:
            self.store.set_sweep(sweep.id, mlflow_run_id=run_id)
        # MLflow never changes a parameter: overrides that may differ when the sweep goes on are in the command's tag alone.
        params = {key: text for key, text in leaves(sweep.overrides) if counts_for_sweep(key)}
        lacking = {key: text for key, text in params.items() if _allowed(key) not in run.data.params}
        _log(self.client, run_id, lacking, tags={**tags, "status": sweep.status})
        self.client.update_run(run_id, status="RUNNING")
        return run_id

    def _close(self, run_id: str, experiment: str, sweep: Sweep, table: SweepTable) -> None:
        """Close the parent run with what the sweep found: the sentences as its description, the table as an artifact, medians
        and ratios as metrics, and which columns the UI shows of the runs below it."""
        tags = {"mlflow.note.content": note(table.answers, sweep.command)} if table.answers else {}
        at_ms = _milliseconds(sweep.finished_at or sweep.started_at)
        _log(self.client, run_id, metrics=_metrics(headline_metrics(table), at_ms), tags=tags)
        self.client.log_text(run_id, table.text(), "comparison.txt")
        columns = [f"metrics.`{name}`" for name in SHOWN]
        view = {
            "searchFilter": _tagged(**{PARENT_TAG: run_id}),
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
        self,
        experiment: str,
        trial: Trial,
        sweep: Sweep | None = None,
        parent: str | None = None,
        reused: bool = False,
    ) -> str:
        """Log a trial, in a run that another process began and did not complete if there is one. The run's id is written to
        the trial's row, except that the row of a reused trial keeps its first run. The caller holds the lock."""
        tags, own = trial_tags(trial, sweep, parent, reused), (TRIAL_TAG, FINGERPRINT_TAG, PARENT_TAG)
        known = trial.mlflow_run_id if parent is None else None
        run = self._found(experiment, known, own, tags, trial.started_at, trial_name(trial, sweep))
        run_id = str(run.info.run_id)
        if run.info.status == "RUNNING":
            _fill_run(self.client, run_id, self.store, trial, sweep, tags)
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
    found, at_ms = store.metrics_of(trial.id, slo), _milliseconds(trial.finished_at or trial.started_at)
    metrics = _metrics({f"{m.name}/{m.label}" if m.label else m.name: m.value for m in found}, at_ms)
    for one in found:
        if one.name == "ttft_ms_p50" and one.label.startswith("turn="):
            metrics += _metrics({TTFT_BY_TURN: one.value}, at_ms, int(one.label.removeprefix("turn=")))
    _log(client, run_id, {**fields, **asked, **columns}, metrics, tags)
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


def _exists(client: Any, run_id: str | None) -> bool:
    """Whether the run exists and was not deleted."""
    from mlflow.exceptions import MlflowException

    try:
        return run_id is not None and bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException:
        return False


def _tagged(**tags: str) -> str:
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def _log(
    client: Any,
    run_id: str,
    params: Mapping[str, Any] | None = None,
    metrics: Sequence[Any] = (),
    tags: Mapping[str, str] | None = None,
) -> None:
    """In as few calls as MLflow's limits allow, since each is a transaction."""
    from mlflow.entities import Param, RunTag

    texts = {
        key: json.dumps(v, default=str) if isinstance(v, list | tuple) else str(v) for key, v in (params or {}).items()
    }
    parts = _parts([Param(_allowed(key), text[:_PARAM_LENGTH]) for key, text in sorted(texts.items())], _PARAMS)
    if tags:
        client.log_batch(run_id, tags=[RunTag(name, text[:_TAG_LENGTH]) for name, text in tags.items()])
    for some, others in zip_longest(parts, _parts(metrics, _METRICS), fillvalue=()):
        client.log_batch(run_id, params=some, metrics=others)


def _parts(values: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (values[start : start + most] for start in range(0, len(values), most))


def _metrics(values: Mapping[str, float | None], at_ms: int | None, step: int = 0) -> list[Any]:
    """Of the values that are known."""
    from mlflow.entities import Metric

    return [Metric(_allowed(name), value, at_ms, step) for name, value in values.items() if value is not None]


def _allowed(text: str) -> str:
    """A name that MLflow allows, for a parameter or a metric."""
    return re.sub(r"[^\w./ -]", "_", text)[:_NAME_LENGTH]


def _milliseconds(moment: datetime | None) -> int | None:
    return int(moment.timestamp() * 1000) if moment else None


# What MLflow shows: names, tags, parameters, numbers


def sweep_name(sweep: Sweep) -> str:
    """ "ablation_eviction: eviction × baseline 2026-11-22 03:31": the overlay, what is swept, and this machine's time."""
    axes = " × ".join(axis for axis in swept_axes(sweep.overrides) if axis not in ("seed", "repeat"))
    what = ": ".join(filter(None, (sweep.experiment, axes))) or sweep.name
    return f"{what} {sweep.started_at.astimezone():%Y-%m-%d %H:%M}"


def trial_name(trial: Trial, sweep: Sweep | None) -> str:
    """ "eviction=lru seed=0": what the sweep varies. The baseline stands first where it varies, or nothing else does."""
    axes = swept_axes(sweep.overrides) if sweep else []
    parts = [f"{axis}={axis_value(trial, axis)}" for axis in axes if axis not in ("seed", "repeat", "baseline")]
    if "baseline" in axes or not parts:
        parts.insert(0, trial.baseline)
    return " ".join([*parts, f"seed={trial.seed}", *([f"repeat={trial.repeat}"] if trial.repeat else [])])


def sweep_tags(sweep: Sweep) -> dict[str, str]:
    return {SWEEP_TAG: str(sweep.id), KEY_TAG: sweep.key, **_source(sweep.command, sweep.git_commit)}


def trial_tags(trial: Trial, sweep: Sweep | None, parent_run_id: str | None, reused: bool) -> dict[str, str]:
    environment, flags = trial.environment or {}, trial.flags or {}
    some = {
        "pensieve.git_dirty": "true" if (environment.get("git") or {}).get("dirty") else None,
        PARENT_TAG: parent_run_id,
        "reused": "true" if reused else None,
        "error": trial.error,
        "reproduces": str(flags["reproduces"]) if "reproduces" in flags else None,
    }
    return {
        TRIAL_TAG: str(trial.id), FINGERPRINT_TAG: trial.fingerprint, "status": trial.status,
        "simulated": str(trial.simulated).lower(), "weights": str(trial.weights),
        **_source(sweep.command if sweep else environment.get("command"), trial.git_commit),
        **{name: text for name, text in some.items() if text},
    }  # fmt: skip


def _source(command: str | None, commit: str | None) -> dict[str, str]:
    """What the UI shows: the user who copies to MLflow, since the database does not keep users, the script of the command,
    and the checkout's commit."""
    words = shlex.split(command or "")
    if words and PurePath(words[0]).name.startswith("python"):
        words = words[1:]
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = None
    found = {
        "mlflow.user": user, "mlflow.source.name": next(iter(words), None), "mlflow.source.git.commit": commit,
        "pensieve.command": command,
    }  # fmt: skip
    return {"mlflow.source.type": "LOCAL", **{name: text for name, text in found.items() if text}}


def is_param(name: str) -> bool:
    """Whether a dotted field says what was measured; others tell Hydra what to build, or how a trial is run and kept."""
    parts = name.split(".")
    return parts[0] not in _NOT_PARAMS and not any(_ONLY_HYDRA.fullmatch(part) for part in parts)


def note(answers: Sequence[str], command: str | None) -> str:
    """What a sweep found, as Markdown: the answer, what qualifies it, and the command."""
    rest = "\n".join(f"- {answer}" for answer in answers[1:])
    return "\n\n".join(filter(None, (f"**{answers[0]}**", rest, command and f"`{command}`")))


def headline_metrics(table: SweepTable) -> dict[str, float | None]:
    """The table's numbers as `quantity/where`. MLflow draws quantities of one name as one section of a run's page.

    ttft_speedup_over/<baseline>: the baseline's TTFT over Pensieve's at the last turn, as in the headline.
    """
    several = len({row.baseline for row in table.rows}) > 1
    found: dict[str, float | None] = {}
    for one in table.findings:
        if one.quantity == LAST_TTFT:
            place = " ".join([*one.at.values(), one.other])
            found |= {
                f"ttft_speedup_over/{place}": one.found.ratio,
                f"ttft_speedup_over_ci_low/{place}": one.found.ci_low,
                f"ttft_speedup_over_ci_high/{place}": one.found.ci_high,
            }
    for row in table.rows:
        place = " ".join([*row.group.values(), *([row.baseline] if several or not row.group else [])])
        ends = {"ttft_ms_first_turn": row.ttft_first_ms, "ttft_ms_last_turn": row.ttft_last_ms}
        values = {**ends, **{name: row.metrics[name] for name in _OF_ROWS}}
        found |= {f"{name}/{place}": value for name, value in values.items()}
    return found
