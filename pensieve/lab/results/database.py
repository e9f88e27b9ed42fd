"""Opens a results database, runs whole transactions on it, and turns the driver's errors into sentences."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from sqlalchemy import Connection, Engine, create_engine, event, insert, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool, StaticPool

from pensieve.errors import ResultsError, typed
from pensieve.lab.results.schema import SCHEMA_VERSION, VERSION_TABLE, Base, version_table

BUSY_TIMEOUT_S = 30
SCHEMA_LOCK_TIMEOUT_S = 60
CHECKED_BYTES = 64 * 2**20  # SQLite files up to this size are checked page by page when they are opened
_HEADER_BYTES = 100  # SQLite takes a shorter file for an empty one
_SCHEMA_LOCK_KEY = 0x70656E73  # a PostgreSQL advisory lock: any number will do, as long as all of us take the same

_SENTENCES = (  # part of the driver's message -> what it means, and what to do
    ("not a database", "is damaged, or is no SQLite database; move it away and run again. It was left as it is."),
    ("malformed", "is damaged; move it away, or recover it with `sqlite3 FILE .recover`. It was left as it is."),
    ("readonly", "cannot be written; give this user write permission, or set PENSIEVE_OUTPUTS to another folder."),
    ("disk is full", "cannot grow: the disk is full. Free some space, or set PENSIEVE_OUTPUTS to another disk."),
    ("disk i/o error", "cannot be written or read: the disk reports an error or is full. Check it with `df -h`."),
    ("unable to open", "cannot be opened; check that its folder exists and that this user may write to it."),
    ("locked", f"stayed locked by another process for {BUSY_TIMEOUT_S} s; end what holds it, then run again."),
    ("no such table", "lacks a table of this version of Pensieve; move it away and run again."),
)


class Database:
    """One SQL database. `reading` and `writing` give connections inside a transaction: all of it, or nothing.

    SQLite opens a connection for each transaction, so that processes may fork and no handle outlives its use, and takes
    the write lock when a writing transaction begins: a reader that turns writer would fail at once, without waiting.
    """

    def __init__(self, url: str, create: bool = True) -> None:
        try:
            self.url: URL = make_url(url)
        except ArgumentError:
            # Not the text itself: it may hold a password.
            raise ResultsError(
                "The results database's URL cannot be read; write it like sqlite:///outputs/results.db or "
                "postgresql+psycopg://user:password@host/name."
            ) from None
        self.sqlite = self.url.get_backend_name() == "sqlite"
        self.path = _sqlite_path(self.url) if self.sqlite else None
        self._memory_lock = threading.RLock() if self.sqlite and self.path is None else None
        if self.path is not None:
            check_sqlite_file(self.path, create)
        try:
            self.engine = self._engine()
        except (NoSuchModuleError, ImportError) as error:
            raise ResultsError(
                f"The results database {self.shown} needs a driver that is not installed ({error}); "
                "install it, for example with `pip install 'psycopg[binary]'`, or use SQLite."
            ) from None
        self._prepare()

    @property
    def shown(self) -> str:
        """The database's name for messages, without a password."""
        return str(self.path) if self.path is not None else self.url.render_as_string(hide_password=True)

    def reading(self) -> AbstractContextManager[Connection]:
        return self._transaction("DEFERRED")

    def writing(self) -> AbstractContextManager[Connection]:
        return self._transaction("IMMEDIATE")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep a connection open during many small transactions. SQLite copies its log into the file whenever the last
        connection is closed; without this one, every transaction would close the last connection."""
        if self.path is None:
            yield
            return
        with self.engine.connect() as connection:
            with self._sentences(), connection.begin():
                connection.exec_driver_sql("SELECT 1 FROM sqlite_master").fetchall()  # only then is the log open
            yield

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection]:
        with self._memory_lock or nullcontext(), self._sentences():
            engine = self.engine.execution_options(pensieve_begin=begin)
            with engine.begin() as connection:
                yield connection

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        try:
            yield
        except IntegrityError:
            raise  # the caller knows which rule it broke
        except DBAPIError as error:
            raise self._error(str(error.orig)) from error
        except SQLAlchemyError as error:
            raise self._error(str(error)) from error

    def _error(self, message: str) -> ResultsError:
        for part, sentence in _SENTENCES:
            if part in message.lower():
                return ResultsError(f"The results database {self.shown} {sentence}")
        first = message.strip().splitlines()[0] if message.strip() else "no reason given"
        return ResultsError(f"The results database {self.shown} refused: {first}")

    def _engine(self) -> Engine:
        if not self.sqlite:
            return create_engine(self.url, pool_pre_ping=True)
        memory = self.path is None
        engine = create_engine(
            self.url,
            poolclass=StaticPool if memory else NullPool,
            connect_args={"timeout": BUSY_TIMEOUT_S, "check_same_thread": False},
        )

        @event.listens_for(engine, "connect")
        def _connect(connection: Any, _record: Any) -> None:
            connection.isolation_level = None  # sqlite3 would begin by itself, and too late
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("PRAGMA synchronous=NORMAL")  # with WAL: safe against a crash of the process

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            begin = connection.get_execution_options().get("pensieve_begin", "DEFERRED")
            connection.exec_driver_sql(f"BEGIN {begin}")

        return engine

    def _prepare(self) -> None:
        """Create the schema if there is none, refuse a foreign one and one of another version. One process at a time."""
        if self._found_version() == SCHEMA_VERSION:
            with self.writing():  # a database that cannot be written says so now, not after the trial
                return
        try:
            with FileLock(f"{self.path}.lock", timeout=SCHEMA_LOCK_TIMEOUT_S) if self.path else nullcontext():
                if self.path is not None:
                    self.alone("PRAGMA journal_mode=WAL")
                with self.writing() as connection:
                    if not self.sqlite:
                        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK_KEY})
                    self._make_schema(connection)
        except Timeout:
            raise ResultsError(
                f"Another process has been creating {self.shown} for {SCHEMA_LOCK_TIMEOUT_S} s; "
                f"if none is running, delete {self.path}.lock and run again."
            ) from None
        except OSError as error:
            raise ResultsError(
                f"The results database {self.shown} cannot be created ({error.strerror or error}); give this user write "
                "permission on its folder, or set PENSIEVE_OUTPUTS to another folder."
            ) from None

    def _make_schema(self, connection: Connection) -> None:
        """All or nothing, under the lock: another process may have been faster."""
        if _version(connection) is None:
            Base.metadata.create_all(connection)
            connection.execute(insert(version_table).values(version_num=SCHEMA_VERSION))

    def _found_version(self) -> str | None:
        """The schema's version, None where there is no schema yet. Raises ResultsError where it is someone else's."""
        with self.reading() as connection:
            names = set(inspect(connection).get_table_names())
            version = _version(connection)
        if version is None and (names if self.sqlite else names & set(Base.metadata.tables)):
            raise ResultsError(f"{self.shown} is a database, but not one of Pensieve's results; name another one.")
        if version not in (None, SCHEMA_VERSION):
            raise ResultsError(
                f"The results database {self.shown} has schema version {version}, this Pensieve reads {SCHEMA_VERSION}; "
                "use the Pensieve that wrote it, or name another database."
            )
        return version

    def alone(self, statement: str) -> None:
        """Run a statement of SQLite that must not be inside a transaction: VACUUM, or a PRAGMA."""
        with self._memory_lock or nullcontext(), self._sentences(), self.engine.connect() as connection:
            connection.connection.driver_connection.execute(statement)  # type: ignore[union-attr]


def _version(connection: Connection) -> str | None:
    there = inspect(connection).has_table(VERSION_TABLE)
    return connection.scalar(select(version_table.c.version_num)) if there else None


def _sqlite_path(url: URL) -> Path | None:
    """The database's file; None where it is in memory."""
    return Path(url.database).absolute() if url.database and url.database != ":memory:" else None


def check_sqlite_file(path: Path, create: bool = True) -> None:
    """Refuse, without opening it for writing, a file that is no sound SQLite database.

    create: a missing (or empty) file is fine, since it will be made. Raises ResultsError.
    """
    if not path.parent.is_dir():
        raise ResultsError(f"The folder {path.parent} of the results database does not exist; create it first.")
    if not path.exists() or path.stat().st_size == 0:
        if create:
            return
        raise ResultsError(f"There are no results at {path} yet; run `{typed('run')} -m` first.")
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
            # SQLite refuses a file that is shorter than its own header and its log say: it was cut off.
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            size = path.stat().st_size
            whole = size > CHECKED_BYTES or connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"
            sound = whole and size >= _HEADER_BYTES
    except sqlite3.DatabaseError as error:
        # Anything else (locked, no permission for the log file) is told better when the engine opens it.
        sound = "not a database" not in str(error) and "malformed" not in str(error)
    if not sound:
        raise ResultsError(
            f"The results database {path} is damaged, or is no SQLite database; move it away and run again. "
            "It was left as it is."
        )
