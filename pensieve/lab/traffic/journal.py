"""A recording under way: rows in an SQLite file beside the Parquet file that they become, committed each second."""

import dataclasses
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pensieve.errors import ConfigError
from pensieve.lab.traffic.table import COLUMNS, Exchange, Facts, with_ratio, write

COMMIT_S = 1.0
"""What is lost with a process that is killed."""

log = logging.getLogger(__name__)


class Journal:
    """Rows until the recording ends; the newest row of a request counts. One thread at a time uses it.

    A disk that is full, or fails, ends the recording with a line in the log and raises nothing: `lost` counts what comes
    after. Raises ConfigError where the file cannot be made.
    """

    def __init__(self, path: Path, facts: Facts) -> None:
        """path: of the Parquet file; one that is there, or a recording that was killed, is left and completed: the next free
        name is taken."""
        finish(path)
        self.path = next(one for one in _names(path) if not one.exists() and finish(one) is None)
        self.facts = facts
        self.lost: Counter[str] = Counter()
        self._rows: dict[int, Exchange] = {}
        self._failed = False
        try:
            self._file = sqlite3.connect(_journal(self.path), check_same_thread=False)
            self._file.execute("pragma journal_mode=wal")
            self._file.execute("pragma synchronous=off")  # of the process's end, not of the machine's
            self._file.execute("create table facts (json text)")
            self._file.execute("create table row (request integer primary key, arrival_s real, json text)")
            self._tell(complete=False)
            self._file.commit()
        except sqlite3.Error as error:
            raise ConfigError(f"{self.path} cannot be recorded ({error}); give another --out.") from error

    def put(self, row: Exchange) -> None:
        """The row as it stands; it replaces an earlier one of its request."""
        self._rows[row.request] = row

    def commit(self) -> None:
        rows, self._rows = self._rows, {}
        if self._failed:
            self.lost["disk"] += sum(row.status != "unfinished" for row in rows.values())
            return
        try:
            plain = (json.dumps([getattr(one, name) for name in COLUMNS], default=list) for one in rows.values())
            put = [(one.request, one.arrival_s, said) for one, said in zip(rows.values(), plain, strict=True)]
            self._file.executemany("insert or replace into row values (?, ?, ?)", put)
            self._file.commit()
        except sqlite3.Error as error:
            self._failed = True
            self.lost["disk"] += sum(row.status != "unfinished" for row in rows.values())
            log.error("The recording ends here, what comes is not recorded: %s (%s).", error, self.path)

    def close(self, complete: bool = True) -> Path | None:
        """Make the Parquet file; None where the disk has no room for it, and the journal stays."""
        self.commit()
        try:
            self._tell(complete)
            self._file.commit()
        except sqlite3.Error as error:
            log.error("The facts of %s are not up to date: %s", self.path, error)
        self._file.close()
        return finish(self.path)

    def _tell(self, complete: bool) -> None:
        self.facts = dataclasses.replace(self.facts, lost=dict(self.lost), complete=complete)
        self._file.execute("delete from facts")
        self._file.execute("insert into facts values (?)", (json.dumps(dataclasses.asdict(self.facts)),))


def finish(path: Path) -> Path | None:
    """Make the Parquet file of a recording from its journal, also of one that was killed. None: there is none, or the disk
    has no room: the journal then stays."""
    journal = _journal(path)
    if not journal.exists():
        return None
    try:
        file = sqlite3.connect(journal)
        [told] = file.execute("select json from facts").fetchone() or [None]
        if told is not None:
            facts = Facts(**json.loads(told))
            if facts.unit == "bytes":
                facts = with_ratio(facts, _rows(file), "usage.prompt_tokens")
            write(path, facts, _rows(file))
        file.close()
        journal.unlink()
    except (sqlite3.Error, OSError) as error:
        log.error("%s cannot be completed: %s. Its rows are in %s.", path, error, journal)
        return None
    return path


def _rows(file: sqlite3.Connection) -> Iterator[Exchange]:
    for (row,) in file.execute("select json from row order by arrival_s, request"):
        yield Exchange(*json.loads(row))


def _journal(path: Path) -> Path:
    return path.with_name(f"{path.name}.journal")


def _names(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.stem}-{place}{path.suffix}") for place in range(2, 100_000))
