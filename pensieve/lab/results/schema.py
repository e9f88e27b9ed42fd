"""The results database: its tables and views, and how it is opened. Column names are a contract.

Times called `*_at` are UTC moments; times called `*_s` are seconds of the trial's own clock. Units are in the names. Whole
transactions run on it, and the driver's errors become sentences.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Dialect,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    column,
    create_engine,
    event,
    insert,
    inspect,
    select,
    table,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.pool import NullPool, StaticPool
from sqlalchemy.types import TypeEngine

from pensieve.errors import ResultsError, typed
from pensieve.serve.record import TurnRecord

SCHEMA_VERSION = "0005"
VERSION_TABLE = "pensieve_schema_version"
"""Shaped like Alembic's own (one row, `version_num`), under a name that an MLflow store in the same database does not
use."""

BENCH = "bench"  # the experiment of a bench command: its trials are single cases

CASCADE = "CASCADE"
BigId = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up by itself only in a column of type INTEGER


class UtcTime(TypeDecorator[datetime]):
    """A moment; SQLite has no time zones, so UTC goes in without one and comes out with it."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and value.astimezone(UTC).replace(tzinfo=None if dialect.name == "sqlite" else UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC))


class Base(DeclarativeBase):
    type_annotation_map = {str: Text(), datetime: UtcTime(), dict[str, Any]: JSON(), list[int]: JSON()}  # noqa: RUF012


version_table = Table(VERSION_TABLE, Base.metadata, Column("version_num", Text, primary_key=True))


class Sweep(Base):
    """key: hash of the sorted overrides and the resolved axes, so that a repeated command finds its sweep."""

    __tablename__ = "sweep"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    experiment: Mapped[str | None]
    command: Mapped[str | None]
    overrides: Mapped[dict[str, Any]]
    n_expected: Mapped[int]
    status: Mapped[str]  # running, completed, failed, interrupted
    host: Mapped[str]
    git_commit: Mapped[str | None]
    mlflow_run_id: Mapped[str | None]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class SweepTrial(Base):
    """For each job of a sweep the last attempt that it ran or reused. A trial may serve several sweeps. See sweep_result."""

    __tablename__ = "sweep_trial"

    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweep.id", ondelete=CASCADE), primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id", ondelete=CASCADE), index=True)
    job: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    reused: Mapped[bool]


class Trial(Base):
    """One attempt at one configuration. gpu_tokens and cpu_tokens are the effective ones (stateless: cpu 0)."""

    __tablename__ = "trial"

    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str]
    config_hash: Mapped[str] = mapped_column(index=True)
    code_hash: Mapped[str]
    platform: Mapped[str]
    attempt: Mapped[int]
    experiment: Mapped[str | None]
    model: Mapped[str]
    baseline: Mapped[str]
    eviction: Mapped[str | None]
    scheduler: Mapped[str | None]
    cache: Mapped[str | None]
    workload: Mapped[str]
    hardware: Mapped[str]
    seed: Mapped[int]
    repeat: Mapped[int]
    weights: Mapped[str | None]
    model_revision: Mapped[str | None]
    dtype: Mapped[str | None]
    device: Mapped[str | None]
    device_count: Mapped[int | None]
    simulated: Mapped[bool]
    contended: Mapped[bool]
    gpu_tokens: Mapped[int | None] = mapped_column(BigInteger)
    cpu_tokens: Mapped[int | None] = mapped_column(BigInteger)
    gpu_bytes: Mapped[int | None] = mapped_column(BigInteger)
    cpu_bytes: Mapped[int | None] = mapped_column(BigInteger)
    kv_bytes_per_token: Mapped[int | None] = mapped_column(BigInteger)
    working_set_tokens: Mapped[int | None] = mapped_column(BigInteger)
    measure_start_s: Mapped[float | None]
    measure_end_s: Mapped[float | None]
    status: Mapped[str]  # as a sweep's
    error: Mapped[str | None]
    traceback: Mapped[str | None]
    host: Mapped[str]
    pid: Mapped[int]
    process_started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    git_commit: Mapped[str | None]
    mlflow_run_id: Mapped[str | None]
    config: Mapped[dict[str, Any]]
    environment: Mapped[dict[str, Any]]
    engine: Mapped[dict[str, Any]]
    flags: Mapped[dict[str, Any]]

    __table_args__ = (
        UniqueConstraint("fingerprint", "attempt"),
        Index(
            "uq_trial_fingerprint_running",
            "fingerprint",
            unique=True,
            sqlite_where=text("status = 'running'"),
            postgresql_where=text("status = 'running'"),
        ),
    )


