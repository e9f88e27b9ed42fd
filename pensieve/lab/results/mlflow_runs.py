"""Sweeps and trials as MLflow runs, copied from the results database.

A run that is there already is found again, so each copy may be made twice: after a trial, after its sweep, by
`pensieve mlflow sync`. Nothing is copied while a trial runs.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import Row, select, union

from pensieve.errors import ResultsError
from pensieve.lab.metrics import Slo
from pensieve.lab.results.findings import LAST_TTFT
from pensieve.lab.results.frame import counts
from pensieve.lab.results.identity import counts_for_sweep
from pensieve.lab.results.mlflow_store import (
    client_of,
    ensure_store,
    experiment_id,
    first_run,
    forget_clients,
    lock,
    log_batches,
    metrics_of,
    milliseconds,
    move_away,
    or_none,
    params_of,
    run_exists,
    tagged,
)
from pensieve.lab.results.mlflow_view import (
    FINGERPRINT_TAG,
    KEY_TAG,
    NOTE_TAG,
    PARENT_TAG,
    SUPERSEDED_TAG,
    SWEEP_TAG,
    TRIAL_TAG,
    data_files,
    is_param,
    note,
    sweep_name,
    sweep_tags,
    trial_name,
    trial_tags,
)
from pensieve.lab.results.schema import Sweep, SweepTrial, Trial, sweep_result
from pensieve.lab.results.slo import PREFIX, slo_of_sweep, slo_of_trial
from pensieve.lab.results.store import ResultsStore, figures_folder, report_file
from pensieve.lab.results.sweep_table import SweepTable, sweep_table
from pensieve.lab.results.trials import leaves
from pensieve.lab.statistics import median

TTFT_BY_TURN = "ttft_ms_by_turn"
_COLUMNS_AS_PARAMS = (
    "model", "baseline", "eviction", "scheduler", "cache", "workload", "hardware", "seed", "repeat", "weights", "dtype",
    "device", "device_count", "gpu_tokens", "cpu_tokens", "working_set_tokens",
)  # fmt: skip
_RUN_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}

Held = Callable[[], AbstractContextManager[object]]
"""A block that Ctrl-C does not end: no run is left half written."""


# -- sweeps -------------------------------------------------------------------------------------------------------------

_SHOWN = (
    "ttft_ms_p50", "ttft_ms_p99", "throughput_output_tok_s", "gpu_hit_rate", "cpu_hit_rate", "miss_rate", "bound_hit_rate",
)  # fmt: skip
"""Of each row of a sweep's table, in its parent run."""


@or_none
def copy_sweep(
    outputs: Path, store: ResultsStore, sweep_id: int, table: SweepTable | None = None, held: Held = nullcontext
) -> tuple[str, int]:
    """Log a sweep as a parent run, and as its children the trials that have ended: what each job shows, and its last
    attempt. A sweep that has ended closes its run with what it found. Returns the parent's id and how many trials were
    written.

    table: of the sweep, where the caller has it. Older attempts at the same trial are tagged superseded.
    """
    client, sweep = client_of(outputs), store.sweep(sweep_id)
    with held(), lock(outputs):
        experiment, parent = _parent(client, outputs, store, sweep)
    jobs = store.trials_of_sweep(sweep_id)
    ended = {
        trial.id: (trial, job.reused)
        for job in jobs
        for trial in (job.trial, job.last)
        if trial is not None and trial.status != "running"
    }
    known = client.search_runs([experiment], filter_string=tagged(**{PARENT_TAG: parent}), max_results=50_000)
    whole = {run.data.tags.get(TRIAL_TAG) for run in known if run.info.status != "RUNNING"}
    lacking = (
        number for number, (trial, _) in ended.items() if str(number) not in whole or trial.mlflow_run_id is None
    )
    missing = [ended[number] for number in sorted(lacking)]
    for trial, reused in missing:
        with held(), lock(outputs):
            _write_trial(client, experiment, store, trial, sweep, parent, reused)
        for run in known if trial.status == "completed" else ():
            tags = run.data.tags  # without ours where a person made the run
            if tags.get(FINGERPRINT_TAG) == trial.fingerprint and int(tags[TRIAL_TAG]) < trial.id:
                client.set_tag(run.info.run_id, SUPERSEDED_TAG, "true")
    if sweep.status != "running":
        _close(client, parent, experiment, sweep, table or sweep_table(store, sweep_id), [t for t, _ in ended.values()])
    return parent, len(missing)


