"""Reads and writes sweeps, trials, and the turns, metrics, samples and artifacts of trials."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from itertools import islice
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import URL, ColumnElement, Connection, Row, Select, func, insert, select, update
from sqlalchemy.orm import Session, aliased

from pensieve.core.plan import Tier
from pensieve.errors import ResultsError, TrialRunning, typed
from pensieve.lab.metrics import SLO_METRICS, MetricValue, Slo, is_known, slo_metrics
from pensieve.lab.results.environment import HEARTBEAT_LIMIT, host, is_alive, this_process
from pensieve.lab.results.schema import (
    BENCH,
    ArtifactRow,
    Database,
    MetricRow,
    Sweep,
    SweepTrial,
    Trial,
    current_trial,
    holding_table,
    miss_table,
    sample_table,
    sweep_result,
    turn_table,
)
from pensieve.lab.turns import Turns
from pensieve.serve.record import PREPARING, TurnRecord

T = TypeVar("T")

DATABASE_NAME = "results.db"
LATEST = "latest"  # beside the folders of the sweeps' figures, a link to the one that was drawn last
ENGINE = "engine"  # `device` of readings of the cache and the queue
_AGAIN = "+"  # in the key of a sweep that was begun anew, between the hash of its command and a number
TURN_BATCH = 5000
TURN_COLUMNS = tuple(c.name for c in turn_table.c if c.name not in ("id", "trial_id"))
_TURN_FIELDS = ("trial_id", *TURN_COLUMNS)
_INSERT_TURN = f"INSERT INTO turn ({', '.join(_TURN_FIELDS)}) VALUES ({', '.join('?' * len(_TURN_FIELDS))})"
_TRIAL_DEFAULTS: dict[str, Any] = {"repeat": 0, "contended": False, "environment": {}, "engine": {}, "flags": {}}


class Reading(NamedTuple):
    """One row of table `sample`: occupancy, queue length or device use at a moment of the trial's clock."""

    at_s: float
    device: str
    name: str
    value: float | None
    unit: str


class Holding(NamedTuple):
    """One row of table `holding`."""

    session: str
    tier: Tier
    gib_s: float
    saved_s: float
    idle_gib_s: float


class Artifact(NamedTuple):
    kind: str
    path: Path
    sha256: str | None


@dataclass(frozen=True, slots=True)
class JobResult:
    """The outcome of one job of a sweep.

    last: the attempt that the job made (or reused) last; its status says whether the job succeeded.
    trial: the one that tables and figures show (view sweep_result); None if there is none.
    metrics: of `trial`, by (name, label).
    """

    job: int
    reused: bool
    last: Trial
    trial: Trial | None
    metrics: Mapping[tuple[str, str], MetricValue] = field(default_factory=dict)

    def value(self, name: str, label: str = "") -> float | None:
        metric = self.metrics.get((name, label))
        return metric.value if metric else None


