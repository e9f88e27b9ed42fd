"""A database of version 1 as it was written then, and what later revisions must do with it."""

import os
import signal
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Column, Text, inspect, text
from sqlalchemy.exc import IntegrityError

from pensieve.errors import ResultsError
from pensieve.lab.results import database, migrations
from pensieve.lab.results.database import Database
from pensieve.lab.results.schema import SCHEMA_VERSION, VERSION_TABLE, Base
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


NEW = "9999"


def second(monkeypatch, more=lambda op: None):
    """A made-up next version."""

    def upgrade(op):
        op.execute("DROP VIEW current_trial")
        op.execute("DROP VIEW sweep_result")
        with op.batch_alter_table("trial", recreate="always") as table:  # loses rows where foreign keys are on
            table.add_column(Column("remark", Text, nullable=True))
            table.alter_column("dtype", nullable=False, server_default="float32")
        op.execute("UPDATE trial SET remark = 'was ' || status")
        more(op)
        op.execute("CREATE VIEW current_trial AS SELECT * FROM trial WHERE status = 'completed'")

    monkeypatch.setitem(migrations.REVISIONS, NEW, upgrade)
    monkeypatch.setattr(database, "SCHEMA_VERSION", NEW)


def contents(path):
    with sqlite3.connect(path) as connection:
        found = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        tables = [t for t in CONTRACT if t != VERSION_TABLE and t in found]
        return {t: connection.execute(f"SELECT * FROM {t} ORDER BY 1, 2, 3").fetchall() for t in tables}


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


def test_version_2_adds_what_each_job_shows_and_finds_metrics_by_name(old):
    before = contents(old)
    open_store(old.parent)
    assert {**contents(old), "turn": [], "miss": [], "holding": []} == {**before, "turn": [], "miss": [], "holding": []}
    with sqlite3.connect(old) as connection:
        assert connection.execute("SELECT * FROM sweep_result ORDER BY job").fetchall() == [(1, 0, 1), (1, 1, 2)]
        plan = connection.execute(
            "EXPLAIN QUERY PLAN SELECT value FROM metric WHERE name = 'x' AND label = ''"
        ).fetchall()
        assert "ix_metric_name_label" in plan[0][-1]


def test_an_older_database_is_upgraded_without_loss(old, monkeypatch):
    second(monkeypatch)
    before = contents(old)
    Database(f"sqlite:///{old}")
    after = contents(old)
    assert [row[:-1] for row in after["trial"]] == before["trial"]
    assert [row[-1] for row in after["trial"]] == ["was completed", "was completed", "was failed"]
    assert [without_bytes(row[:-1]) for row in after["turn"]] == [without_bytes(row) for row in before["turn"]] != []
    for table in before.keys() - {"trial", "turn"}:
        assert after[table] == before[table], table
        assert before[table], f"version_1.sql has no row of {table}"
    with sqlite3.connect(old) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        assert connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [(NEW,)]
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("DELETE FROM trial WHERE id = 1")  # what refers to it still does
        assert connection.execute("SELECT count(*) FROM turn").fetchone() == (0,)
        connection.rollback()
    assert Database(f"sqlite:///{old}").shown == str(old)  # once is enough


def no_power(op):
    raise RuntimeError("power loss")


@pytest.mark.parametrize("more", [no_power, lambda op: op.execute("DELETE FROM sweep")])
def test_an_upgrade_that_fails_changes_nothing(old, monkeypatch, more):
    second(monkeypatch, more)
    before = contents(old)
    with pytest.raises((RuntimeError, ResultsError), match=r"power loss|without what they belong to"):
        Database(f"sqlite:///{old}")
    assert contents(old) == before
    with sqlite3.connect(old) as connection:
        assert connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall() == [("0001",)]


def test_a_process_killed_in_the_middle_of_an_upgrade(old, monkeypatch):
    second(monkeypatch, lambda op: os.kill(os.getpid(), signal.SIGKILL))
    before = contents(old)
    with pytest.raises(EOFError):
        in_another_process(Database, f"sqlite:///{old}")
    assert contents(old) == before
    second(monkeypatch)
    Database(f"sqlite:///{old}")
    assert [row[-1] for row in contents(old)["trial"]] == ["was completed", "was completed", "was failed"]


