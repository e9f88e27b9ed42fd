"""Sweeps and trials in MLflow: made, found again, completed by the next who copies them, made anew from the database."""

import logging
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import ResultsError
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results import mlflow_runs
from pensieve.lab.results.mlflow_runs import copy_sweep, copy_trial, sync_mlflow
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.store import ResultsStore, open_store
from pensieve.lab.results.sweep_table import sweep_table
from tests.results.test_database import FORK, in_another_process
from tests.results.trials import add_trial, conversation_turns, open_sweep, trial_fields

TTFT = [40.0, 42.0, 44.0]


class Died(BaseException):
    """What a kill looks like to the code that it hits."""


def died(*_args: object) -> None:
    raise Died


def children(outputs: Path, store: ResultsStore, sweep: int) -> dict[int, Any]:
    """The runs below the sweep's, by trial."""
    client, parent = mlflow_runs.client_of(outputs), store.sweep(sweep).mlflow_run_id
    experiment = client.get_run(parent).info.experiment_id
    found = client.search_runs([experiment], filter_string=f"tags.`mlflow.parentRunId` = '{parent}'")
    return {int(run.data.tags["pensieve.trial_id"]): run for run in found}


@pytest.mark.slow
def test_a_sweep_becomes_a_parent_with_children(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(mlflow_runs.URL_ENV, "http://localhost:1")
        assert mlflow_runs.client_of(tmp_path).tracking_uri == "http://localhost:1", "a server of one's own"
    client, store = mlflow_runs.client_of(tmp_path), open_store(tmp_path)
    open_sweep(store, seed="0,1", **{"workload.pressure": "1,2", "trial.timeout_s": "100"})
    assert copy_sweep(tmp_path, store, 1) == 0  # it is taken up with another timeout, which is no parameter
    sweep = open_sweep(store, seed="0,1", **{"workload.pressure": "1,2", "trial.timeout_s": "200"})
    config = {**trial_fields()["config"], "odd=key": "x", "w": {"_target_": "x", "none": None}}
    config |= {f"k{i}": i for i in range(150)}
    trial = add_trial(
        store, sweep, 0, "pensieve", conversation_turns(TTFT), {"ttft_ms_mean": 42.0}, tokens=tmp_path, config=config
    )
    store.add_metrics(trial, [MetricValue("ttft_ms_p50", ms, f"turn={n}") for n, ms in ((1, 44.0), (2, 46.2))])
    assert copy_sweep(tmp_path, store, sweep) == 1
    parent, run = store.sweep(sweep).mlflow_run_id, store.trial(trial).mlflow_run_id
    store.set_sweep(sweep, mlflow_run_id=None)  # as if the process had died before it could note either
    store.set_trial(trial, mlflow_run_id=None)
    assert copy_sweep(tmp_path, store, sweep) == 0
    assert (store.sweep(sweep).mlflow_run_id, store.trial(trial).mlflow_run_id) == (parent, run)
    of_sweep = client.get_run(parent)
    assert of_sweep.info.status == "RUNNING" and of_sweep.info.run_name.startswith("pensieve: workload.pressure 20")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"

    run = children(tmp_path, store, sweep)[trial]
    assert (run.info.status, run.info.run_name) == ("FINISHED", "pensieve seed=0 workload.pressure=2.0")
    assert run.data.tags["mlflow.source.name"] == "run.py -m"
    asked = {"baseline": "pensieve", "cache": "demo", "cache.gpu": "4096 tokens", "odd_key": "x", "k149": "149"}
    assert {name: run.data.params[name] for name in asked} == asked
    assert not [name for name in run.data.params if name.startswith(("hydra", "w."))]
    assert (run.data.metrics["ttft_ms_mean"], run.data.metrics["gpu_hit_rate"]) == (42.0, 0.5)
    steps = {m.step: m.value for m in client.get_metric_history(run.info.run_id, mlflow_runs.TTFT_BY_TURN)}
    assert steps == {1: 44.0, 2: 46.2}
    assert sorted(a.path for a in client.list_artifacts(run.info.run_id)) == ["config.json", "turns.parquet"]

    # A process that dies while it logs leaves a run half filled; the next one fills it, and makes no second.
    half = add_trial(store, sweep, 1, "pensieve", conversation_turns(TTFT), seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "turns_of", died)
        with pytest.raises(Died):
            copy_sweep(tmp_path, store, sweep)
    assert store.trial(half).mlflow_run_id is None
    assert copy_sweep(tmp_path, store, sweep) == 1
    whole = children(tmp_path, store, sweep)
    assert sorted(whole) == [trial, half]
    assert (whole[half].info.status, whole[half].data.metrics["gpu_hit_rate"]) == ("FINISHED", 0.5)
    # Another attempt at the same trial takes the place of the first.
    again = add_trial(store, sweep, 1, "pensieve", conversation_turns(TTFT), seed=1)
    failed = store.begin_trial(trial_fields("failed"))
    store.link(sweep, failed, 2, reused=False)
    store.finish_trial(failed, "failed", error="It broke; mend it.")
    store.set_sweep(sweep, status="failed")
    assert copy_sweep(tmp_path, store, sweep) == 2
    below = children(tmp_path, store, sweep)
    assert sorted(below) == [trial, half, again, failed]
    assert (below[failed].info.status, below[failed].data.tags["error"]) == ("FAILED", "It broke; mend it.")

    assert client.get_run(parent).info.status == "FAILED"
    found = tmp_path / "mlartifacts" / parent / "artifacts" / "comparison.txt"
    assert found.read_text() == sweep_table(store, sweep).text()
    assert not [r for r in caplog.records if r.name.startswith(("mlflow", "alembic"))]
    assert not list(Path.cwd().glob("mlruns"))


def test_without_mlflow_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    sweep = open_sweep(store)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    mlflow_runs.say_not_logged.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert copy_sweep(tmp_path, store, sweep) is None
        assert copy_trial(tmp_path, store, store.begin_trial(trial_fields())) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "mlflow" in said


@pytest.mark.slow
def test_what_mlflow_missed_is_written_once_its_store_was_moved_away(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    first = open_sweep(store, 2, seed="0", baseline="pensieve,stateless", **{"slo.ttft_ms": "1000"})
    done = add_trial(store, first, 0, "pensieve", conversation_turns(TTFT, sessions=1), {"ttft_ms_mean": 42.0})
    store.set_trial(done, measure_start_s=0.0, measure_end_s=1000.0)
    # As in life, by a process of its own: MLflow keeps connections to the file it once opened.
    assert in_another_process(copy_sweep, tmp_path, store, first) == "None"
    (tmp_path / "mlflow.db").unlink()
    failed = store.begin_trial(trial_fields(store.trial(done).fingerprint))
    store.link(first, failed, 0, reused=False)
    store.finish_trial(failed, "failed", error="It broke; mend it.")
    began = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    store.set_sweep(first, status="failed", started_at=began, finished_at=began + timedelta(minutes=2))
    second = store.open_sweep("another", "chat", None, None, {"slo.ttft_ms": "43"}, 1, "host", None)
    store.link(second, done, 0, reused=True)
    store.set_sweep(second, status="completed")
    alone = store.begin_trial(trial_fields("alone"))
    store.finish_trial(alone, "interrupted")
    running = store.begin_trial(trial_fields("running"))

    fill = mlflow_runs._fill_run

    def full(client: Any, run_id: str, store: ResultsStore, trial: Trial, *given: Any) -> None:
        if trial.id == alone:
            raise OSError("no space left")
        fill(client, run_id, store, trial, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow_runs, "_fill_run", full)
        with pytest.raises(ResultsError, match=rf"^3 trials were .* not trial {alone}\."):
            sync_mlflow(tmp_path, store)
    assert sync_mlflow(tmp_path, store) == 1
    assert sync_mlflow(tmp_path, store) == 0
    client, below = mlflow_runs.client_of(tmp_path), children(tmp_path, store, first)
    parent = client.get_run(store.sweep(first).mlflow_run_id).info
    began_ms = int(began.timestamp() * 1000)
    assert (parent.status, parent.start_time, parent.end_time) == ("FAILED", began_ms, began_ms + 120_000)
    assert {number: run.info.status for number, run in below.items()} == {done: "FINISHED", failed: "FAILED"}
    assert below[done].data.metrics["ttft_ms_mean"] == 42.0
    reused = children(tmp_path, store, second)[done]
    assert (reused.data.tags["reused"], reused.data.params["slo.ttft_ms"]) == ("true", "43.0")
    attained = [run.data.metrics["slo_attainment"] for run in (below[done], reused)]
    assert attained == [1.0, pytest.approx(2 / 3)], "each sweep has that of its own objective"
    assert store.trial(done).mlflow_run_id == below[done].info.run_id
    own = client.get_run(store.trial(alone).mlflow_run_id)
    assert own.info.status == "KILLED" and "mlflow.parentRunId" not in own.data.tags
    assert own.info.experiment_id != parent.experiment_id
    assert store.trial(running).mlflow_run_id is None


@pytest.mark.slow
def test_processes_that_copy_one_sweep_make_each_run_once(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    sweep = open_sweep(store, 4)
    trials = [add_trial(store, sweep, n, "pensieve", conversation_turns([1.0]), seed=n) for n in range(4)]

    def work() -> None:
        copy_sweep(tmp_path, open_store(tmp_path), sweep)

    processes = [FORK.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    below = children(tmp_path, store, sweep)
    assert sorted(below) == trials
    assert all(run.info.status == "FINISHED" and "gpu_hit_rate" in run.data.metrics for run in below.values())
    assert all(store.trial(trial).mlflow_run_id == below[trial].info.run_id for trial in trials)
