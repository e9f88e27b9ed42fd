"""Whatever dies, nothing finished is lost and nothing is counted twice."""

import contextlib
import os
import resource
import signal
import sqlite3
from datetime import UTC, datetime, timedelta

import pytest

from pensieve.lab.results import store as store_module
from pensieve.lab.results.store import open_store
from pensieve.lab.results.sweep_table import sweep_table
from pensieve.lab.trial import sweep as sweep_module
from tests import typed
from tests.results.trials import trial_fields
from tests.runners.sweeping import SHORT, start, wait_until

SWEEP = (*SHORT, "-m", "seed=0,1", "baseline=pensieve,stateless", "tracking.mlflow=false")
JOBS = 4


def query(outputs, text):
    with sqlite3.connect(outputs / "results.db") as connection:
        return connection.execute(text).fetchall()


def said(outputs):
    return (outputs / "said.txt").read_text()


def completed(outputs):
    """Trial ids by fingerprint, read with SQLite itself; none before there is a database."""
    try:
        return query(outputs, "select id, fingerprint from trial where status = 'completed'")
    except sqlite3.OperationalError:
        return []


def ended(outputs, *arguments, status=0):
    """The command, from its start to its end."""
    process = start(outputs, *arguments)
    process.join(100)
    assert process.exitcode == status, said(outputs)
    assert "Traceback" not in said(outputs)


def check_whole(outputs, jobs=JOBS):
    """Every job has exactly one completed trial, with all its turns and tokens; the table counts each once."""
    assert query(outputs, "pragma integrity_check") == [("ok",)]
    assert query(outputs, "pragma foreign_key_check") == []
    trials = completed(outputs)
    assert len(trials) == len({fingerprint for _, fingerprint in trials}) == jobs
    assert query(outputs, "select n_expected, status from sweep") == [(jobs, "completed")]
    assert query(outputs, "select count(*) from trial where status = 'running'") == [(0,)]
    store = open_store(outputs)
    (sweep,) = query(outputs, "select id from sweep")[0]
    results = store.trials_of_sweep(sweep)
    assert [job.job for job in results] == list(range(jobs))
    for job in results:
        assert job.trial is not None
        turns = store.turns_of(job.trial.id)
        assert len(turns) == len({(t.session, t.turn) for t in turns}) == job.trial.engine["workload"]["turns"]
        assert job.value("ttft_ms_mean") is not None
        (tokens,) = store.artifacts_of(job.trial.id, "tokens")
        assert tokens.path.is_file()
    assert not [n for n in sweep_table(store, sweep).notes if n.code == "not_completed"]
    assert sum(int(row.cells["\nn"]) for row in sweep_table(store, sweep).rows) == jobs


@pytest.mark.slow
def test_a_process_of_a_sweep_is_killed_then_the_sweep_and_the_third_command_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "processes_here", lambda: 2)
    outputs, arguments = tmp_path / "outputs", SWEEP

    def pids(status):
        with contextlib.suppress(sqlite3.OperationalError):  # before there is a table
            return {pid for (pid,) in query(outputs, f"select pid from trial where status = '{status}'")}
        return set()

    process = start(outputs, *arguments)
    running = set()
    wait_until(lambda: running.update(pids("running") - {process.pid}) or running)
    os.kill(min(running), signal.SIGKILL)
    process.join(100)
    assert process.exitcode == 1 and "A process of the sweep was killed" in said(outputs)
    assert query(outputs, "select status from sweep") == [("failed",)]
    process = start(outputs, *arguments)
    wait_until(lambda: (pids("completed") | pids("running")) - {process.pid})
    os.kill(process.pid, signal.SIGKILL)  # the parent only: its workers must end by themselves
    process.join()
    workers = (pids("completed") | pids("running") | pids("interrupted")) - {process.pid}
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers), 30)
    finished = completed(outputs)
    ended(outputs, *arguments)
    assert set(finished) <= set(completed(outputs))
    check_whole(outputs)


@pytest.mark.slow
def test_a_failed_trial_does_not_stop_the_others(tmp_path, monkeypatch):
    outputs = tmp_path / "outputs"
    monkeypatch.setenv("CRASH", "error")
    monkeypatch.setenv("CRASHES", "2")
    monkeypatch.setenv("CRASH_COUNT", str(tmp_path / "crashes"))
    crashing = (*SWEEP, "trial.isolate=false", "++eviction._target_=tests.trial.crashing.Crash")
    ended(outputs, *crashing, status=1)
    found = query(outputs, "select status, error, traceback from sweep_trial join trial on id = trial_id order by job")
    assert [status for status, _, _ in found] == ["failed", "failed", "completed", "completed"]
    for _, error, trace in found[:2]:
        assert "it broke" in error
        assert trace.startswith("Traceback")
    assert query(outputs, "select status from sweep") == [("failed",)]
    assert said(outputs).count("tests/trial/crashing.py, line 28 (__init__), raised RuntimeError: it broke") == 2
    assert "not_completed" in said(outputs)  # the table, with what is there
    monkeypatch.setenv("CRASHES", "0")
    ended(outputs, *crashing)
    assert len(query(outputs, "select 1 from trial")) == 4 + 2  # those that had failed ran again
    assert query(outputs, "select count(*) from sweep") == [(1,)]
    check_whole(outputs)


@pytest.mark.slow
def test_a_disk_that_fills_up_in_a_sweep(tmp_path, monkeypatch):
    outputs = tmp_path / "outputs"
    ended(outputs, *SHORT, "-m", "seed=0", "baseline=pensieve", "tracking.mlflow=false")
    limit = max(file.stat().st_size for file in outputs.glob("results.db*")) + 20_000

    def limited(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        run(*arguments)

    run = typed._run
    with monkeypatch.context() as patch:
        patch.setattr(typed, "_run", limited)
        previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # EFBIG instead, as Python itself asks for
        try:
            ended(
                outputs, *SWEEP, "hydra.job_logging.handlers.file.filename=/dev/full", status=1
            )  # and so is the log's
        finally:
            signal.signal(signal.SIGXFSZ, previous)
    assert "Logging error" not in said(outputs), said(outputs)
    assert "disk" in said(outputs)
    assert query(outputs, "pragma integrity_check") == [("ok",)]
    assert len(completed(outputs)) < JOBS
    ended(outputs, *SWEEP)
    assert len(completed(outputs)) == JOBS


def test_a_database_that_stays_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("pensieve.lab.results.schema.BUSY_TIMEOUT_S", 0.2)
    outputs = tmp_path / "outputs"
    open_store(outputs)
    holder = sqlite3.connect(outputs / "results.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    ended(outputs, *SWEEP, status=1)
    assert "stayed locked" in said(outputs)
    holder.execute("ROLLBACK")
    holder.close()
    ended(outputs, *SWEEP)
    check_whole(outputs)


def test_a_clock_that_steps_back(tmp_path, monkeypatch):
    store = open_store(tmp_path)
    first = store.begin_trial(trial_fields())
    store.finish_trial(first, "completed")
    monkeypatch.setattr(store_module, "_now", lambda: datetime.now(UTC) - timedelta(hours=2))
    second = store.begin_trial(trial_fields())
    store.heartbeat(second)
    assert store.interrupt_dead() == 0  # alive by its process, whatever the clock says
    store.finish_trial(second, "completed")
    assert store.trial(second).started_at < store.trial(first).started_at
    assert store.completed_trial("f").id == second  # newest by attempt, not by time
