"""Upgrades of an older results database, revision by revision, in one transaction.

A new database is made from the models (results.schema) and stamped with SCHEMA_VERSION; no revision runs for it. A change
of the schema is made in the models, and a file in migrations/versions, whose `down_revision` is the one before, alters
the older databases; SCHEMA_VERSION then names it. A revision that alters `trial` drops the views current_trial and
sweep_result first and creates them again; on SQLite it alters by `op.batch_alter_table`, which copies the table.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from pensieve.errors import ResultsError

if TYPE_CHECKING:
    from alembic.config import Config

FOLDER = Path(__file__).parent
VERSIONS: Sequence[Path] = (FOLDER / "versions",)


def known_versions() -> list[str]:
    """All revisions, oldest first. Alembic is imported here and in `upgrade` only: an up-to-date database needs none."""
    from alembic.script import ScriptDirectory

    return [script.revision for script in reversed(list(ScriptDirectory.from_config(_config()).walk_revisions()))]


def upgrade(connection: Connection, target: str) -> None:
    """Run the revisions after the one the database is stamped with, and stamp it with `target`.

    connection: inside a transaction, which the caller commits; on SQLite with foreign keys off, since a table that is
    copied and dropped would delete all rows that refer to it. Raises ResultsError where rows refer to nothing afterwards.
    """
    from alembic import command

    sqlite = connection.dialect.name == "sqlite"
    if sqlite:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 0, "an upgrade with foreign keys on"
    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, target)
    dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").first() if sqlite else None
    if dangling is not None:
        raise ResultsError(
            f"The upgrade of the results database to version {target} would leave rows of table {dangling[0]} "
            "without what they belong to; it was left as it is. Please report it."
        )


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    options = {
        "script_location": str(FOLDER),
        "path_separator": "os",
        "version_path_separator": "os",  # its name before Alembic 1.16
        "version_locations": os.pathsep.join(map(str, VERSIONS)),
    }
    for name, value in options.items():
        config.set_main_option(name, value.replace("%", "%%"))
    return config