def _parent(client: Any, outputs: Path, store: ResultsStore, sweep: Sweep) -> tuple[str, str]:
    """The experiment's id, and that of the sweep's run, which is kept in the sweep's row. The caller holds the lock."""
    experiment = experiment_id(client, outputs, sweep.name)
    run_id = sweep.mlflow_run_id if run_exists(client, sweep.mlflow_run_id) else None
    # A process that died after making the run, and before its id was in the sweep's row, left one to take up.
    run_id = run_id or first_run(client, experiment, **{SWEEP_TAG: str(sweep.id), KEY_TAG: sweep.key})
    if run_id is None:
        made = client.create_run(experiment, milliseconds(sweep.started_at), sweep_tags(sweep), sweep_name(sweep))
        run_id = str(made.info.run_id)
    if run_id != sweep.mlflow_run_id:
        store.set_sweep(sweep.id, mlflow_run_id=run_id)
    # MLflow never changes a parameter: overrides that may differ when the sweep is resumed are in the command's tag alone.
    logged = client.get_run(run_id).data.params
    params = params_of({key: text for key, text in leaves(sweep.overrides) if counts_for_sweep(key)})
    tags = {**sweep_tags(sweep), "status": sweep.status}
    log_batches(client, run_id, [param for param in params if param.key not in logged], [], tags)
    client.update_run(run_id, status="RUNNING")
    return experiment, run_id


SHOWN = ("ttft_ms_mean", "ttft_ms_p99", "throughput_output_tok_s", "miss_rate")
"""Columns of the UI's table of runs, which is sorted by the first. No more fit beside its assistant."""


def _close(client: Any, run_id: str, experiment: str, sweep: Sweep, table: SweepTable, trials: Sequence[Trial]) -> None:
    """Close the parent run with what the sweep found: the sentences as its description, the table as an artifact, medians
    and ratios as metrics, the data that was read, and which columns the UI shows of the runs below it."""
    tags = {NOTE_TAG: note(table.answers, sweep.command)} if table.answers else {}
    at_ms = milliseconds(sweep.finished_at or sweep.started_at)
    log_batches(client, run_id, [], metrics_of(headline_metrics(table), at_ms), tags)
    _log_data(client, run_id, trials)
    client.log_text(run_id, table.text(), "comparison.txt")
    columns = [f"metrics.`{name}`" for name in SHOWN]
    view = {
        "searchFilter": tagged(**{PARENT_TAG: run_id}),
        "orderByKey": columns[0],
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "modelVersionFilter": "All Runs",
        "datasetsFilter": [],
        "selectedColumns": columns,
    }  # as the UI's button "Share" keeps it: an address alone cannot choose columns
    client.set_experiment_tag(experiment, f"mlflow.sharedViewState.{run_id}", json.dumps(view))
    client.set_terminated(run_id, _RUN_STATUS[sweep.status], milliseconds(sweep.finished_at))


@or_none
def address_of(outputs: Path, run_id: str) -> str:
    """Where the UI shows the runs below this one, the lowest TTFT first: what follows the address of the UI."""
    experiment = client_of(outputs).get_run(run_id).info.experiment_id
    query = urlencode(
        {"viewStateShareKey": run_id, "workflowType": "machine_learning"}
    )  # or the page is that of traces
    return f"/#/experiments/{experiment}/runs?{query}"


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
        values = {**ends, **{name: row.metrics[name] for name in _SHOWN}}
        found |= {f"{name}/{place}": value for name, value in values.items()}
    return found


@or_none
def log_drawn(outputs: Path, store: ResultsStore, sweep_id: int) -> str | None:
    """Log the sweep's figures and report, where they have been drawn, as artifacts of its run; None if it has no run."""
    figures, report = figures_folder(outputs, sweep_id), report_file(outputs, sweep_id)
    run_id = store.sweep(sweep_id).mlflow_run_id
    if figures.is_dir() and run_exists(client := client_of(outputs), run_id):
        client.log_artifacts(run_id, str(figures), "figures")
    if report.is_file():
        log_text_of_sweep(outputs, store, sweep_id, report.read_text(encoding="utf-8"), "report.html")
    return run_id


@or_none
def log_text_of_sweep(outputs: Path, store: ResultsStore, sweep_id: int, text: str, name: str) -> str | None:
    """Log a text as the artifact `name` of the sweep's parent run; returns the run's id, None if there is none."""
    run_id = store.sweep(sweep_id).mlflow_run_id
    if run_id is None or not run_exists(client := client_of(outputs), run_id):
        return None
    client.log_text(run_id, text, name)
    return run_id


# -- trials -------------------------------------------------------------------------------------------------------------


@or_none
def copy_trial(outputs: Path, store: ResultsStore, trial_id: int, held: Held = nullcontext) -> str:
    """Log a trial of no sweep that has ended; returns the run's id."""
    client, trial = client_of(outputs), store.trial(trial_id)
    with held(), lock(outputs):
        experiment = experiment_id(client, outputs, trial.experiment or "pensieve")
        return _write_trial(client, experiment, store, trial, None, None, reused=False)


def _write_trial(
    client: Any,
    experiment: str,
    store: ResultsStore,
    trial: Trial,
    sweep: Sweep | None,
    parent: str | None,
    reused: bool,
) -> str:
    """Log a trial, in a run that another process began and did not complete if there is one. The run's id is written to the
    trial's row, except that the row of a reused trial keeps its first run. The caller holds the lock."""
    tags = trial_tags(trial, sweep, parent, reused)
    own = {TRIAL_TAG: str(trial.id), FINGERPRINT_TAG: trial.fingerprint, **({PARENT_TAG: parent} if parent else {})}
    run_id = trial.mlflow_run_id if parent is None and run_exists(client, trial.mlflow_run_id) else None
    run_id = run_id or first_run(client, experiment, **own)
    if run_id is None:
        made = client.create_run(experiment, milliseconds(trial.started_at), tags, trial_name(trial, sweep))
        run_id, begun = str(made.info.run_id), True
    elif begun := client.get_run(run_id).info.status == "RUNNING":
        log_batches(client, run_id, [], [], tags)
    if begun:
        _fill_run(client, run_id, store, trial, slo_of_sweep(sweep.overrides) if sweep else slo_of_trial(trial))
    if trial.mlflow_run_id != run_id and (not reused or trial.mlflow_run_id is None):
        store.set_trial(trial.id, mlflow_run_id=run_id)
    return run_id


