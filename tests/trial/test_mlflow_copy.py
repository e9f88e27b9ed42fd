"""MLflow is written behind the results, and nothing of it is lost."""

import contextlib
import signal
import sqlite3

import pytest
from hydra.core.global_hydra import GlobalHydra

from pensieve import cli
from pensieve.lab.results import mlflow_runs, mlflow_store
from pensieve.lab.results.store import open_store
from pensieve.lab.trial import mlflow, terminal
from pensieve.lab.trial import run as run_module

SHORT = ("hardware=sim_h100", "workload.pressure=0", "workload.min_turns=2", "workload.max_turns=2")


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Runs a command in this process: its exit status (0 where it does not exit), and what it printed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr("pensieve.lab.trial.sweep.draw_figures", lambda *_: [])

    def run(*arguments):
        GlobalHydra.instance().clear()
        monkeypatch.setattr("sys.argv", ["run.py", *SHORT, *arguments])
        try:
            status = cli.run()
        except SystemExit as left:
            status = left.code
        return status, capsys.readouterr()

    yield run
    signal.signal(signal.SIGINT, before)
    terminal._interrupted = False
    terminal._close_sweep = None
    mlflow._waiting.clear()


def runs(folder):
    """Trial, status and parent of every MLflow run, the oldest trial first; a sweep's own run has no trial."""
    client = mlflow_store.client_of(folder)
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    rows = [
        (run.data.tags.get(mlflow_runs.TRIAL_TAG), run.info.status, run.data.tags.get(mlflow_runs.PARENT_TAG))
        for run in found
    ]
    return sorted(rows, key=lambda row: row[0] or "")


@pytest.fixture
def written(monkeypatch):
    """Trials in the order in which they are copied, each with what had been printed by then."""
    log, order = mlflow_runs.log_trial, []

    def noted(outputs, store, trial_id, *given):
        order.append(trial_id)
        return log(outputs, store, trial_id, *given)

    monkeypatch.setattr(mlflow_runs, "log_trial", noted)
    return order


def test_a_trial_that_fails_or_is_interrupted_is_marked_in_mlflow(typed, tmp_path, monkeypatch):
    status, said = typed(
        "cache.gpu='256 tokens'"
    )  # a mistake in the configuration is no run, and the next one is trial 1
    assert "longest conversation" in (status if isinstance(status, str) else said.err)
    status, said = typed("trial.timeout_s=0")
    assert status == 1
    assert "trial.timeout_s" in said.err

    def interrupted(*_given, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "replay", interrupted)
    status, said = typed()
    assert status == 130
    assert "Interrupted; the trial is marked so" in said.err
    assert runs(tmp_path) == [("1", "FAILED", None), ("2", "KILLED", None)]


def test_an_error_of_ours_loses_no_copy(typed, tmp_path, monkeypatch):
    monkeypatch.setattr("pensieve.lab.trial.sweep.summary", None)  # a bug while printing, raised in our own file
    with pytest.raises(TypeError):
        typed()
    assert runs(tmp_path) == [("1", "FINISHED", None)]


def test_a_simulated_sweep_is_copied_after_its_table(typed, tmp_path, monkeypatch, written):
    shown = []
    table = mlflow_runs.start_parent
    monkeypatch.setattr("pensieve.lab.trial.sweep.places", lambda tracking: shown.append(list(written)) or [])
    assert mlflow_runs.start_parent is table
    status, _ = typed("-m", "seed=0", "baseline=pensieve,stateless")
    assert status == 0
    assert shown == [[]]
    assert written == [1, 2]
    parent = open_store(tmp_path).sweep(1).mlflow_run_id
    assert runs(tmp_path) == [(None, "FINISHED", None), ("1", "FINISHED", parent), ("2", "FINISHED", parent)]
    # The same command is the same sweep: its runs are there already, and none is made twice.
    assert typed("-m", "seed=0", "baseline=pensieve,stateless")[0] == 0
    assert len(runs(tmp_path)) == 3


def test_ctrl_c_while_mlflow_is_written_leaves_no_half_run_and_the_same_command_writes_the_rest(
    typed, tmp_path, monkeypatch
):
    fill = mlflow_runs._fill_run

    def pressed(*given):
        signal.raise_signal(signal.SIGINT)
        fill(*given)

    sweep = ("-m", "seed=0", "baseline=pensieve,stateless")
    monkeypatch.setattr(mlflow_runs, "_fill_run", pressed)
    status, said = typed(*sweep)
    assert status == 130
    assert "Interrupted" in said.err
    parent = open_store(tmp_path).sweep(1).mlflow_run_id
    assert [row for row in runs(tmp_path) if row[0]] == [("1", "FINISHED", parent)]
    mlflow._waiting.clear()  # as the process has ended
    monkeypatch.setattr(mlflow_runs, "_fill_run", fill)
    assert typed(*sweep)[0] == 0
    assert runs(tmp_path) == [(None, "FINISHED", None), ("1", "FINISHED", parent), ("2", "FINISHED", parent)]


def test_a_trial_whose_process_was_killed_before_the_copy_is_copied_by_the_same_command(typed, tmp_path, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr("pensieve.lab.trial.sweep.copy_waiting", lambda: None)
        assert typed()[0] == 0
    mlflow._waiting.clear()
    assert open_store(tmp_path).trial(1).mlflow_run_id is None
    status, said = typed()
    assert status == 0
    assert "Trial 1 is this one" in said.err
    assert runs(tmp_path) == [("1", "FINISHED", None)]


def test_an_isolated_trial_is_copied_once_by_its_parent(typed, tmp_path, written):
    assert typed("trial.isolate=true")[0] == 0
    assert written == [1]  # counted in this process
    assert runs(tmp_path) == [("1", "FINISHED", None)]


def test_what_mlflow_s_database_raises_is_one_sentence_without_a_trace(tmp_path, capfd, caplog):
    """As on a full disk: MLflow logs a trace of its own before it raises."""
    pytest.importorskip("mlflow")
    client = mlflow_store.client_of(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("drop table experiments")
    mlflow_store.say_not_logged.cache_clear()
    for _ in range(3):  # as the trials of a sweep meet it, one after another
        assert mlflow_store.or_none(client.search_experiments)() is None
    assert sum("Nothing was logged to MLflow" in record.message for record in caplog.records) == 1
    assert "SQLAlchemy database error" not in capfd.readouterr().err + caplog.text, "the head of its trace"
