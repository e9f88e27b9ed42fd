from datetime import UTC, datetime, timedelta

import pytest

from pensieve import cli
from pensieve.errors import ResultsError
from pensieve.lab.results.listing import list_sweeps, list_trials, show_trial
from pensieve.lab.results.store import open_store
from tests.results.trials import add_trial, open_sweep, trial_fields


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def test_the_newest_come_first_with_what_tells_them_apart(store):
    sweep = open_sweep(store, 2, seed="0,1")
    add_trial(store, sweep, 0, "pensieve", [], {"ttft_ms_p50": 12.345})
    add_trial(store, sweep, 1, "stateless", [])
    failed = store.begin_trial(trial_fields("failed", baseline="gpu_only"))
    store.finish_trial(failed, "failed", error="no")
    titles, *rows = list_trials(store)
    assert titles.split()[:3] == ["trial", "status", "baseline"]
    assert [row.split()[:3] for row in rows] == [
        ["3", "failed", "gpu_only"], ["2", "completed", "stateless"], ["1", "completed", "pensieve"],
    ]  # fmt: skip
    assert rows[2].split()[-3:] == ["12.35", "100", "0.5"]
    assert rows[0].split()[-3:] == ["-", "-", "-"]
    assert len(list(list_trials(store, sweep))) == 1 + 2
    assert [row.split()[0] for row in list_trials(store, status="failed")] == ["trial", "3"]
    assert len(list(list_trials(store, limit=1))) == 1 + 1
    assert list(list_sweeps(store))[1].split()[:3] == ["1", "running", "2"]
    assert list(list_sweeps(store))[1].endswith("seed=0,1")


def test_a_trial_that_is_not_there_is_said(store):
    with pytest.raises(ResultsError, match="no trial 99"):
        list(show_trial(store, 99))


def test_a_killed_sweep_is_listed_as_interrupted(store, tmp_path, monkeypatch, capsys):
    store.set_sweep(open_sweep(store), started_at=datetime.now(UTC) - timedelta(hours=1))
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    assert cli.results(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["1", "interrupted"]