def _fill_run(client: Any, run_id: str, store: ResultsStore, trial: Trial, slo: Slo) -> None:
    """slo: the objective of the sweep that the run belongs to."""
    columns = {key: getattr(trial, key) for key in _COLUMNS_AS_PARAMS}
    fields = {name: value for name, value in leaves(trial.config) if is_param(name) and not name.startswith(PREFIX)}
    asked = {f"{PREFIX}{name}": most for name, most in asdict(slo).items() if most is not None}
    values = {**fields, **asked, **{k: v for k, v in columns.items() if v is not None}}
    turns, at_ms = store.turns_of(trial.id), milliseconds(trial.finished_at or trial.started_at)
    summary = {f"{m.name}/{m.label}" if m.label else m.name: m.value for m in store.metrics_of(trial.id, slo)}
    metrics = metrics_of(summary, at_ms)
    for turn, value in ttft_by_turn(turns).items():
        metrics += metrics_of({TTFT_BY_TURN: value}, at_ms, turn)
    log_batches(client, run_id, params_of(values), metrics)
    _log_data(client, run_id, [trial])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, content in (("config.json", trial.config), ("environment.json", trial.environment)):
            (folder / file).write_text(json.dumps(content, indent=2, default=str), encoding="utf-8")
        _write_turns(folder / "turns.parquet", turns)
        client.log_artifacts(run_id, name)
    for artifact in store.artifacts_of(trial.id):
        if artifact.kind != "tokens" and artifact.path.is_file():  # tokens would double what the disk holds
            client.log_artifact(run_id, str(artifact.path), artifact.kind)
    client.set_terminated(run_id, _RUN_STATUS[trial.status], milliseconds(trial.finished_at))


def _log_data(client: Any, run_id: str, trials: Sequence[Trial]) -> None:
    """The files that the workloads of these trials read, as MLflow datasets; one that is logged already stays as it is."""
    files = {one["sha256"]: (one, trial) for trial in trials for one in data_files(trial)}
    if not files:
        return
    from mlflow.entities import Dataset, DatasetInput, InputTag

    found = []
    for sha256, (one, trial) in files.items():
        source = json.dumps({"uri": one["path"], "sha256": sha256})
        profile = json.dumps((trial.engine or {}).get("workload") or {}, default=str)[:16_000]
        data = Dataset(one["name"], sha256[:32], "local", source, profile=profile)
        found.append(DatasetInput(data, [InputTag("mlflow.data.context", "workload")]))
    client.log_inputs(run_id, datasets=found)


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


# -- everything ---------------------------------------------------------------------------------------------------------


def sync_mlflow(outputs: Path, store: ResultsStore, say: Callable[[str], None]) -> int:
    """Log what MLflow lacks: every sweep with its trials, and every other trial; returns how many trials were written.

    Running trials are left to their own process. Raises ResultsError where MLflow cannot be written.
    """
    store.interrupt_dead()
    if ensure_store(outputs) is None:
        raise ResultsError(f"MLflow cannot be written in {outputs}; the warning above says why. Mend it and run again.")
    of_sweeps = union(select(SweepTrial.trial_id), select(sweep_result.c.trial_id))
    with store.database.reading() as connection:
        sweeps = connection.scalars(select(Sweep.id).order_by(Sweep.id)).all()
        others = select(Trial.id, Trial.mlflow_run_id).where(Trial.status != "running", Trial.id.not_in(of_sweeps))
        alone = connection.execute(others.order_by(Trial.id)).all()
    written = 0
    for sweep_id in sweeps:
        copied = copy_sweep(outputs, store, sweep_id)
        if copied is None:
            raise ResultsError(f"Sweep {sweep_id} cannot be written to MLflow; the warning above says why.")
        log_drawn(outputs, store, sweep_id)
        written += copied[1]
        say(f"Sweep {sweep_id} is in MLflow: {copied[1]} trials were missing.")
    return written + sum(copy_trial(outputs, store, one.id) not in (None, one.mlflow_run_id) for one in alone)


def rebuild_mlflow(outputs: Path, store: ResultsStore, say: Callable[[str], None]) -> int:
    """As sync_mlflow, into a new store. One that is there is moved to mlflow-before-<time>, never deleted."""
    kept = move_away(outputs)
    if kept is not None:
        say(f"The MLflow store that was there is now in {kept}; delete it when you no longer need it.")
    forget_clients()  # a client of this process would write to the files where they are now
    return sync_mlflow(outputs, store, say)
