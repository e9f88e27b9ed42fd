"""The ledger of misses: why prompt tokens of a turn had no KV. Turns recorded before have none."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Float, ForeignKeyConstraint, Integer, Text

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
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
