import hashlib
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from pensieve import cli
from pensieve.errors import ResultsError
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.store import Holding, Reading, ResultsStore, open_store
from pensieve.serve.record import Miss, TurnRecord
from tests.results.test_database import in_another_process
from tests.results.trials import MEMORY, add_trial, holdings_of, open_sweep, trial_fields, turn


@pytest.fixture
def store(tmp_path: Path) -> ResultsStore:
    return open_store(tmp_path)


def test_the_same_key_is_the_same_sweep(store: ResultsStore) -> None:
    first, other = open_sweep(store), store.open_sweep("another", "chat", None, None, {}, 1, "host", None)
    store.set_sweep(first, status="failed", mlflow_run_id="run")
    assert store.sweep(first).finished_at is not None
    again = store.open_sweep("key", "chat", "pensieve", "run.py -m", {"seed": "0,1"}, 6, "host", "def")
    sweep = store.sweep(again)
    assert again == first != other
    assert (sweep.status, sweep.finished_at, sweep.git_commit, sweep.mlflow_run_id) == ("running", None, "def", "run")
    with pytest.raises(ResultsError, match="no sweep 99"):
        store.sweep(99)


def ran(store: ResultsStore, sweep: int | None, job: int, status: str = "completed", fingerprint: str = "f") -> int:
    trial = store.begin_trial(trial_fields(fingerprint))
    if sweep is not None:
        store.link(sweep, trial, job, reused=False)
    store.finish_trial(trial, status)
    return trial


def test_a_trial_from_begin_to_end(store: ResultsStore) -> None:
    trial_id = store.begin_trial(trial_fields(device="cpu"))
    trial = store.trial(trial_id)
    assert (trial.status, trial.attempt, trial.pid, trial.host) == ("running", 1, os.getpid(), socket.gethostname())
    assert store.completed_trial("f") is None
    before = trial.heartbeat_at
    store.heartbeat(trial_id)
    assert store.trial(trial_id).heartbeat_at > before
    store.finish_trial(trial_id, "completed", measure_end_s=2.5, engine={"threads": 2})
    trial = store.trial(trial_id)
    assert (trial.status, trial.measure_end_s, trial.engine, trial.error) == ("completed", 2.5, {"threads": 2}, None)
    assert trial.finished_at is not None
    assert store.completed_trial("f").id == trial_id  # type: ignore[union-attr]
    assert store.completed_by_config("c").id == trial_id  # type: ignore[union-attr]
    assert store.completed_by_config("other") is None


def test_a_trial_that_runs_is_not_begun_twice(store: ResultsStore) -> None:
    store.begin_trial(trial_fields())
    sentence = in_another_process(lambda: store.begin_trial(trial_fields()))
    assert f"process {os.getpid()} on {socket.gethostname()}" in sentence
    assert "running already" in sentence
    store.finish_trial(1, "completed")
    assert in_another_process(lambda: store.claim_trial(trial_fields()).id) == "1", "it is the other's"
    assert in_another_process(lambda: store.claim_trial(trial_fields(), again=True)) == "2"
    assert store.begin_trial(trial_fields("other")) == 3


def test_a_trial_whose_process_is_gone_becomes_interrupted(store: ResultsStore) -> None:
    def begin_and_die() -> int:
        trial = store.begin_trial(trial_fields())
        store.add_turns(trial, [turn("s", 1)])
        return trial

    dead = int(in_another_process(begin_and_die))
    alive = store.begin_trial(trial_fields("other"))
    assert store.trial(dead).status == "running"
    again = store.begin_trial(trial_fields())
    assert store.trial(dead).status == "interrupted"
    assert "ended without finishing" in str(store.trial(dead).error)
    assert store.trial(again).attempt == 2
    assert store.trial(alive).status == "running"

    also_dead = int(in_another_process(lambda: store.begin_trial(trial_fields("third"))))
    assert store.interrupt_dead() == 1
    assert store.trial(also_dead).status == "interrupted"


