from datetime import UTC, datetime, timedelta

import pytest

from pensieve import cli
from pensieve.errors import ResultsError
from pensieve.lab.results.listing import show_trial
from pensieve.lab.results.store import open_store
from tests.results.trials import open_sweep


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def test_a_trial_that_is_not_there_is_said(store):
    with pytest.raises(ResultsError, match="no trial 99"):
        list(show_trial(store, 99))


def test_a_killed_sweep_is_listed_as_interrupted(store, tmp_path, monkeypatch, capsys):
    store.set_sweep(open_sweep(store), started_at=datetime.now(UTC) - timedelta(hours=1))
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    assert cli.results(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["1", "interrupted"]
