"""Sweeps and trials as MLflow runs, copied from the results database, from which the MLflow store can be rebuilt."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import Row, or_, select

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
    LIVE,
    NOTE_TAG,
    PARENT_TAG,
    SUPERSEDED_TAG,
    SWEEP_TAG,
    TRIAL_TAG,
    data_files,
    is_param,
    note,
    series_of,
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


@or_none
def start_parent(outputs: Path, store: ResultsStore, sweep_id: int, experiment_name: str) -> str | None:
    """The sweep's parent run, running (again); its id is kept in the sweep's row."""
    client = client_of(outputs)
    with lock(outputs):
        sweep = store.sweep(sweep_id)
        experiment = experiment_id(client, outputs, experiment_name)
        run_id = sweep.mlflow_run_id if run_exists(client, sweep.mlflow_run_id) else None
        # A process that died after making the run, and before its id was in the sweep's row, left one to take up.
        run_id = run_id or first_run(client, experiment, **{SWEEP_TAG: str(sweep.id), KEY_TAG: sweep.key})
        if run_id is None:
            tags = sweep_tags(sweep)
            made = client.create_run(experiment, milliseconds(sweep.started_at), tags, sweep_name(sweep))
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
    log_batches(client, run_id, [], [], sweep_tags(sweep))
    logged = client.get_run(run_id).data.params
    params = params_of({key: text for key, text in leaves(sweep.overrides) if counts_for_sweep(key)})
    log_batches(client, run_id, [param for param in params if param.key not in logged], [])


def write_trial(
    outputs: Path,
    store: ResultsStore,
    trial_id: int,
    experiment_name: str,
    parent_run_id: str | None = None,
    reused: bool = False,
    fresh: bool = False,
) -> str:
    """Log a trial that ended as a run, under the sweep's parent if there is one; returns the run's id.

    A run that exists already is taken, and completed if a process died while logging it. Older attempts at the same trial
    under the same parent are tagged superseded. The run's id is written to the trial's row, except that the row of a
    reused trial keeps its first run. fresh: the store is new, and is not searched for existing runs. Raises what MLflow does.
    """
    client = client_of(outputs)
    trial = store.trial(trial_id)
    sweep = None if parent_run_id is None else store.sweep_of_run(parent_run_id)
    tags = trial_tags(trial, sweep, parent_run_id, reused)
    with lock(outputs):
        experiment = experiment_id(client, outputs, experiment_name)
        run_id, whole = (None, False) if fresh else _run_of(client, experiment, trial, parent_run_id)
        if run_id is None:
            made = client.create_run(experiment, milliseconds(trial.started_at), tags, trial_name(trial, sweep))
            run_id = str(made.info.run_id)
    if not whole:
        log_batches(client, run_id, [], [], tags)  # of a run that was begun while the trial ran, they have changed
        slo = slo_of_trial(trial) if sweep is None else slo_of_sweep(sweep.overrides)
        _fill_run(client, run_id, store, trial, slo)
    if trial.status == "completed" and parent_run_id and not fresh:
        _supersede(client, experiment, trial, parent_run_id, run_id)
    if trial.mlflow_run_id != run_id and (not reused or trial.mlflow_run_id is None):
        store.set_trial(trial_id, mlflow_run_id=run_id)
    return run_id


log_trial = or_none(write_trial)


def _fill_run(client: Any, run_id: str, store: ResultsStore, trial: Trial, slo: Slo) -> None:
    """slo: the objective of the sweep that the run belongs to."""
    columns = {key: getattr(trial, key) for key in _COLUMNS_AS_PARAMS}
    fields = {name: value for name, value in leaves(trial.config) if is_param(name) and not name.startswith(PREFIX)}
    asked = {f"{PREFIX}{name}": most for name, most in asdict(slo).items() if most is not None}
    values = {**fields, **asked, **{k: v for k, v in columns.items() if v is not None}}
    turns = store.turns_of(trial.id)
    log_batches(client, run_id, params_of(values), _metrics(trial, store, turns, slo))
    if not trial.simulated and not any(name.startswith(LIVE) for name in client.get_run(run_id).data.metrics):
        log_batches(client, run_id, [], _series(trial, store, turns))
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

    client.log_inputs(
        run_id,
        datasets=[
            DatasetInput(
                Dataset(
                    name=one["name"],
                    digest=sha256[:32],
                    source_type="local",
                    source=json.dumps({"uri": one["path"], "sha256": sha256}),
                    profile=json.dumps((trial.engine or {}).get("workload") or {}, default=str)[:16_000],
                ),
                [InputTag("mlflow.data.context", "workload")],
            )
            for sha256, (one, trial) in files.items()
        ],
    )


def _supersede(client: Any, experiment: str, trial: Trial, parent_run_id: str, run_id: str) -> None:
    """Tag the runs of older attempts: under one parent the attempt that completed last counts."""
    query = tagged(**{PARENT_TAG: parent_run_id, FINGERPRINT_TAG: trial.fingerprint})
    for run in client.search_runs([experiment], filter_string=query):
        older = int(run.data.tags[TRIAL_TAG]) < trial.id
        if run.info.run_id != run_id and older and SUPERSEDED_TAG not in run.data.tags:
            client.set_tag(run.info.run_id, SUPERSEDED_TAG, "true")


@or_none
def finish_parent(outputs: Path, store: ResultsStore, sweep_id: int, table: SweepTable, status: str) -> str | None:
    """Close the parent run with what the sweep found: the sentences as its description, the table as an artifact, medians
    and ratios as metrics, the data that was read; returns its id, None if there is none."""
    sweep = store.sweep(sweep_id)
    run_id, client = sweep.mlflow_run_id, client_of(outputs)
    if run_id is None or not run_exists(client, run_id):
        return None
    at_ms = milliseconds(sweep.finished_at) or milliseconds(sweep.started_at)
    assert at_ms is not None, "a sweep without a start"
    tags = {"status": status, **({NOTE_TAG: note(table.answers, sweep.command)} if table.answers else {})}
    log_batches(client, run_id, [], metrics_of(headline_metrics(table), at_ms), tags)
    _log_data(client, run_id, [job.trial for job in store.trials_of_sweep(sweep_id) if job.trial is not None])
    client.log_text(run_id, table.text(), "comparison.txt")
    _share_runs(client, client.get_run(run_id).info.experiment_id, run_id)
    client.set_terminated(run_id, _RUN_STATUS[status], milliseconds(sweep.finished_at))
    return run_id


SHOWN = ("ttft_ms_mean", "ttft_ms_p99", "throughput_output_tok_s", "miss_rate")
"""Columns of the UI's table of runs, which is sorted by the first. No more fit beside its assistant."""


