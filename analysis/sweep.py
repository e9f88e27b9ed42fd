"""What a figure reads: the current trials of a sweep, in panels that differ in nothing but what is drawn, and their turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from analysis.provenance import Provenance, trace
from pensieve.errors import ConfigError, MissingSeries
from pensieve.lab.results import frame
from pensieve.lab.results.frame import REFERENCE, Frame, axis_value, conversations_of, varying_axes
from pensieve.lab.results.frame import Cell as Cell
from pensieve.lab.results.prices import Prices
from pensieve.lab.results.schema import Sweep, SweepTrial, Trial
from pensieve.lab.results.size_map import SETTINGS
from pensieve.lab.results.store import ResultsStore
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
class Panel(frame.Panel):
    """One picture's worth. left_out: the cells of which trials began and none has completed, as they are named to people."""

    sweep: Sweep
    provenance: Provenance
    left_out: Sequence[str] = ()

    def values(self, axis: str) -> list[str]:
        """Of a drawn axis: numbers in ascending order, names as they were given."""
        return in_order(dict.fromkeys(cell.at[axis] for cell in self.cells))


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
        """As wanted, else all that the sweep has begun."""
        return list(self.wanted) or list(dict.fromkeys(job.last.baseline for job in self.jobs))

    def swept(self, axis: str) -> list[str]:
        """The values that an axis takes in this sweep, those of trials that did not complete included."""
        return in_order(dict.fromkeys(axis_value(job.trial or job.last, axis) for job in self.jobs))

    def compares(self, axis: str) -> bool:
        """Several values of an axis, and each trial has one. A sweep over machines varies fields of theirs that some of them
        do not have (hardware=local no router): those are no comparison."""
        found = self.swept(axis)
        return len(found) > 1 and NO_VALUE not in found

    def several(self, axis: str) -> bool:
        return len(self.swept(axis)) > 1

    def one(self, axis: str) -> bool:
        return not self.several(axis)

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

    def panels(self, *along: str) -> list[Panel]:
        """A panel for each combination of the swept axes but seed, repeat, baseline and those that are drawn `along`. A cell
        without a completed trial is left out, and the caption names it.

        An axis is a group (cache, eviction, ...) or a dotted field (workload.request_rate). Raises MissingSeries, with the
        command to run, where nothing has completed, or nothing of a wanted baseline, and MixedPanel where one mixes what
        must not be.
        """
        names = self.baselines()
        done = {trial.baseline for trial in self.trials}
        for name in self.wanted:
            if name not in done:
                command = self.command if self.has_begun(name) else f"python runners/run.py baseline={name} -m"
                raise MissingSeries(
                    f"Sweep {self.sweep.id} has no completed trial of baseline {name}; run `{command}`."
                )
        if not done:
            raise self.lacks("completed trial")
        begun = [job for job in self.jobs if job.last.baseline in names]
        every = [job.trial or job.last for job in begun]
        axes = [axis for axis in varying_axes(self.sweep.overrides, every) if axis not in along]
        groups: dict[tuple[str, ...], dict[tuple[str, ...], list[Trial]]] = {}
        for job, one in zip(begun, every, strict=True):
            group, place = (tuple(axis_value(one, axis) for axis in some) for some in (axes, along))
            own = groups.setdefault(group, {}).setdefault((one.baseline, *place), [])
            own += [job.trial] if job.trial else []
        made = ((dict(zip(axes, group, strict=True)), self._cells(found, along)) for group, found in groups.items())
        return [self._panel(group, cells) for group, cells in made if any(cell.trials for cell in cells)]

    def has_begun(self, baseline: str) -> bool:
        return any(job.last.baseline == baseline for job in self.jobs)

    def _cells(self, found: Mapping[tuple[str, ...], Sequence[Trial]], along: Sequence[str]) -> list[Cell]:
        """Baseline by baseline. found: by baseline and place."""
        order = self.baselines()
        keys = sorted(found, key=lambda key: order.index(key[0]))
        return [Cell(name, dict(zip(along, place, strict=True)), found[name, *place]) for name, *place in keys]

    def _panel(self, group: Mapping[str, str], every: Sequence[Cell]) -> Panel:
        cells = [cell for cell in every if cell.trials]
        left_out = [f"{cell.baseline}{f' ({cell.place})' if cell.at else ''}" for cell in every if not cell.trials]
        completed = sum(job.trial is not None for job in self.jobs)
        incomplete = max(self.sweep.n_expected, len(self.jobs)) - completed  # those that never began included
        trials = [trial for cell in cells for trial in cell.trials]
        return Panel(group, cells, self.sweep, self.trace(trials, incomplete), left_out)

    def trace(self, trials: Sequence[Trial], incomplete: int = 0) -> Provenance:
        """What numbers of these trials stand on. Raises MixedPanel where they must not stand beside each other."""
        for trial in trials:  # kept, since each figure asks again
            if trial.id not in self._conversations:
                self._conversations[trial.id] = frozenset(conversations_of(self.turns_of(trial)))
        conversations = frozenset[Any]().union(*(self._conversations[trial.id] for trial in trials))
        return trace(self.sweep, trials, len(conversations), incomplete, self.allow_mixed)


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
    """Several sweeps of one overlay as one."""
    if not further:
        return sweep
    every = [sweep, *further]
    kept = {column.name: getattr(sweep, column.name) for column in Sweep.__table__.columns}
    overrides = {axis: values for one in every for axis, values in one.overrides.items()}
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
