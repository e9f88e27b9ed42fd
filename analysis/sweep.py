"""What a figure reads: the current trials of a sweep, in panels, what it asks of a sweep before it applies, and what the
numbers of a panel stand on: trials of which kinds must not stand in one, and how a figure says it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pensieve.errors import MissingSeries, MixedPanel
from pensieve.lab.results.frame import REFERENCE, Frame, Panel, axis_value, conversations_of, field_of, mixtures
from pensieve.lab.results.notes import plan_of
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
    """A sweep as figures read it. allow_mixed: see trace."""

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
        """What numbers of these trials stand on. Raises MixedPanel where their times must not be compared; allow_mixed: it is
        noted instead."""
        reasons = mixtures(trials)
        mixed = tuple(f"{one.what} ({ranges(one.trials)})" if one.trials else one.what for one in reasons)
        if mixed and not self.allow_mixed:
            raise MixedPanel(
                f"One panel would hold {mixed[0]}; {reasons[0].remedy}, or draw it with --allow-mixed, which it then says."
            )
        for trial in trials:  # kept, since each figure asks again
            if trial.id not in self._conversations:
                self._conversations[trial.id] = frozenset(conversations_of(self.turns_of(trial)))
        conversations = frozenset[Any]().union(*(self._conversations[trial.id] for trial in trials))
        completed = sum(job.trial is not None for job in self.jobs)
        return Provenance(
            sweep=self.sweep.id,
            command=self.sweep.command,
            trials=tuple(sorted(trial.id for trial in trials)),
            seeds=tuple(sorted({trial.seed for trial in trials})),
            conversations=len(conversations),
            models=_unique(trial.model for trial in trials),
            dtypes=_unique(trial.dtype for trial in trials),
            devices=_unique(device_of(trial) for trial in trials),
            kind=_unique("simulated" if trial.simulated else "real" for trial in trials),
            weights=_unique("none" if trial.simulated else trial.weights for trial in trials),
            code=_unique(trial.code_hash for trial in trials),
            load=_unique(plan_of(trial).get("load") or field_of(trial, "flags.load") for trial in trials),
            cache_state=_unique(plan_of(trial).get("cache_state") for trial in trials),
            contended=tuple(sorted(trial.id for trial in trials if trial.contended)),
            with_failures=tuple(sorted(trial.id for trial in trials if field_of(trial, "flags.failures"))),
            incomplete=max(self.sweep.n_expected, len(self.jobs)) - completed,  # those that never began included
            mixed=mixed,
        )


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


# What numbers stand on


@dataclass(frozen=True, slots=True)
class Provenance:
    """Of all trials of a panel. A tuple with more than one value: they differ in it.

    conversations: measured ones with a completed turn, counted once a seed and repeat, whichever baselines had them.
    kind: "real", "simulated" or both. weights: "random", "none" (simulated) or where they came from. code: hashes.
    load: open, closed, partly open. cache_state: what the workload declared of the start, held against the first turns.
    contended, with_failures: trial ids. incomplete: jobs of the sweep without a completed trial. mixed: what was let
    through by allow_mixed, a clause each.
    """

    sweep: int
    command: str | None
    trials: tuple[int, ...]
    seeds: tuple[int, ...]
    conversations: int
    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    devices: tuple[str, ...]
    kind: tuple[str, ...]
    weights: tuple[str, ...]
    code: tuple[str, ...]
    load: tuple[str, ...]
    cache_state: tuple[str, ...]
    contended: tuple[int, ...]
    with_failures: tuple[int, ...]
    incomplete: int
    mixed: tuple[str, ...]

    @property
    def of_seeds(self) -> str:
        several = "" if len(self.seeds) == 1 else "s"
        return f"{self.conversations:,} conversations, {len(self.seeds)} seed{several}"


def footnote(of: Provenance, lead: str) -> str:
    """The caption of a figure, without its title. lead: what a point and its interval are."""
    lead = lead.rstrip(".")
    if not of.trials:
        return f"{lead}; COMPUTED, without a trial; sweep {of.sweep}."
    said = {"simulated": "SIMULATED by a cost model of", "real": "measured on"}
    how = said[of.kind[0]] if len(of.kind) == 1 else "PARTLY SIMULATED,"
    parts = [f"{how} {', '.join((*of.devices, *of.dtypes))}"]
    if of.conversations > 0 or of.load:  # a benchmark of a part has neither conversations nor a load
        named = {"none": "no weights: lengths only", "random": "random weights: real speed, meaningless text"}
        weights = dict.fromkeys(named.get(source, "trained weights") for source in of.weights or ("hub",))
        cache = f"{' and '.join(of.cache_state)} at the start" if of.cache_state else "state at the start not recorded"
        parts = [f"n = {of.of_seeds}", f"{', '.join(of.models)} ({' and '.join(weights)})", *parts]
        parts += [f"load {' and '.join(of.load) or 'not recorded'}", f"cache {cache}"]
    parts += [f"code {', '.join(code[:8] for code in of.code)}", f"sweep {of.sweep}, trials {ranges(of.trials)}"]
    if of.with_failures:
        parts += [f"trials {ranges(of.with_failures)} have turns that did not complete"]
    if of.incomplete:
        parts += [f"{of.incomplete} of the sweep's trials did not complete"]
    return "; ".join([lead, *parts]) + "."


def brief(of: Provenance, intervals: bool) -> str:
    """The one line of small print inside a figure: what a reader must not miss. intervals: whether any is drawn, or due."""
    if not of.trials:
        return f"COMPUTED, without a trial; sweep {of.sweep}"
    said = {"simulated": f"SIMULATED on {', '.join(of.devices)}", "real": "measured"}
    kind = said[of.kind[0]] if len(of.kind) == 1 else "PARTLY SIMULATED"
    parts = [f"{kind}, random weights" if "random" in of.weights else kind]
    if of.conversations > 0:
        parts.append(f"{of.of_seeds}{'' if intervals else ': no intervals'}")
    if of.with_failures or of.incomplete:
        parts.append("not all completed")
    return "; ".join([*parts, f"sweep {of.sweep}"])


def ranges(ids: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    runs: list[list[int]] = []
    for one in ids:
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def device_of(trial: Trial) -> str:
    """Its name, and how many of them."""
    name = trial.device or trial.hardware
    return f"{trial.device_count} x {name}" if (trial.device_count or 1) > 1 else name


def _unique(values: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(value) for value in values if value))
