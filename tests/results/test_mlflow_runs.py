from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.errors import ResultsError
from pensieve.lab.metrics import Measurement, summarise
from pensieve.lab.results import mlflow_runs, mlflow_store
from pensieve.lab.results.store import open_store
from pensieve.lab.results.sweep_table import sweep_table
from tests.results.test_database import FORK
from tests.results.trials import add_trial, conversation_turns, open_sweep, trial_fields

TTFT = [40.0, 42.0, 44.0]


class Died(BaseException):
    """What a kill looks like to the code that it hits."""


def died(*_args: object) -> None:
    raise Died


def test_mlflow_and_the_metrics_have_one_median(tmp_path: Path) -> None:
    """Of an even number of conversations MLflow interpolated, where metrics and figures did not."""
    store = open_store(tmp_path)
    sweep = open_sweep(store, seed="0", baseline="pensieve")
    turns = conversation_turns(TTFT, sessions=4)
    trial = add_trial(store, sweep, 0, "pensieve", turns)
    logged = mlflow_runs.ttft_by_turn(store.turns_of(trial))
    metrics = {
        m.label: m.value
        for m in summarise(Measurement(turns, 0.0, 1.0, 0.0, 1.0))
        if m.name == "ttft_ms_p50" and m.label
    }
    assert (logged[1], logged[3]) == pytest.approx((44.0, 48.4))
    assert logged == {turn: metrics[f"turn={turn}"] for turn in (1, 2, 3)}


def children(client: Any, experiment: str, parent: str) -> list[Any]:
    return list(client.search_runs([experiment], filter_string=f"tags.`mlflow.parentRunId` = '{parent}'"))