class ResultsStore:
    """Every method is one transaction, so that a reader never meets half a batch. Safe to use from several threads.

    url: any SQLAlchemy URL. root: the outputs folder, which artifact paths are relative to (SQLite: the file's folder).
    create: make a database that is missing. Raises ResultsError wherever the database cannot do what it is asked.
    """

    def __init__(self, url: str, root: Path | None = None, create: bool = True) -> None:
        self.database = Database(url, create)
        path = self.database.path
        self.root = root.absolute() if root else (path.parent if path else None)
        self._under: dict[tuple[int, Slo], list[MetricValue]] = {}

    # Sweeps

    def open_sweep(
        self,
        key: str,
        name: str,
        experiment: str | None,
        command: str | None,
        overrides: Mapping[str, Any],
        n_expected: int,
        host: str,
        git_commit: str | None,
        anew: bool = False,
    ) -> int:
        """Record a sweep as running, or running again if its key is known; returns its id.

        overrides: key -> text, swept axes included. anew: a sweep of its own, and those of the same key stay as they are.
        """
        values: dict[str, Any] = {
            "name": name, "experiment": experiment, "command": command, "overrides": dict(overrides),
            "n_expected": n_expected, "host": host, "git_commit": git_commit, "status": "running",
            "started_at": _now(), "finished_at": None,
        }  # fmt: skip
        of_command = (Sweep.key == key) | Sweep.key.startswith(f"{key}{_AGAIN}", autoescape=True)
        with self._session(write=True) as session:
            sweeps = list(session.scalars(select(Sweep).where(of_command).order_by(Sweep.id)))
            if anew or not sweeps:
                own = f"{key}{_AGAIN}{len(sweeps)}" if sweeps else key
                return _inserted_id(session.connection(), Sweep, {**values, "key": own})
            found = min(sweeps, key=lambda one: (one.key != key, one.id))
            session.execute(update(Sweep).where(Sweep.id == found.id).values(**values))
            return int(found.id)

    def set_sweep(self, sweep_id: int, **fields: Any) -> None:
        """Change columns; a status other than running also sets finished_at."""
        if fields.get("status", "running") != "running":
            fields.setdefault("finished_at", _now())
        with self.database.writing() as connection:
            found = connection.execute(update(Sweep).where(Sweep.id == sweep_id).values(**fields))
        assert found.rowcount == 1, f"no sweep {sweep_id}"

    def sweep(self, sweep_id: int) -> Sweep:
        found = self._one(select(Sweep).where(Sweep.id == sweep_id))
        if found is None:
            raise ResultsError(f"There is no sweep {sweep_id} in {self.database.shown}.")
        return found

    def latest_sweep(self) -> Sweep | None:
        """What `latest` means: the newest of those that have a completed trial, or needed none (a map of sizes in one pass);
        of those that ran to their end before interrupted ones. Bench commands, whose trials are single cases, are none."""
        completed = SweepTrial.trial_id.in_(select(Trial.id).where(Trial.status == "completed"))
        needs_none = (Sweep.status == "completed") & (Sweep.n_expected == 0)
        answers = Sweep.id.in_(select(SweepTrial.sweep_id).where(completed)) | needs_none
        query = select(Sweep).where(Sweep.experiment.is_distinct_from(BENCH), answers)
        with self._session() as session:
            newest = session.scalars(query.order_by(Sweep.started_at.desc(), Sweep.id.desc()))
            return min(newest, key=lambda one: one.status not in ("completed", "failed"), default=None)

    def sweep_named(self, name: str) -> Sweep:
        """By its id, or `latest`. Raises ResultsError where there is none."""
        if name.isdigit():
            return self.sweep(int(name))
        if name != LATEST:
            raise ResultsError(f"{name!r} is no sweep; give an id ({typed('results')} list shows them), or {LATEST}.")
        if (found := self.latest_sweep()) is None:
            raise ResultsError("No sweep has a completed trial yet; python runners/run.py -m makes one.")
        return found

    def progress_of(self, sweep_id: int) -> tuple[int, float | None]:
        """How many jobs of a sweep have a trial that has ended, and the seconds that each took of those that ended since the
        sweep was started; None: none did."""
        started = self.sweep(sweep_id).started_at
        query = select(Trial.finished_at).join(SweepTrial, SweepTrial.trial_id == Trial.id)
        query = query.where(SweepTrial.sweep_id == sweep_id, Trial.finished_at.is_not(None))
        with self._session() as session:
            ends = list(session.scalars(query))
        ran = sum(end is not None and end >= started for end in ends)
        return len(ends), (_now() - started).total_seconds() / ran if ran else None

    def link(self, sweep_id: int, trial_id: int, job: int, reused: bool) -> bool:
        """Record the trial as the one of this job of the sweep, in place of an earlier one.

        Returns whether it counts as reused: a trial that the sweep itself ran does not, when the sweep finds it again.
        """
        with self._session(write=True) as session:
            before = session.get(SweepTrial, (sweep_id, job))
            if before is not None and before.trial_id == trial_id:
                return before.reused
            session.merge(SweepTrial(sweep_id=sweep_id, job=job, trial_id=trial_id, reused=reused))
        return reused

    def trials_of_sweep(self, sweep_id: int) -> list[JobResult]:
        """Every job that was begun, in order, with the metrics of the trial that it shows; the sweep's slo judges them."""
        shown, result = aliased(Trial), sweep_result.c
        jobs = (
            select(SweepTrial, Trial, shown)
            .join(Trial, Trial.id == SweepTrial.trial_id)
            .outerjoin(sweep_result, (result.sweep_id == SweepTrial.sweep_id) & (result.job == SweepTrial.job))
            .outerjoin(shown, shown.id == result.trial_id)
        )
        with self._session() as session:
            found = session.execute(jobs.where(SweepTrial.sweep_id == sweep_id).order_by(SweepTrial.job)).all()
            trials: dict[int, Trial] = {trial.id: trial for _, _, trial in found if trial is not None}
            metrics: dict[int, dict[tuple[str, str], MetricValue]] = {trial_id: {} for trial_id in trials}
            for row in session.scalars(_metric_rows().where(MetricRow.trial_id.in_(trials))):
                metrics[row.trial_id][row.name, row.label] = _metric(row)
            overrides = session.scalar(select(Sweep.overrides).where(Sweep.id == sweep_id))
        slo = Slo.of_sweep(overrides or {})
        for trial in trials.values():
            metrics[trial.id] |= {(m.name, m.label): m for m in self._judged(trial, slo)}
        return [
            JobResult(link.job, link.reused, last, trial, metrics[trial.id] if trial else {})
            for link, last, trial in found
        ]

    # Trials

    def begin_trial(self, fields: Mapping[str, Any]) -> int:
        """As claim_trial, though it may have completed before; returns its id."""
        begun = self.claim_trial(fields, again=True)
        assert isinstance(begun, int)
        return begun

    def claim_trial(self, fields: Mapping[str, Any], again: bool = False) -> int | Trial:
        """Record a trial as running in this process; or return the completed one of this fingerprint. Of several processes
        that claim it at once, one gets it.

        fields: columns of `trial`. again: also one that has completed is begun. A trial of the same fingerprint whose process
        is gone becomes interrupted; one that still runs raises TrialRunning with its process.
        """
        now, same = _now(), Trial.fingerprint == fields["fingerprint"]
        own = {"started_at": now, "heartbeat_at": now, "status": "running", **asdict(this_process())}
        with self.database.writing() as connection:
            _interrupt_dead(connection, now, same)
            running = select(Trial.id, Trial.pid, Trial.host).where(same, Trial.status == "running")
            if (alive := connection.execute(running).first()) is not None:
                raise TrialRunning(
                    f"This trial is running already (trial {alive.id}, process {alive.pid} on {alive.host}); "
                    "it has to end first."
                )
            done = select(current_trial.c.id).where(current_trial.c.fingerprint == fields["fingerprint"])
            found = None if again else connection.scalar(done)
            if found is None:
                attempt = (connection.scalar(select(func.max(Trial.attempt)).where(same)) or 0) + 1
                return _inserted_id(connection, Trial, {**_TRIAL_DEFAULTS, **fields, **own, "attempt": attempt})
        return self.trial(int(found))

    def heartbeat(self, trial_id: int) -> None:
        """Record that the trial is alive. Call it more often than environment.HEARTBEAT_LIMIT."""
        self.set_trial(trial_id, heartbeat_at=_now())

    def interrupt_dead(self) -> int:
        """Mark running trials and sweeps whose process is gone as interrupted; returns how many trials there were.

        Between two trials of a sweep, each of which may be a process of its own, nobody can tell: it counts as running until
        HEARTBEAT_LIMIT after it was last heard of.
        """
        now = _now()
        with self._session(write=True) as session:
            connection = session.connection()
            count = _interrupt_dead(connection, now, Trial.status == "running")
            for sweep in session.scalars(select(Sweep).where(Sweep.status == "running")):
                own = select(func.max(Trial.heartbeat_at)).where(Trial.id.in_(_ran_by(sweep.id)))
                heard = max(sweep.started_at, connection.scalar(own) or sweep.started_at)
                ran = session.scalars(select(Trial).where(Trial.id.in_(_ran_by(sweep.id))))
                if now - heard > HEARTBEAT_LIMIT and not any(is_alive(one, one.heartbeat_at, now) for one in ran):
                    sweep.status, sweep.finished_at = "interrupted", heard
        return count

    def set_trial(self, trial_id: int, **fields: Any) -> None:
        """Change columns of a trial."""
        with self.database.writing() as connection:
            found = connection.execute(update(Trial).where(Trial.id == trial_id).values(**fields))
        assert found.rowcount == 1, f"no trial {trial_id}"

    def finish_trial(
        self, trial_id: int, status: str, error: str | None = None, traceback: str | None = None, **fields: Any
    ) -> None:
        """Close a trial as completed, failed or interrupted. fields: further columns, such as measure_end_s."""
        assert status in ("completed", "failed", "interrupted"), status
        ended = {"finished_at": (now := _now()), "heartbeat_at": now, **fields}
        self.set_trial(trial_id, status=status, error=error, traceback=traceback, **ended)

    def close_trial_of(self, pid: int, error: str, traceback: str | None, status: str = "failed") -> int | None:
        """Mark the running trial of a process of this host as failed, or as `status`; returns its id, None if it had none."""
        of_process = (Trial.pid == pid) & (Trial.host == host()) & (Trial.status == "running")
        if (found := self._one(select(Trial.id).where(of_process))) is not None:
            self.finish_trial(found, status, error, traceback)
        return found

    def add_turns(self, trial_id: int, turns: Iterable[TurnRecord]) -> None:
        values_of, rest = attrgetter(*TURN_COLUMNS), iter(turns)
        with self.database.writing() as connection:
            while batch := list(islice(rest, TURN_BATCH)):
                rows = [(trial_id, *values_of(turn)) for turn in batch]
                if self.database.sqlite:  # by the driver itself: SQLAlchemy costs more than the insert
                    connection.exec_driver_sql(_INSERT_TURN, rows)
                else:
                    connection.execute(insert(turn_table), [dict(zip(_TURN_FIELDS, row, strict=True)) for row in rows])
                self._add_misses(connection, trial_id, batch)

    def miss_sums(self, trial_id: int) -> Sequence[Row[Any]]:
        """Sum the ledger over measured turns that completed: cause, evicted_by, tokens, ms."""
        c = miss_table.c
        query = (
            select(c.cause, c.evicted_by, func.sum(c.tokens).label("tokens"), func.sum(c.ms).label("ms"))
            .join(turn_table, turn_table.c.id == c.turn_id)
            .where(c.trial_id == trial_id, turn_table.c.status == "completed", turn_table.c.phase.not_in(PREPARING))
            .group_by(c.cause, c.evicted_by)
        )
        with self.database.reading() as connection:
            return list(connection.execute(query))

    def _add_misses(self, connection: Connection, trial_id: int, turns: Sequence[TurnRecord]) -> None:
        """Write the ledger of turns that were inserted just now: the newest of the trial, found by their ordinals."""
        if not any(turn.misses for turn in turns):
            return
        newest = select(turn_table.c.id, turn_table.c.ordinal).where(turn_table.c.trial_id == trial_id)
        found = connection.execute(newest.order_by(turn_table.c.id.desc()).limit(len(turns))).all()
        ids = {row.ordinal: row.id for row in found}
        lines = [
            {"trial_id": trial_id, "turn_id": ids[turn.ordinal]}
            | {name: getattr(miss, name) for name in ("cause", "evicted_by", "tokens", "ms")}
            for turn in turns
            for miss in turn.misses
        ]
        connection.execute(insert(miss_table), lines)

    def add_holdings(self, trial_id: int, holdings: Iterable[Holding]) -> None:
        self._add(holding_table, trial_id, (one._asdict() for one in holdings))

    def add_metrics(self, trial_id: int, metrics: Iterable[MetricValue]) -> None:
        """A value that is not finite is stored as null, since databases do not agree on how to store it."""
        found = list(metrics)
        assert all(is_known(m.name) for m in found), "a metric that lab/metrics.py does not have"
        rows = ({**asdict(m), "unit": m.unit, "value": _finite(m.value)} for m in found)
        self._add(MetricRow.__table__, trial_id, rows)

    def add_samples(self, trial_id: int, readings: Iterable[Reading]) -> None:
        self._add(sample_table, trial_id, ({**r._asdict(), "value": _finite(r.value)} for r in readings))

    def samples_of(self, trial_id: int) -> list[Reading]:
        query = select(*(sample_table.c[name] for name in Reading._fields)).where(sample_table.c.trial_id == trial_id)
        with self.database.reading() as connection:
            return [Reading(*row) for row in connection.execute(query.order_by(sample_table.c.at_s))]

    def _add(self, table: Any, trial_id: int, rows: Iterable[Mapping[str, Any]]) -> None:
        values = [{**row, "trial_id": trial_id} for row in rows]
        if values:
            with self.database.writing() as connection:
                connection.execute(insert(table), values)

    def add_artifact(self, trial_id: int, kind: str, path: Path) -> None:
        """Record a file with its digest, or a folder without. The file stays where it is; adding it again updates it."""
        path = path.absolute()
        inside = self.root is not None and path.is_relative_to(self.root)
        stored = path.relative_to(self.root).as_posix() if inside and self.root else str(path)
        digest = None
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        with self._session(write=True) as session:
            session.merge(ArtifactRow(trial_id=trial_id, kind=kind, path=stored, sha256=digest))

    # Reading

    def trial(self, trial_id: int) -> Trial:
        found = self._one(select(Trial).where(Trial.id == trial_id))
        if found is None:
            raise ResultsError(f"There is no trial {trial_id} in {self.database.shown}.")
        return found

    def current_trials(self) -> list[Trial]:
        """Of every fingerprint the newest completed attempt, in order of id."""
        with self._session() as session:
            return list(session.scalars(_current().order_by(Trial.id)))

    def completed_trial(self, fingerprint: str) -> Trial | None:
        return self._one(_current().where(Trial.fingerprint == fingerprint))

    def shown_trial(self, sweep_id: int, job: int) -> Trial | None:
        """The trial that a job of a sweep shows (view sweep_result); None if there is none yet."""
        here = (sweep_result.c.sweep_id == sweep_id) & (sweep_result.c.job == job)
        return self._one(select(Trial).join(sweep_result, sweep_result.c.trial_id == Trial.id).where(here))

    def completed_by_config(self, config_hash: str) -> Trial | None:
        """The newest completed trial of this configuration, whatever code and platform ran it."""
        return self._one(_current().where(Trial.config_hash == config_hash).order_by(Trial.id.desc()).limit(1))

    def metrics_of(self, trial_id: int, slo: Slo | None = None) -> list[MetricValue]:
        """What was recorded, and SLO_METRICS as this objective gives them; None: that of the command which ran the trial."""
        with self._session() as session:
            rows = session.scalars(_metric_rows().where(MetricRow.trial_id == trial_id))
            found = [_metric(row) for row in rows]
        trial = self.trial(trial_id)
        return found + self._judged(trial, slo_of(trial) if slo is None else slo)

    def _judged(self, trial: Trial, slo: Slo) -> list[MetricValue]:
        """SLO_METRICS of a trial; empty where no objective is asked, or the trial has no window.

        A completed trial never changes: it is judged once for each objective."""
        if slo == Slo() or trial.measure_start_s is None or trial.measure_end_s is None:
            return []
        key = (trial.id, slo)
        if key not in self._under:
            turns = Turns.of(TurnRecord(**row._mapping) for row in self.turns_of(trial.id))
            self._under[key] = slo_metrics(turns, trial.measure_start_s, trial.measure_end_s, slo)
        return self._under[key]

    def turns_of(self, trial_id: int, *columns: str) -> Sequence[Row[Any]]:
        """The trial's turns in order of ordinal. Rows have the columns as attributes, without names all of them."""
        chosen = [turn_table.c[name] for name in columns or TURN_COLUMNS]
        with self.database.reading() as connection:
            return connection.execute(
                select(*chosen).where(turn_table.c.trial_id == trial_id).order_by(turn_table.c.ordinal, turn_table.c.id)
            ).all()

    def artifacts_of(self, trial_id: int, kind: str | None = None) -> list[Artifact]:
        """The trial's artifacts, with absolute paths. The files may be gone: they are not looked at."""
        query = select(ArtifactRow).where(ArtifactRow.trial_id == trial_id).order_by(ArtifactRow.kind, ArtifactRow.path)
        with self._session() as session:
            rows = session.scalars(query if kind is None else query.where(ArtifactRow.kind == kind)).all()
        return [Artifact(row.kind, (self.root or Path()) / row.path, row.sha256) for row in rows]

    @contextmanager
    def _session(self, write: bool = False) -> Iterator[Session]:
        """Objects read here stay usable after it: they have no relations, and all their columns are loaded."""
        with (
            self.database.writing() if write else self.database.reading() as connection,
            Session(connection, expire_on_commit=False) as session,
        ):
            yield session
            session.flush()
            session.expunge_all()

    def _one(self, query: Select[T]) -> T | None:
        with self._session() as session:
            return session.scalars(query).first()


