"""Runs one trial from its overrides, and reads its rows from the results database: table and column names are a contract."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from sqlalchemy import Connection, text

from pensieve.lab.compose.settings import resolved
from pensieve.lab.trial.job import Job, Tracking, open_tracking
from pensieve.lab.trial.run import run_trial
from tests.composed import checked, composed
from tests.frozen.rows import HOLDING, METRICS, MISS, TIMES, TURN, Rows


def rows_of(overrides: Sequence[str], wall: bool) -> Rows:
    """wall: on a real clock, so that only what the order of requests decides is read."""
    words = ("tracking=local", *overrides)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSIEVE_OUTPUTS", folder)
        opened = open_tracking(checked(*words).tracking)
        tracking = Tracking(opened.outputs, opened.store, mlflow=False, kept=True)
        job = Job("frozen", Path(folder) / "run", resolved(composed(*words)), shown=False)
        outcome = run_trial(job, tracking)
        assert outcome.completed, outcome.error
        with tracking.store.database.reading() as connection:
            return _read(connection, outcome.trial_id, wall)


def _read(connection: Connection, trial_id: int, wall: bool) -> Rows:
    def select(columns: Sequence[str], rest: str) -> list[list[object]]:
        found = connection.execute(text(f"SELECT {', '.join(columns)} FROM {rest}"), {"trial": trial_id})
        return [list(row) for row in found]

    def turns(columns: Sequence[str]) -> list[list[object]]:
        return select(columns, "turn WHERE trial_id = :trial ORDER BY ordinal, session, turn")

    if wall:
        return Rows(turns(TURN), [], turns(("session", "turn", "output_sha256")), [], [], [])
    counted = dict(select(("name", "value"), "metric WHERE trial_id = :trial AND label = ''"))
    misses = "miss JOIN turn ON turn.id = miss.turn_id WHERE miss.trial_id = :trial ORDER BY ordinal, miss.rowid"
    return Rows(
        turns=turns(TURN),
        times=turns(TIMES),
        tokens=turns(("session", "turn", "output_sha256")),
        counters=[[name, counted.get(name)] for name in METRICS],
        misses=select(MISS, misses),
        holdings=select(HOLDING, "holding WHERE trial_id = :trial ORDER BY session, tier"),
    )
