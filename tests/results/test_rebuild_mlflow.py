from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pensieve.lab.results import mlflow_runs, mlflow_store
from pensieve.lab.results.mlflow_runs import rebuild_mlflow
from pensieve.lab.results.store import open_store
from tests.results.test_database import FORK, in_another_process
from tests.results.trials import add_trial, conversation_turns, open_sweep, trial_fields

pytestmark = pytest.mark.slow


def runs_of(outputs: Path, experiment: str):  # type: ignore[no-untyped-def]
    mlflow = pytest.importorskip("mlflow")
    client = mlflow.MlflowClient(tracking_uri=mlflow_store.mlflow_url(outputs))
    found = client.get_experiment_by_name(experiment)
    return client, client.search_runs([found.experiment_id], max_results=1000)


def test_what_mlflow_missed_is_rebuilt(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    first = open_sweep(store, 2, seed="0", baseline="pensieve,stateless")
    # As in life, by a process of its own: MLflow keeps connections to the file it once opened.
    assert in_another_process(mlflow_runs.start_parent, tmp_path, store, first, "chat") == "None"
    done = add_trial(store, first, 0, "pensieve", conversation_turns([10.0, 11.0]), {"ttft_ms_mean": 42.0})
    assert in_another_process(mlflow_runs.log_trial, tmp_path, store, done, "chat") == "None"
    failed = store.begin_trial(trial_fields("failed"))
    store.link(first, failed, 1, reused=False)
    store.finish_trial(failed, "failed", error="It broke; mend it.")
    began = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    store.set_sweep(first, status="failed", started_at=began, finished_at=began + timedelta(minutes=2))
    second = store.open_sweep("another", "chat", None, None, {}, 1, "host", None)
    store.link(second, done, 0, reused=True)
    store.set_sweep(second, status="completed")
    alone = store.begin_trial(trial_fields("alone"))
    store.finish_trial(alone, "completed")
    running = store.begin_trial(trial_fields("running"))

    said: list[str] = []
    assert rebuild_mlflow(tmp_path, store, said.append) == 2 + 3 + 1
    (kept,) = tmp_path.glob("mlflow-before-*")
    assert (kept / "mlflow.db").read_bytes().startswith(b"not a database")
    assert str(kept) in said[0]
    client, runs = runs_of(tmp_path, "chat")
    by_trial = {(run.data.tags.get("pensieve.trial_id"), run.data.tags.get("mlflow.parentRunId")): run for run in runs}
    parents = {run.data.tags["pensieve.sweep_id"]: run for run in runs if "pensieve.sweep_id" in run.data.tags}
    assert len(runs) == 5
    began_ms = int(began.timestamp() * 1000)
    assert (parents["1"].info.start_time, parents["1"].info.end_time) == (began_ms, began_ms + 120_000)
    assert parents["1"].info.status == "FAILED"
    assert parents["2"].info.status == "FINISHED"
    child = by_trial[str(done), parents["1"].info.run_id]
    assert child.data.metrics["ttft_ms_mean"] == 42.0
    assert [m.step for m in client.get_metric_history(child.info.run_id, mlflow_runs.TTFT_BY_TURN)] == [1, 2]
    assert by_trial[str(failed), parents["1"].info.run_id].info.status == "FAILED"
    assert by_trial[str(done), parents["2"].info.run_id].data.tags["reused"] == "true"
    assert store.trial(done).mlflow_run_id == child.info.run_id
    assert store.sweep(first).mlflow_run_id == parents["1"].info.run_id
    assert (tmp_path / "mlartifacts" / parents["1"].info.run_id / "artifacts" / "comparison.txt").is_file()
    assert len(runs_of(tmp_path, "pensieve")[1]) == 1
    assert store.trial(alone).mlflow_run_id
    assert store.trial(running).mlflow_run_id is None


@pytest.mark.slow
def test_what_a_sweep_shows_is_rebuilt_beside_its_last_attempt(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    sweep = open_sweep(store, 1)
    shown = add_trial(store, sweep, 0, "pensieve", conversation_turns([10.0]))
    failed = store.begin_trial(trial_fields(store.trial(shown).fingerprint))
    store.link(sweep, failed, 0, reused=False)
    store.finish_trial(failed, "failed", error="It broke; mend it.")
    store.set_sweep(sweep, status="failed")
    assert rebuild_mlflow(tmp_path, store, lambda text: None) == 3
    _, runs = runs_of(tmp_path, "chat")
    children = {run.data.tags.get("pensieve.trial_id") for run in runs if "mlflow.parentRunId" in run.data.tags}
    assert children == {str(shown), str(failed)}


@pytest.mark.usefixtures("made_mlflow")
def test_sixteen_processes_log_to_one_store(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = open_store(tmp_path)
    sweep = open_sweep(store, 16)
    trials = [add_trial(store, sweep, n, "pensieve", conversation_turns([1.0]), seed=n) for n in range(16)]
    mlflow_store.forget_clients()

    def work(trial: int) -> None:
        mlflow_runs.log_trial(tmp_path, open_store(tmp_path), trial, "together")

    processes = [FORK.Process(target=work, args=(trial,)) for trial in trials]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    _, runs = runs_of(tmp_path, "together")
    assert sorted(int(run.data.tags["pensieve.trial_id"]) for run in runs) == trials
    assert all(run.info.status == "FINISHED" and "gpu_hit_rate" in run.data.metrics for run in runs)
    assert all(store.trial(trial).mlflow_run_id for trial in trials)