class MetricRow(Base):
    __tablename__ = "metric"

    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id", ondelete=CASCADE), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    label: Mapped[str] = mapped_column(primary_key=True, default="", server_default="")
    value: Mapped[float | None]
    unit: Mapped[str]
    n: Mapped[int | None]
    n_unit: Mapped[str | None]
    ci_low: Mapped[float | None]
    ci_high: Mapped[float | None]
    limit_value: Mapped[float | None]

    __table_args__ = (Index(None, "name", "label"),)


def _turn_columns() -> Iterator[Column[Any]]:
    """Of record.TurnRecord, up to its last column; its later fields are not recorded."""
    kinds: dict[str, TypeEngine[Any]] = {"int": Integer(), "float": Float(), "str": Text(), "bool": Boolean()}
    told = [(one.name, *str(one.type).split(" | ")) for one in fields(TurnRecord)]
    names = [name for name, *_ in told]
    for name, kind, *optional in told[: names.index("output_sha256") + 1]:
        yield Column(name, BigInteger() if name.endswith("_bytes") else kinds[kind], nullable=bool(optional))


turn_table = Table(
    "turn",
    Base.metadata,
    Column("id", BigId, primary_key=True),
    Column("trial_id", ForeignKey("trial.id", ondelete=CASCADE), index=True, nullable=False),
    # As older versions left them: the number of the turn first, what was added last at the end.
    *sorted(_turn_columns(), key=lambda one: (one.name != "ordinal", one.name == "disk_hit_tokens")),
)
"""The columns of record.TurnRecord, under a trial."""


sample_table = Table(  # without a primary key: two readings may share a moment of a virtual clock
    "sample",
    Base.metadata,
    Column("trial_id", ForeignKey("trial.id", ondelete=CASCADE), index=True, nullable=False),
    Column("at_s", Float, nullable=False),
    Column("device", Text, nullable=False, server_default=""),
    Column("name", Text, nullable=False),
    Column("value", Float),
    Column("unit", Text, nullable=False),
)


miss_table = Table(  # the ledger: lines of one turn may share a cause
    "miss",
    Base.metadata,
    Column("trial_id", ForeignKey("trial.id", ondelete=CASCADE), index=True, nullable=False),
    Column("turn_id", BigId, ForeignKey("turn.id", ondelete=CASCADE), index=True, nullable=False),
    Column("cause", Text, nullable=False),
    Column("evicted_by", Text),
    Column("tokens", Integer, nullable=False),
    Column("ms", Float, nullable=False),
)
"""Why prompt tokens of a turn had no KV, see ledger.py: its tokens are prompt - hits, its ms the turn's ttft_ms (latency_ms
of a turn without a first token)."""


holding_table = Table(
    "holding",
    Base.metadata,
    Column("trial_id", ForeignKey("trial.id", ondelete=CASCADE), primary_key=True),
    Column("session", Text, primary_key=True),
    Column("tier", Text, primary_key=True),  # gpu, cpu, disk
    Column("gib_s", Float, nullable=False),
    Column("saved_s", Float, nullable=False),
    Column("idle_gib_s", Float, nullable=False),
)
"""What a conversation held over the whole trial, see holding.py, and the seconds of prefill that what it found there saved,
over all its turns, warm-up included. idle_gib_s: the part of gib_s while no request of it ran."""


class ArtifactRow(Base):
    """path: relative to the outputs folder where it lies inside, else absolute. kind tokens: see results.tokens."""

    __tablename__ = "artifact"

    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id", ondelete=CASCADE), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str] = mapped_column(primary_key=True)
    sha256: Mapped[str | None]


class ClaimRow(Base):
    """A published number compared with ours. verdict: holds, fails, inconclusive, not comparable."""

    __tablename__ = "claim"

    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweep.id", ondelete=CASCADE), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    claimed: Mapped[float | None]
    measured: Mapped[float | None]
    ci_low: Mapped[float | None]
    ci_high: Mapped[float | None]
    n: Mapped[int | None]
    verdict: Mapped[str]
    trial_ids: Mapped[list[int]]


