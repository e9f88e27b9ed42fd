"""From an older schema of the results database to the present one, revision by revision, in one transaction.

A new revision is a file in migrations/versions whose `down_revision` is the one before; results.schema says what the
tables are in the end, and its SCHEMA_VERSION names the last revision. A revision that alters `trial` drops the views
current_trial and sweep_result first and makes them again, and on SQLite alters by `op.batch_alter_table`, which copies the
table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection

from pensieve.errors import ResultsError
from pensieve.results.schema import VERSION_TABLE, Base

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory

FOLDER = Path(__file__).parent / "migrations"
VERSIONS: Sequence[Path] = (FOLDER / "versions",)


def known_versions() -> list[str]:
    """All revisions there are, oldest first. Alembic is imported here and nowhere earlier: a sound database needs none."""
    return [script.revision for script in reversed(list(_scripts().walk_revisions()))]


def upgrade(connection: Connection, target: str) -> None:
    """Run the revisions after the one the database is stamped with (all, for an empty one), and stamp it with `target`.

    connection: inside a transaction, which the caller commits; on SQLite with foreign keys off, since a table that is
    copied and dropped would take with it all that refers to it. Raises ResultsError where rows are left dangling.
    """
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext

    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 0, "an upgrade with foreign keys on"
    logging.getLogger("alembic").setLevel(logging.WARNING)
    scripts = _scripts()

    def steps(revision: Any, _context: Any) -> Any:
        return scripts._upgrade_revs(target, revision)  # what `alembic upgrade` itself calls; there is no public way

    with EnvironmentContext(Config(), scripts, fn=steps) as environment:
        environment.configure(connection=connection, target_metadata=Base.metadata, version_table=VERSION_TABLE)
        environment.run_migrations()
    dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").first() if sqlite else None
    if dangling is not None:
        raise ResultsError(
            f"The upgrade of the results database to version {target} would leave rows of table {dangling[0]} "
            "without what they belong to; it was left as it is. Please report it."
        )


def _scripts() -> ScriptDirectory:
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(FOLDER), version_locations=[str(folder) for folder in VERSIONS])
