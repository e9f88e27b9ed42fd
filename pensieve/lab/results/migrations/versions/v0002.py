"""Bytes that nobody counted are null, what each job of a sweep shows is a view, metrics are found by name and label.

Until now such bytes were 0: those of a turn in all ways, and those sent in the metrics.
"""

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
    op.create_index("ix_metric_name_label", "metric", ["name", "label"])
    op.execute(
        "CREATE VIEW sweep_result AS "
        "SELECT s.sweep_id, s.job, t.id AS trial_id FROM sweep_trial s JOIN trial l ON l.id = s.trial_id "
        "JOIN trial t ON t.fingerprint = l.fingerprint AND t.status = 'completed' AND t.attempt = "
        "(SELECT MAX(u.attempt) FROM trial u WHERE u.fingerprint = l.fingerprint AND u.status = 'completed' "
        "AND u.attempt <= l.attempt)"
    )