def _share_runs(client: Any, experiment: str, run_id: str) -> None:
    """Keep the view of the runs below this one, as the UI's button "Share" does. An address alone cannot choose columns."""
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
    }
    client.set_experiment_tag(experiment, f"mlflow.sharedViewState.{run_id}", json.dumps(view))


@or_none
def address_of(outputs: Path, run_id: str) -> str:
    """Where the UI shows the runs below this one, the lowest TTFT first: what follows the address of the UI."""
    experiment = client_of(outputs).get_run(run_id).info.experiment_id
    query = {
        "viewStateShareKey": run_id,
        "workflowType": "machine_learning",
    }  # or the page has the menu of traces and prompts
    return f"/#/experiments/{experiment}/runs?{urlencode(query)}"


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
        found |= {
            f"ttft_ms_p50/{place}": row.ttft_p50_ms,
            f"ttft_ms_p99/{place}": row.ttft_p99_ms,
            f"ttft_ms_first_turn/{place}": row.ttft_first_ms,
            f"ttft_ms_last_turn/{place}": row.ttft_last_ms,
            f"throughput_output_tok_s/{place}": row.throughput_output_tok_s,
            f"gpu_hit_rate/{place}": row.gpu_hit_rate,
            f"cpu_hit_rate/{place}": row.cpu_hit_rate,
            f"miss_rate/{place}": row.miss_rate,
            f"bound_hit_rate/{place}": row.bound_hit_rate,
        }
    return found


