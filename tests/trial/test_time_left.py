"""How long a sweep will still take, by what its own trials took."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.store import ResultsStore
from tests.results.trials import MEMORY, add_trial, open_sweep


def test_trials_that_ran_before_the_sweep_was_started_take_no_time() -> None:
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, n_expected=6)
    ids = [add_trial(store, sweep, job, "pensieve", [], seed=job) for job in range(3)]
    began = datetime.now(UTC) - timedelta(seconds=100)
    with store.database.writing() as connection:
        connection.execute(update(Sweep).values(started_at=began))
        earlier = began - timedelta(days=1)
        connection.execute(update(Trial).where(Trial.id == ids[0]).values(finished_at=earlier))
    found = store.progress_of(sweep)
    assert (found.ended, found.ran) == (3, 2)
    assert found.elapsed_s == pytest.approx(100, abs=5)
