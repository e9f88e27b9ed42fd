"""What each job of a sweep shows, as a view; metrics are found by name and label."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("ix_metric_name_label", "metric", ["name", "label"])
    op.execute(
        "CREATE VIEW sweep_result AS "
        "SELECT s.sweep_id, s.job, t.id AS trial_id FROM sweep_trial s JOIN trial l ON l.id = s.trial_id "
        "JOIN trial t ON t.fingerprint = l.fingerprint AND t.status = 'completed' AND t.attempt = "
        "(SELECT MAX(u.attempt) FROM trial u WHERE u.fingerprint = l.fingerprint AND u.status = 'completed' "
        "AND u.attempt <= l.attempt)"
    )
