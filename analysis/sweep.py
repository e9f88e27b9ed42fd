"""What a figure reads: the current trials of a sweep, in panels that differ in nothing but what is drawn, and their turns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from analysis.provenance import Provenance, trace
from pensieve.errors import ConfigError, MissingSeries
from pensieve.lab.results.frame import REFERENCE, Frame, axis_value, conversations_of, listed_values, varying_axes
from pensieve.lab.results.prices import Prices
from pensieve.lab.results.schema import Sweep, SweepTrial, Trial
from pensieve.lab.results.size_map import SETTINGS
from pensieve.lab.results.store import JobResult, ResultsStore
from pensieve.serve.books.holding import TIERS
from pensieve.units import parse_capacity

DEFAULT_COMMAND = "python runners/run.py -m"
LOADS = (
    "workload.relative_rate",
    "workload.request_rate",
    "workload.users",
    "workload.agents",
    "workload.request_interval",
    "workload.time_scale",
)
"""Fields that make a load heavier or lighter."""
NO_VALUE = "None"  # how a field that is null reads in a trial's configuration


@dataclass(frozen=True, slots=True)
class Cell:
    """The completed trials of one baseline at one place of the drawn axes: they differ in seed and repeat alone."""

    baseline: str
    at: Mapping[str, str]
    trials: Sequence[Trial]

    def __iter__(self) -> Iterator[Trial]:
        return iter(self.trials)

    @property
    def ids(self) -> str:
        """For the column `trials` of a CSV."""
        return " ".join(str(trial.id) for trial in self.trials)


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture's worth. group: the swept axes that are not drawn, with their values. left_out: the cells that no trial of
    has completed, as they are named to people."""

    sweep: Sweep
    group: Mapping[str, str]
    cells: Sequence[Cell]
    provenance: Provenance
    left_out: Sequence[str] = ()

    @property
    def baselines(self) -> list[str]:
        return list(dict.fromkeys(cell.baseline for cell in self.cells))

    def of(self, baseline: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.baseline == baseline]

    def values(self, axis: str) -> list[str]:
        """Of a drawn axis: numbers in ascending order, names as they were given."""
        return in_order(dict.fromkeys(cell.at[axis] for cell in self.cells))

    @property
    def text(self) -> str:
        return ", ".join(f"{axis}={value}" for axis, value in self.group.items())


