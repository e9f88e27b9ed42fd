"""Bytes that nobody counted are null: until now they were 0, those of a turn in all ways and those sent in the metrics."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger

revision = "0002"
down_revision = "0001"

NEVER_SENT = ("sent_bytes", "received_bytes")
COLUMNS = ("h2d_bytes", "d2h_bytes", *NEVER_SENT)


def upgrade() -> None:
    with op.batch_alter_table("turn") as turns:
        for name in COLUMNS:
            turns.alter_column(name, existing_type=BigInteger(), nullable=True)
    for name in COLUMNS:
        op.execute(f"UPDATE turn SET {name} = NULL WHERE {name} = 0")
    for name in NEVER_SENT:
        op.execute(f"UPDATE metric SET value = NULL WHERE value = 0 AND name IN ('{name}', '{name}_per_token')")