def open_store(outputs: Path, url: str | None = None, create: bool = True) -> ResultsStore:
    """The database at `url`, or results.db in the outputs folder, which is made where it is missing.

    create=False: for readers, which have nothing to show where there is no database. Raises ResultsError.
    """
    if create:
        try:
            outputs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsError(
                f"The outputs folder {outputs} cannot be made ({error.strerror}); "
                "set PENSIEVE_OUTPUTS to a folder that this user may write to."
            ) from None
    if url is None:
        url = URL.create("sqlite", database=str(outputs.absolute() / DATABASE_NAME)).render_as_string()
    return ResultsStore(url, root=outputs, create=create)


def recorded_store(outputs: Path, url_env: str | None) -> ResultsStore:
    """As open_store for readers, of the database that this environment variable names. Raises ResultsError."""
    url = os.environ.get(url_env) if url_env else None
    if url_env and not url:
        raise ResultsError(f"The environment variable {url_env} is not set; export it with the database's URL.")
    return open_store(outputs, url, create=False)


def figures_folder(outputs: Path, sweep_id: int) -> Path:
    return outputs / "figures" / f"sweep-{sweep_id}"


def report_file(outputs: Path, sweep_id: int) -> Path:
    return outputs / "reports" / f"sweep-{sweep_id}.html"


