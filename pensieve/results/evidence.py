"""The completed trials of a sweep, in groups that differ in nothing but seed, repeat and baseline, with turns and metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pensieve.metrics import STATUSES, Metric
from pensieve.results.fields import axis_value, varying_axes
from pensieve.results.frame import latest, turn_frame
from pensieve.results.schema import Sweep, Trial
from pensieve.results.store import JobResult, ResultsStore

if TYPE_CHECKING:
    import pandas as pd


class Evidence:
    """The trials that a sweep shows. The turns of each trial are read once, with these columns (without names all of
    them)."""

    def __init__(self, store: ResultsStore, sweep_id: int, *columns: str) -> None:
        self.store = store
        self._columns = columns
        self.sweep: Sweep = store.sweep(sweep_id)
        self.jobs: Sequence[JobResult] = store.trials_of_sweep(sweep_id)
        self.trials: Sequence[Trial] = [job.trial for job in self.jobs if job.trial is not None]
        self._metrics: Mapping[int, Mapping[tuple[str, str], Metric]] = {
            job.trial.id: job.metrics for job in self.jobs if job.trial is not None
        }
        self._turns: dict[int, pd.DataFrame] = {}

    def turns(self, trials: Iterable[Trial]) -> pd.DataFrame:
        """The measured turns that completed, as frame.turn_frame gives them; empty without trials."""
        import pandas as pd

        parts = []
        for trial in trials:
            if trial.id not in self._turns:
                self._turns[trial.id] = turn_frame(self.store, [trial], *self._columns)
            parts.append(self._turns[trial.id])
        return latest(pd.concat(parts)) if parts else turn_frame(self.store, [], *self._columns)

    def metric(self, trial: Trial, name: str, label: str = "") -> float | None:
        found = self._metrics[trial.id].get((name, label))
        return found.value if found else None

    def incomplete(self, trials: Sequence[Trial]) -> Counter[str]:
        """How many turns of these trials timed out, failed, were refused or cancelled, by status."""
        lost = (name for name in STATUSES if name != "completed")
        return +Counter({name: sum(int(self.metric(trial, "turns", name) or 0) for trial in trials) for name in lost})

    def groups(self, over: str | None = None) -> Sequence[TrialGroup]:
        """Trials by the values of every axis that the sweep varied, but seed, repeat, baseline and `over`."""
        axes = [axis for axis in varying_axes(self.sweep.overrides, self.trials) if axis != over]
        found: dict[tuple[str, ...], dict[str, list[Trial]]] = {}
        for trial in self.trials:
            place = tuple(axis_value(trial, axis) for axis in axes)
            found.setdefault(place, defaultdict(list))[trial.baseline].append(trial)
        return [TrialGroup(dict(zip(axes, place, strict=True)), dict(trials)) for place, trials in found.items()]


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """at: the values of the sweep's other axes. trials: by baseline."""

    at: Mapping[str, str]
    trials: Mapping[str, Sequence[Trial]]

    @property
    def name(self) -> str:
        return ", ".join(f"{axis}={value}" for axis, value in self.at.items())

    def first_of(self, baselines: Iterable[str]) -> str | None:
        return next((name for name in baselines if name in self.trials), None)
