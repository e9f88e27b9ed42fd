import os
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.store import ResultsStore, open_store
from pensieve.lab.trial import sweep as sweep_module
from tests.results.trials import MEMORY, add_trial, open_sweep
from tests.runners.sweeping import SHORT

ONE_TRIAL = (*SHORT, "tracking.mlflow=false", "-m", "seed=0", "baseline=pensieve")


@pytest.fixture
def one_trial(typed):
    return lambda *arguments: typed(*ONE_TRIAL, *arguments)


def shown(store, sweep):
    return sorted(job.trial.id for job in store.trials_of_sweep(sweep))


@pytest.mark.slow
def test_a_simulated_sweep_runs_in_other_processes(one_trial, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep_module, "processes_here", lambda: 2)
    assert one_trial("seed=0,1,2") == 0
    store = open_store(tmp_path)
    trials = [job.trial for job in store.trials_of_sweep(1)]
    assert os.getpid() not in {trial.pid for trial in trials}
    assert [trial.seed for trial in trials] == [0, 1, 2]
    said = capsys.readouterr().err
    assert all(f"[{number}/3] seed={number - 1}" in said for number in (1, 2, 3))
    alone = tmp_path / "alone"
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(alone))
    assert one_trial("seed=0,1,2", "trial.isolate=false") == 0
    counted = ("session", "turn", "output_sha256", "ttft_ms", "gpu_hit_tokens")
    for job, here in zip(open_store(alone).trials_of_sweep(1), trials, strict=True):
        assert job.trial.pid == os.getpid() and job.trial.fingerprint == here.fingerprint
        assert open_store(alone).turns_of(job.trial.id, *counted) == store.turns_of(here.id, *counted)


@pytest.mark.parametrize(
    ("plugin", "part"),
    [("launcher", "pip install 'pensieve-lab[launchers]'"), ("sweeper", "leave hydra/sweeper as it is")],
)
def test_a_plugin_of_hydra_that_cannot_run_is_told_in_a_sentence(one_trial, plugin, part, capsys):
    assert one_trial(f"hydra.{plugin}._target_=hydra_plugins.hydra_none_{plugin}.it.It") == 1
    assert part in capsys.readouterr().err.splitlines()[-1]


CALLBACK = """
from hydra.experimental.callback import Callback


class Notes(Callback):
    def on_job_start(self, config, **_):
        print("JOB STARTS", config.hydra.job.num)

    def on_job_end(self, config, job_return, **_):
        print("JOB ENDS", job_return.status.name)
"""


def test_what_hydra_does_for_each_job_it_does_where_they_run_in_turn(one_trial, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_callback.py").write_text(CALLBACK)
    monkeypatch.syspath_prepend(tmp_path)
    callback = "+hydra.callbacks.notes._target_=own_callback.Notes"
    assert one_trial("baseline=pensieve,stateless", callback, "hydra.sweep.subdir=job-${hydra.job.num}") in (0, None)
    said = capsys.readouterr().out
    assert said.count("JOB ENDS COMPLETED") == 2 and "JOB STARTS 1" in said
    assert [folder.name for folder in sorted(tmp_path.rglob("job-*"))] == ["job-0", "job-1"]
    assert [job.last.status for job in open_store(tmp_path).trials_of_sweep(1)] == ["completed"] * 2


def test_trials_that_ran_before_the_sweep_was_started_take_no_time():
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, n_expected=6)
    ids = [add_trial(store, sweep, job, "pensieve", [], seed=job) for job in range(3)]
    began = datetime.now(UTC) - timedelta(seconds=100)
    with store.database.writing() as connection:
        connection.execute(update(Sweep).values(started_at=began))
        earlier = began - timedelta(days=1)
        connection.execute(update(Trial).where(Trial.id == ids[0]).values(finished_at=earlier))
    assert store.progress_of(sweep) == (3, pytest.approx(50, abs=3))
