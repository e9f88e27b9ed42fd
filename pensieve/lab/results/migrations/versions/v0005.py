"""The ledger of holding: what each conversation held of each tier, and what that saved. Trials recorded before have none."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Float, ForeignKeyConstraint, Integer, PrimaryKeyConstraint, Text

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
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
