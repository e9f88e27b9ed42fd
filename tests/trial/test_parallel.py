"""Sweeps on simulated hardware run in several processes: the same trials as one after another, and only where that pays."""

import sqlite3
from contextlib import closing

import pytest

from pensieve.results.process import this_process
from pensieve.trial import parallel
from tests.runners.sweeping import SHORT, start

SWEEP = (*SHORT, "-m", "seed=0,1,2,3", "baseline=pensieve,stateless")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("pensieve.trial.sweep.draw_figures", lambda *_: [])


def test_a_process_needs_trials_a_core_and_memory(monkeypatch):
    monkeypatch.setattr(parallel, "free_host_memory_bytes", lambda: 64 * 2**30)
    assert [parallel.processes_for(trials) for trials in (0, 1, 7, 8, 20)] == [1, 1, 1, 2, 2]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert parallel.processes_for(20) == 5
    monkeypatch.setattr(parallel, "free_host_memory_bytes", lambda: 3 * 2**30)
    assert parallel.processes_for(100) == 3


def test_after_ctrl_c_a_worker_begins_no_trial_that_waited_for_it(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(parallel, "_outcome", lambda asked, tracking: begun.append(asked))
    monkeypatch.setattr(parallel, "_ended", False)
    monkeypatch.setattr("pensieve.trial.terminal._interrupted", True)
    asked = parallel.Asked({}, parallel.Job("", tmp_path))
    assert [parallel._perform(asked, tmp_path, this_process()) for _ in range(2)] == [None, None]
    assert begun == []


def swept(outputs, *arguments):
    """What the sweep said, its trials, and what was measured of each but host time."""
    process = start(outputs, *arguments)
    process.join()
    said = (outputs / "said.txt").read_text()
    with closing(sqlite3.connect(outputs / "results.db")) as connection:
        trials = connection.execute("select baseline, seed, status, pid from trial order by seed, baseline").fetchall()
        metrics = connection.execute(
            "select t.seed, t.baseline, m.name, m.label, m.value, m.ci_low, m.ci_high from metric m "
            "join trial t on t.id = m.trial_id order by 1, 2, 3, 4"
        ).fetchall()
    return process.exitcode, said, trials, metrics


@pytest.mark.slow
def test_a_sweep_in_two_processes_is_the_sweep_in_one(tmp_path):
    both = swept(tmp_path / "both", *SWEEP, "tracking.mlflow=false")
    one = swept(tmp_path / "one", *SWEEP, "tracking.mlflow=false", "hydra/launcher=basic")
    assert (both[0], one[0]) == (0, 0), both[1]
    assert len({trial[3] for trial in both[2]}) == 2
    assert len({trial[3] for trial in one[2]}) == 1
    assert [trial[:3] for trial in both[2]] == [trial[:3] for trial in one[2]]
    assert len(both[2]) == 8
    differing = {ours[2] for ours, theirs in zip(both[3], one[3], strict=True) if ours != theirs}
    assert differing <= {"schedule_ms_mean"}, "which is host time"
    tables = [said.split("At a conversation's")[1].split("Database")[0] for _, said, *_ in (both, one)]
    assert tables[0] == tables[1]
