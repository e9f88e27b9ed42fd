"""kill -9 at random moments: afterwards every record tells the same story."""

import contextlib
import random
import shutil
import sqlite3
import time

import pytest

from pensieve.errors import TrialRunning
from pensieve.lab.results import mlflow_runs
from pensieve.lab.results.store import open_store
from pensieve.lab.trial import run as run_module
from tests.results.test_database import FORK
from tests.runners.sweeping import SHORT, kill, start, wait_until
from tests.runners.test_faults import check_whole, completed, ended, query, said

SWEEP = (*SHORT, "-m", "seed=0", "baseline=pensieve,gpu_only,stateless")
JOBS = 3


@pytest.fixture
def warm(monkeypatch):
    """What every process would import first is here already, and joblib's workers fork from it."""
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient  # noqa: F401
    from mlflow.store.tracking import sqlalchemy_store  # noqa: F401


def runs_of(outputs):
    """id -> (status, tags, ttft_ms_mean), read with SQLite itself: MLflow would keep the file open across a fork."""
    with contextlib.closing(sqlite3.connect(outputs / "mlflow.db")) as connection:
        assert connection.execute("pragma integrity_check").fetchall() == [("ok",)]
        tags = {}
        for run, key, value in connection.execute("select run_uuid, key, value from tags"):
            tags.setdefault(run, {})[key] = value
        values = dict(connection.execute("select run_uuid, value from latest_metrics where key = 'ttft_ms_mean'"))
        runs = connection.execute("select run_uuid, status from runs where lifecycle_stage = 'active'").fetchall()
    return {run: (status, tags.get(run, {}), values.get(run)) for run, status in runs}


def check_mlflow(outputs):
    """One parent, ended; under it one whole run of each completed trial, and nothing that still seems to run."""
    runs = runs_of(outputs)
    ((sweep_status, parent),) = query(outputs, "select status, mlflow_run_id from sweep")
    assert [run for run, (_, tags, _) in runs.items() if "pensieve.sweep_id" in tags] == [parent]
    assert (runs[parent][0], sweep_status) == ("FINISHED", "completed")
    children = {run: found for run, found in runs.items() if run != parent}
    assert {tags.get("mlflow.parentRunId") for _, tags, _ in children.values()} == {parent}
    assert "RUNNING" not in {status for status, _, _ in children.values()}
    current = {run: found for run, found in children.items() if found[0] == "FINISHED"}
    logged = sorted((int(tags["pensieve.trial_id"]), run, value) for run, (_, tags, value) in current.items())
    rows = query(
        outputs,
        "select t.id, t.mlflow_run_id, m.value from current_trial t join metric m on m.trial_id = t.id "
        "where m.name = 'ttft_ms_mean' and m.label = '' order by t.id",
    )
    assert logged == rows
    assert len(rows) == JOBS
    assert not [run for run, (_, tags, _) in current.items() if "reused" in tags]


def finish(outputs, arguments):
    ended(outputs, *arguments)
    check_whole(outputs, JOBS)
    check_mlflow(outputs)


def begin_with_nothing(outputs):
    """As on the first day, but for MLflow's tables, which take seconds to make."""
    empty = outputs.with_name("empty")
    if not empty.exists():
        empty.mkdir()
        maker = FORK.Process(target=mlflow_runs.client_of, args=(empty,))
        maker.start()
        maker.join()
    shutil.rmtree(outputs, ignore_errors=True)
    outputs.mkdir()
    shutil.copyfile(empty / "mlflow.db", outputs / "mlflow.db")


def kill_and_resume(outputs, kills, arguments):
    """The same command again and again, killed at a random moment of the time that it takes on this machine as busy as
    it is now; what was completed stays as it was. A sweep that came to its end is checked, and begins with nothing."""
    begin_with_nothing(outputs)
    began = time.monotonic()
    finish(outputs, arguments)
    seconds = time.monotonic() - began
    begin_with_nothing(outputs)
    draw, finished, landed = random.Random(kills), [], 0
    while landed < kills:
        process = start(outputs, *arguments)
        process.join(draw.uniform(0, seconds))
        if process.exitcode is None:
            landed += 1
        else:
            seconds *= 0.9  # too late: the machine is less busy than it was, or little was left to do
        kill(process)
        now = completed(outputs)
        assert set(finished) <= set(now)
        finished = now
        if len(finished) == JOBS:
            finish(outputs, arguments)
            begin_with_nothing(outputs)
            finished = []
    finish(outputs, arguments)
    assert said(outputs).count("is this one and is completed") == len(finished)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_process_killed_at_random_moments(tmp_path, warm):
    kill_and_resume(tmp_path / "outputs", 2, SWEEP)


def test_a_command_repeated_at_once_waits_for_the_worker_that_was_left(tmp_path, monkeypatch):
    """It ends by itself a quarter of a second after its sweep; until then the trial is not anybody else's. Where it goes on,
    that is said."""
    outputs = tmp_path / "outputs"
    store = open_store(outputs)
    fields = []
    claim = type(store).claim_trial

    def refused_once(self, columns, again):
        fields.append(columns)
        if len(fields) == 1:
            raise TrialRunning("This trial is running already.")
        return claim(self, columns, again)

    monkeypatch.setattr(type(store), "claim_trial", refused_once)
    monkeypatch.setattr("pensieve.lab.trial.run.ORPHAN_S", -1.0)
    ended(outputs, *SHORT, "-m", "seed=0", "baseline=pensieve", "tracking.mlflow=false")
    assert query(outputs, "select status, attempt from trial") == [("completed", 1)]
    assert "This trial is running already." in said(outputs)


def test_a_sweep_started_twice_at_once_runs_each_trial_once(tmp_path, monkeypatch):
    """The second has looked for its first trial, and claims it when the first command has run them all."""
    outputs, looked = tmp_path / "outputs", tmp_path / "looked"
    words = (*SHORT, "-m", "seed=0,1", "baseline=pensieve,stateless", "tracking.mlflow=false")
    columns = run_module.trial_columns

    def late(*given):
        found = columns(*given)
        if not looked.exists():
            looked.touch()
            wait_until(lambda: len(completed(outputs)) == 4)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "trial_columns", late)
        second = start(outputs, *words)
        wait_until(looked.exists)
    first = start(outputs, *words)
    for process in (first, second):
        process.join(100)
        assert process.exitcode == 0, said(outputs)
    assert query(outputs, "select status, attempt, count(*) from trial group by 1, 2") == [("completed", 1, 4)]
    check_whole(outputs, 4)