def test_a_killed_sweep_is_listed_as_interrupted(
    store: ResultsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.set_sweep(open_sweep(store), started_at=datetime.now(UTC) - timedelta(hours=1))
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    assert cli.results(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["1", "interrupted"]


@pytest.mark.parametrize(
    ("trials", "silent_s", "gone", "status"),
    [(2, 61, True, "interrupted"), (2, 61, False, "running"), (2, 9, True, "running"), (0, 61, True, "interrupted")],
)
def test_a_sweep_whose_process_is_gone_becomes_interrupted(
    store: ResultsStore, trials: int, silent_s: float, gone: bool, status: str
) -> None:
    sweep = store.open_sweep("key", "chat", None, None, {}, 3, "host", None)
    heard = datetime.now(UTC) - timedelta(seconds=silent_s)
    store.set_sweep(sweep, started_at=heard - timedelta(hours=trials))
    for job in range(trials):
        process = {"process_started_at": datetime(2020, 1, 1, tzinfo=UTC)} if gone else {}
        store.set_trial(ran(store, sweep, job, fingerprint=f"job {job}"), heartbeat_at=heard, **process)
    store.interrupt_dead()
    found = store.sweep(sweep)
    assert (found.status, found.finished_at) == (status, heard if status == "interrupted" else None)


@pytest.mark.parametrize(("age_s", "alive"), [(59, True), (61, False)])
def test_elsewhere_the_heartbeat_decides(store: ResultsStore, age_s: float, alive: bool) -> None:
    trial = store.begin_trial(trial_fields())
    store.set_trial(trial, host="another-host", heartbeat_at=datetime.now(UTC) - timedelta(seconds=age_s))
    if alive:
        with pytest.raises(ResultsError, match="another-host"):
            store.begin_trial(trial_fields())
    else:
        assert store.trial(store.begin_trial(trial_fields())).attempt == 2
        assert store.trial(trial).status == "interrupted"


def test_metrics_samples_and_values_that_are_no_numbers(store: ResultsStore) -> None:
    trial = store.begin_trial(trial_fields())
    metric = MetricValue("ttft_ms_p50", 3.5, "turn=1", 12, "turns", 3.0, 4.0, 9.0)
    store.add_metrics(trial, [metric, MetricValue("power_w", float("nan")), MetricValue("load_s", float("inf"))])
    found = {m.name: m for m in store.metrics_of(trial)}
    assert (found["ttft_ms_p50"], found["power_w"].value, found["load_s"].value) == (metric, None, None)
    readings = [Reading(0.0, "gpu0", "blocks", value, "blocks") for value in (3.0, 4.0)]
    store.add_samples(trial, readings)
    assert store.samples_of(trial) == readings


def test_artifacts_move_with_the_outputs_folder(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    store = open_store(before)
    trial = store.begin_trial(trial_fields())
    inside, outside = before / "runs" / "a.txt", tmp_path / "b.txt"
    for path in (inside, outside):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"hello")
    store.add_artifact(trial, "figure", inside)
    inside.write_bytes(b"newer")
    store.add_artifact(trial, "figure", inside)
    store.add_artifact(trial, "log", outside)
    before.rename(after)
    found = open_store(after).artifacts_of(trial)
    assert [(a.kind, a.path) for a in found] == [("figure", after / "runs" / "a.txt"), ("log", outside)]
    assert found[0].sha256 == hashlib.sha256(b"newer").hexdigest()
    assert [a.kind for a in open_store(after).artifacts_of(trial, "log")] == ["log"]


def test_a_job_has_one_trial_and_a_trial_may_serve_several_sweeps() -> None:
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store)
    old = add_trial(store, sweep, 0, "pensieve", [], {"gpu_hit_rate": 0.1})
    other = store.open_sweep("another", "chat", None, None, {}, 1, "host", None)
    store.link(other, old, 3, reused=True)
    changed_code = ran(store, sweep, 0, fingerprint="changed code")
    assert [(j.job, j.last.id) for j in store.trials_of_sweep(sweep)] == [(0, changed_code)]
    (borrowed,) = store.trials_of_sweep(other)
    assert (borrowed.job, borrowed.reused, borrowed.value("gpu_hit_rate")) == (3, True, 0.1)
    store.link(sweep, changed_code, 0, reused=True)
    assert [j.reused for j in store.trials_of_sweep(sweep)] == [False]


def shown(store: ResultsStore, sweep: int) -> dict[int, int | None]:
    asked = text(f"SELECT job, trial_id FROM sweep_result WHERE sweep_id = {sweep}")
    with store.database.reading() as connection:
        view = {row.job: row.trial_id for row in connection.execute(asked)}
    jobs = store.trials_of_sweep(sweep)
    assert {job.job: job.trial.id for job in jobs if job.trial} == view
    for job in jobs:
        found = store.shown_trial(sweep, job.job)
        assert (found.id if found else None) == view.get(job.job)
    return {job.job: view.get(job.job) for job in jobs}


def test_attempts_made_elsewhere_do_not_change_what_a_sweep_shows() -> None:
    store = ResultsStore(MEMORY)
    sweeps = [store.open_sweep(key, key, None, None, {}, 1, "host", None) for key in ("first", "second")]
    ids = [ran(store, sweep, 0) for sweep in (*sweeps, None)]  # the second sweep with force=true, then a single run
    assert [shown(store, sweep) for sweep in sweeps] == [{0: ids[0]}, {0: ids[1]}]
    assert store.completed_trial("f").id == ids[2]  # type: ignore[union-attr]


def test_a_job_whose_last_attempt_failed_shows_the_one_before() -> None:
    store = ResultsStore(MEMORY)
    sweep = store.open_sweep("key", "x", None, None, {}, 2, "host", None)
    ids = [ran(store, sweep, 0), ran(store, sweep, 0, "failed"), ran(store, None, 0)]
    store.link(sweep, store.begin_trial(trial_fields("running")), 1, reused=False)
    assert shown(store, sweep) == {0: ids[0], 1: None}


def test_ledgers_go_with_their_turns_and_trial(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    trial = store.begin_trial(trial_fields())
    one, other = TurnRecord("c", 0, ordinal=6), TurnRecord("c", 1, ordinal=7)
    other.misses = (Miss("evicted", 5, 1.5, "b", 3.0), Miss("new", 2, 0.5))
    store.add_turns(trial, [one, other])
    held = [Holding("a", "cpu", 1.5, 0.0, 1.5), Holding("a", "gpu", 2.5, 0.25, 2.0)]
    store.add_holdings(trial, held)
    assert holdings_of(store, trial) == held
    with pytest.raises(IntegrityError):
        store.add_holdings(trial, held[:1])
    lines = text(
        "SELECT ordinal, cause, evicted_by, tokens, ms FROM miss JOIN turn ON turn.id = turn_id ORDER BY cause"
    )
    with store.database.writing() as connection:
        assert connection.execute(lines).all() == [(7, "evicted", "b", 5, 1.5), (7, "new", None, 2, 0.5)]
        for gone, table in (("turn", "miss"), ("trial", "holding")):
            connection.execute(text(f"DELETE FROM {gone}"))
            assert connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() == 0
