"""The tables of the results database: column names are a contract.

Times called `*_at` are UTC moments; times called `*_s` are seconds of the trial's own clock. Units are in the names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Dialect,
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
    event,
    table,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine

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
        if value is None:
            return None
        assert value.tzinfo is not None, "a moment without a time zone"
        utc = value.astimezone(UTC)
        return utc.replace(tzinfo=None) if dialect.name == "sqlite" else utc

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    # Every constraint has a name, so that a later migration can alter it on any database.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  SQLAlchemy reads it from the class
        str: Text(),
        datetime: UtcTime(),
        dict[str, Any]: JSON(),
        list[int]: JSON(),
    }


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