def test_a_newer_database_is_refused(old, monkeypatch):
    second(monkeypatch)
    Database(f"sqlite:///{old}")
    monkeypatch.delitem(migrations.REVISIONS, NEW)
    monkeypatch.setattr(database, "SCHEMA_VERSION", SCHEMA_VERSION)
    with pytest.raises(ResultsError, match=f"schema version {NEW}, this Pensieve reads {SCHEMA_VERSION}"):
        Database(f"sqlite:///{old}")


def test_the_revisions_lead_to_the_schema_that_a_new_database_gets(old, tmp_path):
    assert list(migrations.REVISIONS)[-1] == SCHEMA_VERSION
    engine = Database(f"sqlite:///{old}").engine
    new = open_store(tmp_path / "new").database.engine
    with engine.connect() as stepped, new.connect() as made:
        compared = MigrationContext.configure(stepped, opts={"version_table": VERSION_TABLE, "compare_type": False})
        assert compare_metadata(compared, Base.metadata) == []
        for name in CONTRACT:
            if name == VERSION_TABLE:
                continue  # Alembic's own spelling
            columns = [
                [
                    (c["name"], str(c["type"]).replace("DOUBLE", "FLOAT"), c["nullable"])
                    for c in inspect(x).get_columns(name)
                ]
                for x in (stepped, made)
            ]
            assert columns[0] == columns[1], name
            names = [sorted(str(k["name"]) for k in inspect(x).get_indexes(name)) for x in (stepped, made)]
            assert names[0] == names[1], name
        ask = text("SELECT name, sql FROM sqlite_master WHERE type = 'view' ORDER BY name")
        views = [x.execute(ask).all() for x in (stepped, made)]
        assert [view.name for view in views[0]] == ["current_trial", "sweep_result"]
        assert views[0] == views[1]


def test_version_3_adds_a_ledger_that_goes_with_its_turns(old):
    store = open_store(old.parent)
    ledger = text(
        "SELECT ordinal, cause, evicted_by, tokens, ms FROM miss JOIN turn ON turn.id = turn_id "
        "WHERE miss.trial_id = 1 ORDER BY ordinal, cause"
    )
    with store.database.reading() as connection:
        assert connection.execute(ledger).all() == []
    turn = TurnRecord("c", 1, ordinal=7)
    turn.misses = (Miss("evicted", 5, 1.5, "b", 3.0), Miss("new", 2, 0.5))
    store.add_turns(1, [TurnRecord("c", 0, ordinal=6), turn])
    with store.database.writing() as connection:
        assert connection.execute(ledger).all() == [(7, "evicted", "b", 5, 1.5), (7, "new", None, 2, 0.5)]
        connection.execute(text("DELETE FROM turn WHERE trial_id = 1"))
        assert connection.execute(text("SELECT count(*) FROM miss")).scalar() == 0


def test_version_4_counts_history_found_on_disk(old):
    with sqlite3.connect(old) as connection:
        connection.execute("UPDATE turn SET cpu_hit_tokens = 5 WHERE ordinal = (SELECT min(ordinal) FROM turn)")
        told = connection.execute("SELECT ordinal, cpu_hit_tokens IS NOT NULL FROM turn").fetchall()
    store = open_store(old.parent)
    assert {known for _, known in told} == {0, 1}
    assert [t.disk_hit_tokens for t in store.turns_of(1)] == [0 if known else None for _, known in sorted(told)]
    store.add_turns(1, [TurnRecord("c", 0, ordinal=6, disk_hit_tokens=64)])
    assert [t.disk_hit_tokens for t in store.turns_of(1)][-1] == 64


def test_version_5_adds_what_conversations_held_and_it_goes_with_its_trial(old):
    store = open_store(old.parent)
    assert store.holdings_of(1) == []
    held = [Holding("a", "cpu", 1.5, 0.0, 1.5), Holding("a", "gpu", 2.5, 0.25, 2.0)]
    store.add_holdings(1, held)
    assert store.holdings_of(1) == held
    with pytest.raises(IntegrityError):
        store.add_holdings(1, held[:1])
    with store.database.writing() as connection:
        connection.execute(text("DELETE FROM trial WHERE id = 1"))
        assert connection.execute(text("SELECT count(*) FROM holding")).scalar() == 0
