"""A database of version 1 as it was written then, and what an upgrade makes of it."""

import os
import signal
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import inspect, text
from sqlalchemy.exc import IntegrityError

from pensieve.lab.results import schema
from pensieve.lab.results.database import Database
from pensieve.lab.results.schema import SCHEMA_VERSION, VERSION_TABLE
from pensieve.lab.results.store import Holding, open_store
from pensieve.serve.record import Miss, TurnRecord
from tests.results.test_database import in_another_process
from tests.results.test_schema import CONTRACT

VERSION_1 = Path(__file__).parent / "version_1.sql"


@pytest.fixture
def old(tmp_path):
    """results.db as a Pensieve of version 1 left it."""
    path = tmp_path / "results.db"
    with sqlite3.connect(path) as connection:
        connection.executescript(VERSION_1.read_text(encoding="utf-8"))
    connection.close()
    return path


def contents(path):
    with sqlite3.connect(path) as connection:
        found = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        tables = [table for table in CONTRACT if table in found]
        return {table: connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in tables}


def without_bytes(turn):
    return turn[:-5] + turn[-1:]


def test_bytes_that_no_engine_counted_become_null(old):
    with sqlite3.connect(old) as connection:
        for name in ("sent_bytes", "sent_bytes_per_token", "h2d_bytes"):
            connection.execute(
                "INSERT INTO metric (trial_id, name, label, value, unit) VALUES (2, ?, '', 0, '')", [name]
            )
    connection.close()
    store = open_store(old.parent)
    metrics = {metric.name: metric.value for metric in store.metrics_of(2)}
    assert [metrics[name] for name in ("sent_bytes", "sent_bytes_per_token", "h2d_bytes")] == [None, None, 0]
    turns = store.turns_of(1, "h2d_bytes", "d2h_bytes", "sent_bytes", "received_bytes")
    assert [tuple(turn) for turn in turns] == [(None,) * 4] * 2


def test_a_database_of_version_1_opens_and_reads(old):
    store = open_store(old.parent)
    assert store.latest_sweep().overrides == {"seed": "0", "baseline": "pensieve,stateless"}
    first, second = (job.trial for job in store.trials_of_sweep(1))
    assert (first.baseline, first.config["model"]["name"], second.baseline) == ("pensieve", "tiny", "stateless")
    assert first.started_at.isoformat() == "2026-01-02T03:04:05.600000+00:00"
    assert {m.name: m.value for m in store.metrics_of(1)} == {"ttft_ms_p50": 12.5, "power_w": None}
    assert [(t.session, t.ttft_ms, t.stream) for t in store.turns_of(1)] == [("a", 12.5, True), ("b", None, False)]
    assert store.samples_of(1)[0].unit == "blocks"
    assert store.artifacts_of(1)[0].path == old.parent / "runs/tokens.parquet"


def test_an_upgrade_loses_nothing(old):
    before = contents(old)
    Database(f"sqlite:///{old}")
    after = contents(old)
    assert [without_bytes(row[:-1]) for row in after["turn"]] == [without_bytes(row) for row in before["turn"]] != []
    for table in before.keys() - {"turn", VERSION_TABLE}:
        assert after[table] == before[table] != [], table
    assert (after["miss"], after["holding"], after[VERSION_TABLE]) == ([], [], [(SCHEMA_VERSION,)])
    with sqlite3.connect(old) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("DELETE FROM trial WHERE id = 1")  # what refers to it still does
        assert connection.execute("SELECT count(*) FROM turn").fetchone() == (0,)
        connection.rollback()
    assert Database(f"sqlite:///{old}").shown == str(old)  # once is enough


