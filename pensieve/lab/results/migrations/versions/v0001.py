"""The oldest schema that can be upgraded (tests/results/version_1.sql). The chain of revisions starts here.

It creates nothing: results.schema is the one definition of the tables, and a new database is made from it.
"""

from __future__ import annotations

revision = "0001"
down_revision = None


def upgrade() -> None:
    raise AssertionError("a database without a version is created by results.database, not upgraded")