current_trial = table("current_trial", *(column(c.name, c.type) for c in Trial.__table__.columns))
"""The view: of every fingerprint the newest completed attempt. It is reused instead of running the same trial again."""

sweep_result = table("sweep_result", column("sweep_id", Integer), column("job", Integer), column("trial_id", Integer))
"""The view: of every job of a sweep the trial that tables, figures and comparisons show. It is the trial that sweep_trial
points to, or, if that one did not complete, the newest completed attempt before it. Later attempts, by another sweep or a
single run, do not change what a sweep shows."""

_VIEWS = {
    "current_trial": (
        f"SELECT {', '.join(f't.{c.name}' for c in current_trial.c)} FROM trial t WHERE t.status = 'completed' "
        "AND t.attempt = (SELECT MAX(u.attempt) FROM trial u WHERE u.fingerprint = t.fingerprint AND u.status = 'completed')"
    ),
    "sweep_result": (
        "SELECT s.sweep_id, s.job, t.id AS trial_id FROM sweep_trial s JOIN trial l ON l.id = s.trial_id "
        "JOIN trial t ON t.fingerprint = l.fingerprint AND t.status = 'completed' AND t.attempt = "
        "(SELECT MAX(u.attempt) FROM trial u WHERE u.fingerprint = l.fingerprint AND u.status = 'completed' "
        "AND u.attempt <= l.attempt)"
    ),
}


@event.listens_for(Base.metadata, "after_create")
def _create_views(target: MetaData, connection: Connection, **_: Any) -> None:
    for name, query in _VIEWS.items():
        connection.execute(text(f"DROP VIEW IF EXISTS {name}"))
        connection.execute(text(f"CREATE VIEW {name} AS {query}"))


# Opening one

BUSY_TIMEOUT_S = 30
_MAGIC = b"SQLite format 3\0"
_NO_DATABASE = "is damaged, or is no SQLite database; move it away and run again. It was left as it is."
_WRITER_KEY = 0x70656E73  # a PostgreSQL advisory lock: any number will do, as long as all of us take the same

_SENTENCES = (  # part of the driver's message -> what it means, and what to do
    ("not a database", _NO_DATABASE),
    ("malformed", "is damaged; move it away, or recover it with `sqlite3 FILE .recover`. It was left as it is."),
    ("readonly", "cannot be written; give this user write permission, or set PENSIEVE_OUTPUTS to another folder."),
    ("disk is full", "cannot grow: the disk is full. Free some space, or set PENSIEVE_OUTPUTS to another disk."),
    ("unable to open", "cannot be opened; check that its folder exists and that this user may write to it."),
    ("locked", f"stayed locked by another process for {BUSY_TIMEOUT_S} s; end what holds it, then run again."),
)


class Database:
    """One SQL database. `reading` and `writing` give connections inside a transaction: all of it, or nothing. One process
    writes at a time, also to PostgreSQL, so that what a transaction found stays true until its end.

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
        file = self.url.database if self.sqlite else None
        self.path = Path(file).absolute() if file and file != ":memory:" else None
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
                if begin == "IMMEDIATE" and not self.sqlite:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _WRITER_KEY})
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
        with FileLock(f"{self.path}.lock") if self.path else nullcontext():
            if self.path is not None:  # not inside a transaction
                with self._sentences(), self.engine.connect() as connection:
                    connection.connection.driver_connection.execute("PRAGMA journal_mode=WAL")  # type: ignore[union-attr]
            with self.writing() as connection:
                if _version(connection) is None:  # another process may have been faster
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


def _version(connection: Connection) -> str | None:
    there = inspect(connection).has_table(VERSION_TABLE)
    return connection.scalar(select(version_table.c.version_num)) if there else None


def check_sqlite_file(path: Path, create: bool = True) -> None:
    """Refuse a file that is no SQLite database: SQLite would take a short one for an empty one, and write to it.

    create: a missing (or empty) file is fine, since it will be made. Raises ResultsError.
    """
    if not path.exists() or path.stat().st_size == 0:
        if create:
            return
        raise ResultsError(f"There are no results at {path} yet; run `{typed('run')} -m` first.")
    with suppress(PermissionError), path.open("rb") as file:  # told better when the engine opens it
        if not file.read(len(_MAGIC)) == _MAGIC:
            raise ResultsError(f"The results database {path} {_NO_DATABASE}")