@pytest.mark.slow
def test_each_sweep_has_the_goodput_of_its_own_objective(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    sweeps = [
        store.open_sweep(text, "chat", None, "run.py -m", {"slo.ttft_ms": text}, 1, "host", None)
        for text in ("1000", "43")
    ]
    trial = add_trial(store, sweeps[0], 0, "pensieve", conversation_turns(TTFT, sessions=1))
    store.link(sweeps[1], trial, 0, reused=True)
    store.set_trial(trial, measure_start_s=0.0, measure_end_s=1000.0)
    found = []
    for number, sweep in enumerate(sweeps):
        parent = mlflow_runs.start_parent(tmp_path, store, sweep, "one")
        assert parent is not None
        run = mlflow_runs.log_trial(tmp_path, store, trial, "one", parent, reused=number > 0)
        data = mlflow_store.client_of(tmp_path).get_run(run).data
        found.append((data.params["slo.ttft_ms"], data.metrics["slo_attainment"]))
    assert mlflow and found == [("1000.0", 1.0), ("43.0", pytest.approx(2 / 3))]


@pytest.mark.slow
def test_a_sweep_becomes_a_parent_with_children(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    sweep = open_sweep(store, seed="0,1", **{"workload.pressure": "1,2"})
    parent = mlflow_runs.start_parent(tmp_path, store, sweep, "first experiment")
    assert parent is not None
    assert mlflow_runs.start_parent(tmp_path, store, sweep, "first experiment") == parent
    assert store.sweep(sweep).mlflow_run_id == parent
    store.set_sweep(sweep, mlflow_run_id=None)  # as if the process had died before it could note it
    assert mlflow_runs.start_parent(tmp_path, store, sweep, "first experiment") == parent
    assert store.sweep(sweep).mlflow_run_id == parent
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"

    figure = tmp_path / "figure.png"
    figure.write_bytes(b"png")
    fields = trial_fields()
    fields["config"] = {**fields["config"], "odd=key": "x" * 7000, **{f"k{i}": i for i in range(150)}}
    trial = add_trial(
        store,
        sweep,
        0,
        "pensieve",
        conversation_turns(TTFT),
        {"ttft_ms_mean": 42.0},
        tokens=tmp_path,
        config=fields["config"],
    )
    store.add_artifact(trial, "figure", figure)
    run_id = mlflow_runs.log_trial(tmp_path, store, trial, "first experiment", parent)
    assert run_id is not None
    assert mlflow_runs.log_trial(tmp_path, store, trial, "first experiment", parent, reused=True) == run_id
    assert store.trial(trial).mlflow_run_id == run_id

    client = mlflow.MlflowClient(tracking_uri=mlflow_store.mlflow_url(tmp_path))
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == parent
    assert (run.data.tags["simulated"], run.data.tags["weights"], run.data.tags["status"]) == (
        "false",
        "random",
        "completed",
    )
    assert run.data.params["baseline"] == "pensieve"
    assert run.data.params["workload.pressure"] == "2.0"
    assert run.data.params["k149"] == "149"
    assert len(run.data.params["odd_key"]) == 6000
    assert not any(name.startswith("hydra") for name in run.data.params)
    assert run.data.metrics["ttft_ms_mean"] == 42.0
    assert run.data.metrics["gpu_hit_rate"] == 0.5
    steps = {m.step: m.value for m in client.get_metric_history(run_id, mlflow_runs.TTFT_BY_TURN)}
    assert steps == pytest.approx({1: 44.0, 2: 46.2, 3: 48.4})
    assert sorted(a.path for a in client.list_artifacts(run_id)) == [
        "config.json", "environment.json", "figure", "turns.parquet",
    ]  # fmt: skip

    # A process that dies while it logs leaves a run half filled; the next one fills it, and makes no second.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow_runs, "_write_turns", died)
        half = add_trial(store, sweep, 1, "pensieve", conversation_turns(TTFT), seed=1)
        with pytest.raises(Died):
            mlflow_runs.log_trial(tmp_path, store, half, "first experiment", parent)
    assert store.trial(half).mlflow_run_id is None
    whole = mlflow_runs.log_trial(tmp_path, store, half, "first experiment", parent)
    assert client.get_run(whole).info.status == "FINISHED"
    assert client.get_run(whole).data.metrics["gpu_hit_rate"] == 0.5
    assert len(children(client, run.info.experiment_id, parent)) == 2
    # Another attempt at the same trial takes the place of the first.
    again = add_trial(store, sweep, 1, "pensieve", conversation_turns(TTFT), seed=1)
    mlflow_runs.log_trial(tmp_path, store, again, "first experiment", parent)
    found = children(client, run.info.experiment_id, parent)
    assert {int(r.data.tags["pensieve.trial_id"]): r.data.tags.get("superseded") for r in found} == {
        trial: None, half: "true", again: None,
    }  # fmt: skip

    failed = store.begin_trial(trial_fields("failed"))
    store.finish_trial(failed, "failed", error="It broke; mend it.")
    child = client.get_run(mlflow_runs.log_trial(tmp_path, store, failed, "first experiment", parent))
    assert (child.info.status, child.data.tags["error"]) == ("FAILED", "It broke; mend it.")

    other = store.open_sweep("another", "chat", None, None, {}, 1, "host", None)
    other_parent = mlflow_runs.start_parent(tmp_path, store, other, "first experiment")
    borrowed = mlflow_runs.log_trial(tmp_path, store, trial, "first experiment", other_parent, reused=True)
    assert client.get_run(borrowed).data.tags["reused"] == "true"
    assert store.trial(trial).mlflow_run_id == run_id

    single = add_trial(store, other, 0, "stateless", conversation_turns(TTFT))
    alone = client.get_run(mlflow_runs.log_trial(tmp_path, store, single, "second experiment"))
    assert "mlflow.parentRunId" not in alone.data.tags
    assert alone.info.experiment_id != run.info.experiment_id

    assert mlflow_runs.finish_parent(tmp_path, store, sweep, sweep_table(store, sweep), "failed") == parent
    assert client.get_run(parent).info.status == "FAILED"
    address = mlflow_runs.address_of(tmp_path, parent)
    assert (
        address
        == f"/#/experiments/{run.info.experiment_id}/runs?viewStateShareKey={parent}&workflowType=machine_learning"
    )
    experiment = client.get_experiment(run.info.experiment_id)
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{parent}"])
    shown = client.search_runs([experiment.experiment_id], view["searchFilter"])
    below = children(client, experiment.experiment_id, parent)
    assert {one.info.run_id for one in shown} == {one.info.run_id for one in below}
    assert view["orderByKey"] == view["selectedColumns"][0] == "metrics.`ttft_ms_mean`"
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
    mlflow_store.forget_clients()
    mlflow_store.say_missing.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert mlflow_runs.start_parent(tmp_path, store, sweep, "e") is None
        assert mlflow_runs.log_trial(tmp_path, store, store.begin_trial(trial_fields()), "e") is None
    assert [r.getMessage() for r in caplog.records] == [
        "MLflow is not installed, so nothing is logged there; `pip install mlflow` changes that."
    ]


@pytest.mark.slow
def test_an_mlflow_that_fails_costs_no_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    sweep = open_sweep(store)
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    mlflow_store.say_not_logged.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pensieve"):
        assert mlflow_runs.start_parent(tmp_path, store, sweep, "e") is None
    sentences = [r.getMessage() for r in caplog.records if r.name.startswith("pensieve")]
    assert len(sentences) == 1
    assert sentences[0].startswith("Nothing was logged to MLflow (")


@pytest.mark.slow
@pytest.mark.usefixtures("made_mlflow")
def test_a_store_whose_maker_died_is_made_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    with monkeypatch.context() as patch:
        patch.setattr(mlflow_store.shutil, "copyfile", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        dying = FORK.Process(target=mlflow_store.ensure_store, args=(tmp_path,))  # of its own: MLflow remembers files
        dying.start()
        dying.join()
    assert dying.exitcode == -signal.SIGKILL
    assert not (tmp_path / "mlflow.db").exists()
    (left,) = tmp_path.glob(".mlflow-new-*")
    assert (left / "mlflow.db").exists()
    assert mlflow_store.ensure_store(tmp_path) is not None
    assert not list(tmp_path.glob(".mlflow-new-*"))
    store = open_store(tmp_path)
    assert mlflow_runs.start_parent(tmp_path, store, open_sweep(store), "e") is not None


@pytest.mark.slow
def test_a_sweep_taken_up_with_another_timeout_keeps_its_parent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    parents = []
    for timeout_s in ("100", "200"):
        sweep = open_sweep(store, seed="0,1", **{"trial.timeout_s": timeout_s, "tracking.mlflow": "true"})
        parents.append(mlflow_runs.start_parent(tmp_path, store, sweep, "pensieve"))
    assert parents == [store.sweep(sweep).mlflow_run_id] * 2
    assert parents[0] is not None
    assert caplog.records == []
    run = mlflow.MlflowClient(tracking_uri=mlflow_store.mlflow_url(tmp_path)).get_run(parents[0])
    assert run.data.params == {"seed": "0,1"}
    assert run.data.tags["pensieve.command"] == "run.py -m"


@pytest.mark.slow
def test_a_server_of_your_own_gets_what_the_local_store_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    elsewhere = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv(mlflow_store.URL_ENV, elsewhere)
    outputs = tmp_path / "outputs"
    store = open_store(outputs)
    sweep = open_sweep(store, seed="0")
    parent = mlflow_runs.start_parent(outputs, store, sweep, "ours")
    client = mlflow.MlflowClient(tracking_uri=elsewhere)
    assert client.get_run(parent).info.experiment_id == client.get_experiment_by_name("ours").experiment_id
    assert not (outputs / mlflow_store.DATABASE_NAME).exists()
    with pytest.raises(ResultsError, match=mlflow_store.URL_ENV):
        mlflow_store.move_away(outputs)
    monkeypatch.delenv(mlflow_store.URL_ENV)
    assert mlflow_store.mlflow_url(outputs).endswith("outputs/mlflow.db?timeout=30")


def test_an_experiment_that_another_machine_makes_first_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    exceptions = pytest.importorskip("mlflow.exceptions")
    monkeypatch.setenv(mlflow_store.URL_ENV, "http://127.0.0.1:9")

    class Server:
        asked = 0

        def get_experiment_by_name(self, name: str) -> Any:
            self.asked += 1
            return None if self.asked == 1 else SimpleNamespace(experiment_id=7, lifecycle_stage="active")

        def create_experiment(self, name: str, tags: dict[str, str]) -> str:
            raise exceptions.MlflowException("it exists")

    assert mlflow_store.experiment_id(Server(), tmp_path, "ours") == "7"