def test_an_upgrade_that_is_killed_or_fails_changes_nothing(old, monkeypatch):
    before = contents(old)

    def fails(_):
        raise RuntimeError("power loss")

    with monkeypatch.context() as patch:
        patch.setattr(schema, "_create_views", fails)
        patch.setattr(schema.Base.metadata, "create_all", fails)
        with pytest.raises(RuntimeError, match="power loss"):
            Database(f"sqlite:///{old}")
        assert contents(old) == before
        patch.setattr(schema.Base.metadata, "create_all", lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(EOFError):
            in_another_process(Database, f"sqlite:///{old}")
    assert contents(old) == before
    Database(f"sqlite:///{old}")
    assert contents(old)[VERSION_TABLE] == [(SCHEMA_VERSION,)]


def test_an_upgraded_database_has_the_schema_that_a_new_one_gets(old, tmp_path):
    """Names, types and keys; SQLite itself spells them."""
    engines = Database(f"sqlite:///{old}").engine, open_store(tmp_path / "new").database.engine

    def described(engine, name):
        found = inspect(engine)
        columns = [
            (c["name"], str(c["type"]).replace("DOUBLE", "FLOAT"), c["nullable"]) for c in found.get_columns(name)
        ]
        keys = found.get_pk_constraint(name)["constrained_columns"], found.get_foreign_keys(name)
        unique = sorted(str(one["name"]) for one in found.get_unique_constraints(name))
        indexes = sorted(repr({**one, "dialect_options": None}) for one in found.get_indexes(name))
        return columns, keys, unique, indexes

    for name in CONTRACT.keys() - {VERSION_TABLE}:  # Alembic made that one, in its own spelling
        upgraded, new = (described(engine, name) for engine in engines)
        assert upgraded == new, name
    ask = text("SELECT name, sql FROM sqlite_master WHERE type = 'view' ORDER BY name")
    views = []
    for engine in engines:
        with engine.connect() as connection:
            views.append(connection.execute(ask).all())
    assert [view.name for view in views[0]] == ["current_trial", "sweep_result"] and views[0] == views[1]


def test_a_ledger_goes_with_its_turns(old):
    store = open_store(old.parent)
    ledger = text(
        "SELECT ordinal, cause, evicted_by, tokens, ms FROM miss JOIN turn ON turn.id = turn_id "
        "WHERE miss.trial_id = 1 ORDER BY ordinal, cause"
    )
    turn = TurnRecord("c", 1, ordinal=7)
    turn.misses = (Miss("evicted", 5, 1.5, "b", 3.0), Miss("new", 2, 0.5))
    store.add_turns(1, [TurnRecord("c", 0, ordinal=6), turn])
    with store.database.writing() as connection:
        assert connection.execute(ledger).all() == [(7, "evicted", "b", 5, 1.5), (7, "new", None, 2, 0.5)]
        connection.execute(text("DELETE FROM turn WHERE trial_id = 1"))
        assert connection.execute(text("SELECT count(*) FROM miss")).scalar() == 0


def test_history_on_disk_is_counted_from_version_4_on(old):
    with sqlite3.connect(old) as connection:
        connection.execute("UPDATE turn SET cpu_hit_tokens = 5 WHERE ordinal = (SELECT min(ordinal) FROM turn)")
        told = connection.execute("SELECT ordinal, cpu_hit_tokens IS NOT NULL FROM turn").fetchall()
    store = open_store(old.parent)
    assert {known for _, known in told} == {0, 1}
    assert [t.disk_hit_tokens for t in store.turns_of(1)] == [0 if known else None for _, known in sorted(told)]


def test_what_conversations_held_goes_with_its_trial(old):
    store = open_store(old.parent)
    held = [Holding("a", "cpu", 1.5, 0.0, 1.5), Holding("a", "gpu", 2.5, 0.25, 2.0)]
    store.add_holdings(1, held)
    assert store.holdings_of(1) == held
    with pytest.raises(IntegrityError):
        store.add_holdings(1, held[:1])
    with store.database.writing() as connection:
        connection.execute(text("DELETE FROM trial WHERE id = 1"))
        assert connection.execute(text("SELECT count(*) FROM holding")).scalar() == 0
