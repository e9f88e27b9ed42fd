"""What a figure reads: the current trials of a sweep, in panels, and what it asks of a sweep before it applies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.provenance import Provenance, trace
from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import REFERENCE, Frame, Panel, axis_value, conversations_of
from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.size_map import SETTINGS
from pensieve.lab.results.store import ResultsStore
from pensieve.serve.books.holding import TIERS
from pensieve.units import NO_VALUE, in_order

DEFAULT_COMMAND = "python runners/run.py -m"
LOADS = {
    "workload.relative_rate": "offered rate over what stateless serving could finish",
    "workload.request_rate": "offered rate (requests/s)",
    "workload.users": "users at once",
    "workload.agents": "agents at once",
    "workload.request_interval": "mean seconds between arrivals",
    "workload.time_scale": "recorded seconds stretched by",
}
"""Fields that make a load heavier or lighter, and what they say on an axis."""


class Source(Frame):
    """A sweep as figures read it. allow_mixed: see provenance.trace."""

    def __init__(
        self, store: ResultsStore, sweep: Sweep, wanted: Sequence[str] = (), allow_mixed: bool = False,
        also: Sequence[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(store, sweep, also=also, wanted=wanted)
        self.allow_mixed, self.also = allow_mixed, also
        self._conversations: dict[int, frozenset[Any]] = {}

    def of_baselines(self, names: Sequence[str]) -> Source:
        """The same sweep with these baselines alone."""
        return Source(self.store, self.sweep, names, self.allow_mixed, self.also)

    @property
    def command(self) -> str:
        """What completes the sweep: trials that it has are not run again."""
        return self.sweep.command or DEFAULT_COMMAND

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

    def panels(self, *along: str) -> Sequence[Panel]:
        """As of Frame. Raises MissingSeries, with the command to run, where nothing has completed, or nothing of a wanted
        baseline."""
        done, begun = ({trial.baseline for trial in some} for some in (self.trials, [job.last for job in self.jobs]))
        for name in self.wanted:
            if name not in done:
                command = self.command if name in begun else f"python runners/run.py baseline={name} -m"
                raise MissingSeries(
                    f"Sweep {self.sweep.id} has no completed trial of baseline {name}; run `{command}`."
                )
        if not done:
            raise self.lacks("completed trial")
        return super().panels(*along)

    def trace(self, trials: Sequence[Trial]) -> Provenance:
        """What numbers of these trials stand on. Raises MixedPanel where they must not stand beside each other."""
        for trial in trials:  # kept, since each figure asks again
            if trial.id not in self._conversations:
                self._conversations[trial.id] = frozenset(conversations_of(self.turns_of(trial)))
        conversations = frozenset[Any]().union(*(self._conversations[trial.id] for trial in trials))
        completed = sum(job.trial is not None for job in self.jobs)
        incomplete = max(self.sweep.n_expected, len(self.jobs)) - completed  # those that never began included
        return trace(self.sweep, trials, len(conversations), incomplete, self.allow_mixed)


def open_source(
    store: ResultsStore,
    sweep_id: int | None = None,
    wanted: Sequence[str] = (),
    allow_mixed: bool = False,
    also: Sequence[int] = (),
) -> Source:
    """A sweep by its id, or the latest, with those of `also`. Raises MissingSeries where there is none, ResultsError where
    one of `also` is none."""
    sweep = store.latest_sweep() if sweep_id is None else store.sweep(sweep_id)
    if sweep is None:
        raise MissingSeries(f"No sweep of the results database has a completed trial; run `{DEFAULT_COMMAND}` first.")
    further = [store.sweep(one) for one in also]
    return Source(store, joined(sweep, further), wanted, allow_mixed, also)


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
