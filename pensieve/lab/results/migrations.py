"""Upgrades of an older results database, revision by revision, in one transaction.

A new database is made from the models (results.schema) and stamped with SCHEMA_VERSION; no revision runs for it. A change
of the schema is made in the models, and a function here, which is the last of REVISIONS, alters the older databases;
SCHEMA_VERSION then names it. A revision that alters `trial` drops the views current_trial and sweep_result first and creates
them again; on SQLite it alters by `op.batch_alter_table`, which copies the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    ForeignKeyConstraint,
    Integer,
    PrimaryKeyConstraint,
    Text,
    select,
    update,
)

from pensieve.errors import ResultsError
from pensieve.lab.results.schema import version_table

if TYPE_CHECKING:
    from alembic.operations import Operations

OLDEST = "0001"
"""The oldest schema that can be upgraded (tests/results/version_1.sql)."""


def _uncounted_bytes_are_null(op: Operations) -> None:
    """Such bytes were 0: those of a turn in all ways, and those sent in the metrics. Also what each job of a sweep shows is a
    view, and metrics are found by name and label."""
    never_sent = ("sent_bytes", "received_bytes")
    columns = ("h2d_bytes", "d2h_bytes", *never_sent)
    with op.batch_alter_table("turn") as turns:
        for name in columns:
            turns.alter_column(name, existing_type=BigInteger(), nullable=True)
    for name in columns:
        op.execute(f"UPDATE turn SET {name} = NULL WHERE {name} = 0")
    for name in never_sent:
        op.execute(f"UPDATE metric SET value = NULL WHERE value = 0 AND name IN ('{name}', '{name}_per_token')")
    op.create_index("ix_metric_name_label", "metric", ["name", "label"])
    op.execute(
        "CREATE VIEW sweep_result AS "
        "SELECT s.sweep_id, s.job, t.id AS trial_id FROM sweep_trial s JOIN trial l ON l.id = s.trial_id "
        "JOIN trial t ON t.fingerprint = l.fingerprint AND t.status = 'completed' AND t.attempt = "
        "(SELECT MAX(u.attempt) FROM trial u WHERE u.fingerprint = l.fingerprint AND u.status = 'completed' "
        "AND u.attempt <= l.attempt)"
    )


def _ledger_of_misses(op: Operations) -> None:
    """Why prompt tokens of a turn had no KV. Turns recorded before have none."""
    big_id = BigInteger().with_variant(Integer(), "sqlite")
    op.create_table(
        "miss",
        Column("trial_id", Integer(), nullable=False),
        Column("turn_id", big_id, nullable=False),
        Column("cause", Text(), nullable=False),
        Column("evicted_by", Text()),
        Column("tokens", Integer(), nullable=False),
        Column("ms", Float(), nullable=False),
        ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_miss_trial_id_trial", ondelete="CASCADE"),
        ForeignKeyConstraint(["turn_id"], ["turn.id"], name="fk_miss_turn_id_turn", ondelete="CASCADE"),
    )
    op.create_index("ix_miss_trial_id", "miss", ["trial_id"])
    op.create_index("ix_miss_turn_id", "miss", ["turn_id"])


def _history_on_disk(op: Operations) -> None:
    """A third place beside GPU and CPU. Turns recorded before were served without a disk tier."""
    op.add_column("turn", Column("disk_hit_tokens", Integer(), nullable=True))
    op.execute("UPDATE turn SET disk_hit_tokens = 0 WHERE cpu_hit_tokens IS NOT NULL")  # else the engine tells no tiers


def _ledger_of_holding(op: Operations) -> None:
    """What each conversation held of each tier, and what that saved. Trials recorded before have none."""
    op.create_table(
        "holding",
        Column("trial_id", Integer(), nullable=False),
        Column("session", Text(), nullable=False),
        Column("tier", Text(), nullable=False),
        Column("gib_s", Float(), nullable=False),
        Column("saved_s", Float(), nullable=False),
        Column("idle_gib_s", Float(), nullable=False),
        PrimaryKeyConstraint("trial_id", "session", "tier", name="pk_holding"),
        ForeignKeyConstraint(["trial_id"], ["trial.id"], name="fk_holding_trial_id_trial", ondelete="CASCADE"),
    )


REVISIONS: dict[str, Callable[[Operations], None]] = {
    "0002": _uncounted_bytes_are_null,
    "0003": _ledger_of_misses,
    "0004": _history_on_disk,
    "0005": _ledger_of_holding,
}
"""By the version that each leads to, in order."""


def upgrade(connection: Connection, target: str) -> None:
    """Run the revisions after the one the database is stamped with, and stamp it with `target`.

    connection: inside a transaction, which the caller commits; on SQLite with foreign keys off, since a table that is
    copied and dropped would delete all rows that refer to it. Raises ResultsError where rows refer to nothing afterwards.
    """
    # Imported here only: a database that is up to date needs no Alembic.
    from alembic.migration import MigrationContext
    from alembic.operations import Operations

    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 0, "an upgrade with foreign keys on"
    logging.getLogger("alembic").setLevel(logging.WARNING)
    found = connection.scalar(select(version_table.c.version_num))
    op = Operations(MigrationContext.configure(connection))
    versions = [OLDEST, *REVISIONS]
    for version in versions[versions.index(str(found)) + 1 :]:
        REVISIONS[version](op)
    connection.execute(update(version_table).values(version_num=target))
    dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").first() if sqlite else None
    if dangling is not None:
        raise ResultsError(
            f"The upgrade of the results database to version {target} would leave rows of table {dangling[0]} "
            "without what they belong to; it was left as it is. Please report it."
        )
