"""History found on disk, a third place beside GPU and CPU. Turns recorded before were served without a disk tier."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Integer

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("turn", Column("disk_hit_tokens", Integer(), nullable=True))
    op.execute("UPDATE turn SET disk_hit_tokens = 0 WHERE cpu_hit_tokens IS NOT NULL")  # else the engine tells no tiers