def slo_of(trial: Trial) -> Slo:
    """The objective of the command that ran the trial."""
    return Slo.of((trial.config or {}).get("slo") or {})


def _now() -> datetime:
    return datetime.now(UTC)


def _current() -> Select[Trial]:
    return select(Trial).where(Trial.id.in_(select(current_trial.c.id)))


def _ran_by(sweep_id: int) -> Select[int]:
    """The trials that a sweep ran itself."""
    return select(SweepTrial.trial_id).where(SweepTrial.sweep_id == sweep_id, SweepTrial.reused.is_(False))


def _interrupt_dead(connection: Connection, now: datetime, which: ColumnElement[bool]) -> int:
    columns = (Trial.id, Trial.heartbeat_at, Trial.host, Trial.pid, Trial.process_started_at)
    rows = connection.execute(select(*columns).where(which, Trial.status == "running"))
    dead = [row for row in rows if not is_alive(row, row.heartbeat_at, now)]
    for row in dead:
        error = f"Process {row.pid} on {row.host} ended without finishing this trial; run the same command again."
        ended = {"status": "interrupted", "error": error, "finished_at": row.heartbeat_at}
        connection.execute(update(Trial).where(Trial.id == row.id).values(**ended))
    return len(dead)


def _inserted_id(connection: Connection, mapped: type[Sweep] | type[Trial], values: Mapping[str, Any]) -> int:
    key = connection.execute(insert(mapped).values(**values)).inserted_primary_key
    assert key is not None
    return int(key[0])


def _metric_rows() -> Select[MetricRow]:
    return select(MetricRow).where(MetricRow.name.not_in(SLO_METRICS))


def _metric(row: MetricRow) -> MetricValue:
    return MetricValue(**{f.name: getattr(row, f.name) for f in fields(MetricValue)})


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None