class Source(Frame):
    """A sweep as figures read it. wanted: only these baselines. allow_mixed: see provenance.trace. prices: of what it ran
    on, where whoever reads it gives some. also: further sweeps, whose trials count as this one's (see joined)."""

    def __init__(
        self, store: ResultsStore, sweep: Sweep, wanted: Sequence[str] = (), allow_mixed: bool = False,
        prices: Prices | None = None, also: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(store, sweep, also=also)
        self.wanted, self.allow_mixed, self.prices, self.also = wanted, allow_mixed, prices or Prices(), also
        self._conversations: dict[int, frozenset[Any]] = {}

    def of_baselines(self, names: Sequence[str]) -> Source:
        """The same sweep with these baselines alone."""
        return Source(self.store, self.sweep, names, self.allow_mixed, self.prices, self.also)

    @property
    def command(self) -> str:
        """What completes the sweep: trials that it has are not run again."""
        return self.sweep.command or DEFAULT_COMMAND

    @property
    def trials(self) -> list[Trial]:
        """Current, wanted, in order of id."""
        found = {job.trial.id: job.trial for job in self.jobs if job.trial is not None}
        chosen = set(self.baselines())
        return [found[key] for key in sorted(found) if found[key].baseline in chosen]

    def baselines(self) -> list[str]:
        """As wanted, else all that the sweep names or has begun."""
        return list(self.wanted) or list(
            dict.fromkeys([*self._named("baseline"), *(job.last.baseline for job in self.jobs)])
        )

    def swept(self, axis: str) -> list[str]:
        """The values that an axis takes in this sweep, those of trials that did not complete included."""
        begun = (axis_value(job.trial or job.last, axis) for job in self.jobs)
        return in_order(dict.fromkeys([*self._named(axis), *begun]))

    def compares(self, axis: str) -> bool:
        """Several values of an axis, and each trial has one. A sweep over machines varies fields of theirs that some of them
        do not have (hardware=local no router): those are no comparison."""
        found = self.swept(axis)
        return len(found) > 1 and NO_VALUE not in found

    def several(self, axis: str) -> bool:
        return len(self.swept(axis)) > 1

    def one(self, axis: str) -> bool:
        return not self.several(axis)

    def holds(self, values: Mapping[str, str]) -> bool:
        """Whether each of these axes takes this value, among others."""
        return all(value in self.swept(axis) for axis, value in values.items())

    def lacks(self, what: str) -> MissingSeries:
        """To be raised where `what` is missing from the sweep."""
        return MissingSeries(f"Sweep {self.sweep.id} has no {what}; run `{self.command}`.")

    def has_workload(self, name: str) -> bool:
        return any(job.last.workload == name for job in self.jobs)

    def has_metric(self, name: str, label: str = "") -> bool:
        return any(job.value(name, label) is not None for job in self.jobs)

    @property
    def load_axis(self) -> str | None:
        """The load that the sweep runs through; the first of LOADS where there are several."""
        return next((axis for axis in LOADS if self.several(axis)), None)

    def has_load(self) -> bool:
        return self.load_axis is not None

    def has_reference(self) -> bool:
        names = self.baselines()
        return REFERENCE in names and len(names) > 1

    def is_map(self) -> bool:
        """A map of sizes, whose cells are no comparison."""
        return SETTINGS in self.sweep.overrides

    def has_misses(self) -> bool:
        return not self.is_map() and any(self.store.miss_sums(trial.id) for trial in self.trials)

    def has_holdings(self) -> bool:
        return not self.is_map() and any(self.has_metric("held_gib_s", tier) for tier in TIERS)

    def has_turns(self) -> bool:
        """Conversations of several turns; elsewhere a turn's number means nothing."""
        if not self.trials:
            return False
        turns = self.turns_of(self.trials[0])
        return bool(((turns.index.get_level_values("turn") > 1) & (turns["phase"] == "chat")).any())

    def panels(self, *along: str, partial: bool = False) -> list[Panel]:
        """A panel for each combination of the swept axes but seed, repeat, baseline and those that are drawn `along`.
        partial: cells without a completed trial are left out where their baseline has others, and the caption names them.

        An axis is a group (cache, eviction, ...) or a dotted field (workload.request_rate). Raises MissingSeries, with
        the command to run, where a panel lacks a baseline at some value, and MixedPanel where one mixes what must not be.
        """
        names = self.baselines()
        if not names:
            raise self.lacks("trials yet")
        if not self.trials and not self.wanted:
            raise self.lacks("completed trial")
        begun = [job for job in self.jobs if job.last.baseline in names]
        panels = []
        for group, jobs in self._groups(begun, along).items() or {(): begun}.items():
            every = self._cells(dict(group), jobs, names, along, partial)
            cells = [cell for cell in every if cell.trials]
            left_out = [_in_words(cell, several=len(names) > 1) for cell in every if not cell.trials]
            trials = [trial for cell in cells for trial in cell.trials]
            panels.append(Panel(self.sweep, dict(group), cells, self.trace(trials, self._incomplete()), left_out))
        return panels

    def trace(self, trials: Sequence[Trial], incomplete: int = 0) -> Provenance:
        """What numbers of these trials stand on. Raises MixedPanel where they must not stand beside each other."""
        for trial in trials:  # kept, since each figure asks again
            if trial.id not in self._conversations:
                self._conversations[trial.id] = frozenset(conversations_of(self.turns_of(trial)))
        conversations = frozenset[Any]().union(*(self._conversations[trial.id] for trial in trials))
        return trace(self.sweep, trials, len(conversations), incomplete, self.allow_mixed)

    def _cells(
        self,
        group: Mapping[str, str],
        jobs: Sequence[JobResult],
        names: Sequence[str],
        along: Sequence[str],
        partial: bool,
    ) -> list[Cell]:
        """partial: some may have no trials."""
        places = dict.fromkeys(_place(job, along) for job in jobs) or {(): None}
        for axis in along:  # what the sweep names and never began is missing too
            for value in self._named(axis):
                if len(along) == 1:
                    places.setdefault((value,))
        cells = []
        for name in names:
            for place in places:
                here = [job.trial for job in jobs if job.trial and _place(job, along) == place]
                own = [trial for trial in here if trial.baseline == name]
                at = dict(zip(along, place, strict=True))
                if not own and not (partial and any(job.trial and job.trial.baseline == name for job in jobs)):
                    self._missing(name, {**group, **at})
                cells.append(Cell(name, at, own))
        return cells

    def _missing(self, baseline: str, at: Mapping[str, str]) -> None:
        own = not self.wanted or baseline in {*self._named("baseline"), *(job.last.baseline for job in self.jobs)}
        command = self.command if own else f"python runners/run.py baseline={baseline} -m"
        where = f" with {', '.join(f'{axis}={value}' for axis, value in at.items())}" if at else ""
        raise MissingSeries(
            f"Sweep {self.sweep.id} has no completed trial of baseline {baseline}{where}; run `{command}`."
        )

    def _incomplete(self) -> int:
        """Jobs of the sweep without a completed trial, those that never began included."""
        done = sum(job.trial is not None for job in self.jobs)
        return max(self.sweep.n_expected, len(self.jobs)) - done

    def _named(self, axis: str) -> list[str]:
        """Values of a swept axis as the command gives them; none where it is not swept by a plain list."""
        given = {key.lstrip("+"): value for key, value in self.sweep.overrides.items()}
        values = listed_values(given[axis]) if axis in given else []  # of choice(...): its trials tell
        return [_configured(re.sub(r"\\(.)", r"\1", value)) for value in values]  # Hydra escapes blanks

    def _groups(
        self, jobs: Sequence[JobResult], along: Sequence[str]
    ) -> dict[tuple[tuple[str, str], ...], list[JobResult]]:
        typed = varying_axes(self.sweep.overrides, [job.trial or job.last for job in jobs])
        axes = [axis for axis in typed if axis not in along]
        groups: dict[tuple[tuple[str, str], ...], list[JobResult]] = {}
        for job in jobs:
            key = tuple((axis, axis_value(job.trial or job.last, axis)) for axis in axes)
            groups.setdefault(key, []).append(job)
        return groups


def open_source(
    store: ResultsStore,
    sweep_id: int | None = None,
    wanted: Sequence[str] = (),
    allow_mixed: bool = False,
    prices: Prices | None = None,
    also: Sequence[int] = (),
) -> Source:
    """A sweep by its id, or the latest, with those of `also`. Raises MissingSeries where there is none, ResultsError where
    one of `also` is none."""
    sweep = store.latest_sweep() if sweep_id is None else store.sweep(sweep_id)
    if sweep is None:
        raise MissingSeries(f"No sweep of the results database has a completed trial; run `{DEFAULT_COMMAND}` first.")
    further = [store.sweep(one) for one in also]
    return Source(store, joined(sweep, further), wanted, allow_mixed, prices, also)


def joined(sweep: Sweep, further: Sequence[Sweep]) -> Sweep:
    """Several sweeps of one overlay as one: what is swept takes the values that it takes in any of them."""
    if not further:
        return sweep
    every = [sweep, *further]
    overrides: dict[str, Any] = {}
    for axis in dict.fromkeys(axis for one in every for axis in one.overrides):
        given = [one.overrides[axis] for one in every if axis in one.overrides]
        values = list(dict.fromkeys(value for one in given for value in listed_values(one)))
        overrides[axis] = values if len(values) > 1 else given[0]
    kept = {column.name: getattr(sweep, column.name) for column in Sweep.__table__.columns}
    commands = " && ".join(one.command for one in every if one.command)
    n_expected = sum(one.n_expected for one in every)
    return Sweep(**{**kept, "overrides": overrides, "command": commands, "n_expected": n_expected})


def latest_of(store: ResultsStore, workload: str) -> int | None:
    """The id of the latest sweep with trials of a workload; None where there is none."""
    found = (
        select(Sweep.id)
        .join(SweepTrial, SweepTrial.sweep_id == Sweep.id)
        .join(Trial, Trial.id == SweepTrial.trial_id)
        .where(Trial.workload == workload)
        .order_by(Sweep.started_at.desc(), Sweep.id.desc())
    )
    with store.database.reading() as connection:
        latest = connection.execute(found.limit(1)).scalar()
    return None if latest is None else int(latest)


def number(value: str) -> float | None:
    """What a swept value comes to: a number as it is, a size ("2 ktokens", "1GiB") in tokens or bytes; None for a name."""
    found = _size(value)
    return found[1] if found else None


def in_order(values: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Ascending where all that are given are numbers, or all are sizes in one unit, and what is not given (null) last;
    else as given."""
    sizes = {value: _size(value) for value in values}
    known = [size for value, size in sizes.items() if value != NO_VALUE]
    units = {size[0] for size in known if size and size[1]}  # nothing is as much in bytes as it is in tokens
    if any(size is None for size in known) or len(units) > 1:
        return list(sizes)
    return sorted(sizes, key=lambda value: size[1] if (size := sizes[value]) else math.inf)


def _configured(value: str) -> str:
    """How a value of the command line reads in a trial's configuration: null, true, 0.50 and 1e3 are not kept as typed."""
    if value[0] in "\"'":
        return value.strip(value[0])
    known = {"null": NO_VALUE, "true": "True", "false": "False"}
    if value.lower() in known:
        return known[value.lower()]
    for kind in (int, float):
        try:
            return str(kind(value))
        except ValueError:
            continue
    return value


def _size(value: str) -> tuple[str, float] | None:
    """Its unit ("", "tokens" or "bytes") and how many; None for a name."""
    try:
        plain = float(value)
        return ("", plain) if math.isfinite(plain) else None
    except ValueError:
        pass
    try:
        capacity = parse_capacity(value)
    except ConfigError:
        return None
    return ("tokens", capacity.tokens) if capacity.tokens is not None else ("bytes", capacity.bytes or 0)


def _in_words(cell: Cell, several: bool) -> str:
    """several: baselines."""
    at = ", ".join(f"{axis}={value}" for axis, value in cell.at.items())
    return f"{cell.baseline} ({at})" if several else at


def _place(job: JobResult, along: Sequence[str]) -> tuple[str, ...]:
    return tuple(axis_value(job.trial or job.last, axis) for axis in along)
