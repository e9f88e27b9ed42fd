"""MLflow is written behind the results, and nothing of it is lost."""

import multiprocessing.process
import signal
import time

import pytest

from pensieve import cli
from pensieve.lab.results import mlflow_runs
from pensieve.lab.results.store import open_store
from pensieve.lab.trial import sweep
from tests.composed import checked
from tests.runners.sweeping import SHORT

SWEEP = ("-m", "seed=0", "baseline=pensieve,stateless")


@pytest.fixture
def said_by(typed, capsys):
    """The exit status of a command, and what it printed."""
    return lambda *arguments: (typed(*SHORT, *arguments), capsys.readouterr())


def runs(folder):
    """Trial, status and parent of every MLflow run, the oldest trial first; a sweep's own run has no trial."""
    client = mlflow_runs.client_of(folder)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    rows = [
        (run.data.tags.get(mlflow_runs.TRIAL_TAG), run.info.status, run.data.tags.get(mlflow_runs.PARENT_TAG))
        for run in found
    ]
    return sorted(rows, key=lambda row: row[0] or "")


def test_a_trial_is_copied_after_its_results_and_one_that_failed_too(said_by, tmp_path, monkeypatch):
    status, said = said_by(
        "cache.gpu='256 tokens'"
    )  # a mistake in the configuration is no run; the next one is trial 1
    assert "longest conversation" in (status if isinstance(status, str) else said.err)
    assert said_by("trial.timeout_s=0")[0] == 1
    with monkeypatch.context() as buggy:
        buggy.setattr("pensieve.lab.trial.sweep.summary", None)  # a bug while printing, raised in our own file
        with pytest.raises(TypeError):
            said_by()
    assert said_by("trial.isolate=true", "seed=1")[0] == 0
    done = [("1", "FAILED", None), ("2", "FINISHED", None), ("3", "FINISHED", None)]
    assert runs(tmp_path) == done
    open_store(tmp_path).set_trial(3, mlflow_run_id=None)  # as if the process had been killed before the copy
    status, said = said_by("trial.isolate=true", "seed=1")
    assert (status, runs(tmp_path)) == (0, done)
    assert "Trial 3 is this one" in said.err


@pytest.mark.parametrize("each", [False, True])
def test_a_sweep_is_copied_after_its_table_and_a_real_one_also_after_each_trial(said_by, tmp_path, monkeypatch, each):
    shown = []
    monkeypatch.setattr("pensieve.lab.trial.sweep.places", lambda tracking: shown.append(runs(tmp_path)) or [])
    if each:  # what is real is slow: the sweep is told that its trials are
        monkeypatch.setattr("pensieve.lab.trial.sweep.copied_at_once", lambda *_: True)
    assert said_by(*SWEEP)[0] == 0
    parent = open_store(tmp_path).sweep(1).mlflow_run_id
    trials = [("1", "FINISHED", parent), ("2", "FINISHED", parent)]
    assert shown == [[(None, "RUNNING", None), *trials] if each else []]
    assert runs(tmp_path) == [(None, "FINISHED", None), *trials]
    assert said_by(*SWEEP)[0] == 0  # the same command is the same sweep
    assert runs(tmp_path) == [(None, "FINISHED", None), *trials]


def test_ctrl_c_while_mlflow_is_written_loses_nothing_that_sync_does_not_write(said_by, tmp_path, monkeypatch):
    fill = mlflow_runs._fill_run

    def pressed(*given):
        signal.raise_signal(signal.SIGINT)
        fill(*given)

    with monkeypatch.context() as pressing:
        pressing.setattr(mlflow_runs, "_fill_run", pressed)
        status, said = said_by(*SWEEP)
    assert status == 130
    assert "Interrupted" in said.err
    parent = open_store(tmp_path).sweep(1).mlflow_run_id
    monkeypatch.setattr("sys.argv", ["pensieve mlflow", "sync"])
    assert cli.mlflow() == 0
    assert runs(tmp_path) == [(None, "FINISHED", None), ("1", "FINISHED", parent), ("2", "FINISHED", parent)]


def test_what_imports_mlflow_beside_a_trial_makes_no_store_and_ends_a_copy_that_it_began(
    tracking, tmp_path, monkeypatch
):
    """A store whose making was cut off is of no use to anybody, ever again."""
    asked, imported, copied = checked("tracking=local").tracking, tmp_path / "imported", tmp_path / "copied"
    monkeypatch.setattr(sweep, "import_mlflow", lambda: (mlflow_runs.import_mlflow(), imported.touch()))
    monkeypatch.setattr(sweep, "copy_trial", lambda *given: (time.sleep(0.3), copied.write_text(str(given[-1]))))
    with sweep._copying(asked, tracking):
        while not imported.exists():
            time.sleep(0.01)
        time.sleep(0.3)
    for beside in multiprocessing.active_children():
        beside.join()
    assert not list(tmp_path.rglob("mlflow.db"))

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as pressing, sweep._copying(asked, tracking) as copy:
        pressing.setattr(multiprocessing.process.BaseProcess, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copy(7)
    for beside in multiprocessing.active_children():
        beside.join()
    assert copied.read_text() == "7"