@or_none
def log_drawn(outputs: Path, store: ResultsStore, sweep_id: int) -> str | None:
    """Log the sweep's figures and report, where they have been drawn, as artifacts of its parent run; returns the run's
    id, None if there is none."""
    run_id = store.sweep(sweep_id).mlflow_run_id
    if run_id is None or not run_exists(client := client_of(outputs), run_id):
        return None
    figures, report = figures_folder(outputs, sweep_id), report_file(outputs, sweep_id)
    if figures.is_dir():
        client.log_artifacts(run_id, str(figures), "figures")
    if report.is_file():
        client.log_text(run_id, report.read_text(encoding="utf-8"), "report.html")
    return run_id


@or_none
def log_text_of_sweep(outputs: Path, store: ResultsStore, sweep_id: int, text: str, name: str) -> str | None:
    """Log a text as the artifact `name` of the sweep's parent run; returns the run's id, None if there is none."""
    run_id = store.sweep(sweep_id).mlflow_run_id
    if run_id is None or not run_exists(client := client_of(outputs), run_id):
        return None
    client.log_text(run_id, text, name)
    return run_id


def rebuild_mlflow(outputs: Path, store: ResultsStore, say: Callable[[str], None]) -> int:
    """Log every sweep as a parent with its trials as children, and every other trial by itself; returns the number of runs.

    An existing store is moved to mlflow-before-<time>, never deleted. Running trials are left to their own process.
    Raises ResultsError where MLflow still cannot be written.
    """
    store.interrupt_dead()
    kept = move_away(outputs)
    if kept is not None:
        say(f"The MLflow store that was there is now in {kept}; delete it when you no longer need it.")
    forget_clients()  # a client of this process would write to the files where they are now
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
            finish_parent(outputs, store, sweep.id, sweep_table(store, sweep.id), sweep.status)
            log_drawn(outputs, store, sweep.id)
        say(f"Sweep {sweep.id} is in MLflow again.")
    for trial in alone:
        if trial.id not in linked:
            made += log_trial(outputs, store, trial.id, trial.experiment or "pensieve", fresh=True) is not None
    return made


def _run_of(client: Any, experiment: str, trial: Trial, parent_run_id: str | None) -> tuple[str | None, bool]:
    """The trial's run under this parent, or without one, and whether it was logged completely."""
    if parent_run_id is not None:
        run_id = first_run(client, experiment, **{PARENT_TAG: parent_run_id, TRIAL_TAG: str(trial.id)})
    else:
        run_id = trial.mlflow_run_id if run_exists(client, trial.mlflow_run_id) else None
        own = {TRIAL_TAG: str(trial.id), FINGERPRINT_TAG: trial.fingerprint}
        run_id = run_id or first_run(client, experiment, **own)
    return run_id, run_id is not None and client.get_run(run_id).info.status != "RUNNING"


def _metrics(trial: Trial, store: ResultsStore, turns: Sequence[Row[Any]], slo: Slo) -> list[Any]:
    at_ms = _ended_ms(trial)
    summary = {f"{m.name}/{m.label}" if m.label else m.name: m.value for m in store.metrics_of(trial.id, slo)}
    by_turn = ttft_by_turn(turns).items()
    return [
        *metrics_of(summary, at_ms),
        *(metric for turn, value in by_turn for metric in metrics_of({TTFT_BY_TURN: value}, at_ms, turn)),
    ]


def _series(trial: Trial, store: ResultsStore, turns: Sequence[Row[Any]]) -> list[Any]:
    """What mlflow_live would have logged while the trial ran."""
    began_ms = milliseconds(trial.started_at)
    assert began_ms is not None, "a trial without a start"
    series = series_of(turns, store.samples_of(trial.id))
    return [metric for step, values in series for metric in metrics_of(values, began_ms + 1000 * step, step)]


def _ended_ms(trial: Trial) -> int:
    at_ms = milliseconds(trial.finished_at) or milliseconds(trial.started_at)
    assert at_ms is not None, "a trial without a start"
    return at_ms


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
