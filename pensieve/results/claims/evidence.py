"""The trials of a sweep as a claim sees them: groups that differ in nothing but seed, repeat and baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from pensieve.metrics import Metric
from pensieve.results.schema import Sweep, Trial
from pensieve.results.store import JobResult, ResultsStore
from pensieve.results.summary import axis_value, measured_turns, varying_axes


class Evidence:
    """Current trials of a sweep, with their turns and metrics; turns are read once."""

    def __init__(self, store: ResultsStore, sweep_id: int) -> None:
        self.sweep: Sweep = store.sweep(sweep_id)
        self.jobs: Sequence[JobResult] = store.trials_of_sweep(sweep_id)
        self.trials: Sequence[Trial] = [job.trial for job in self.jobs if job.trial is not None]
        self._metrics: Mapping[int, Mapping[tuple[str, str], Metric]] = {
            job.trial.id: job.metrics for job in self.jobs if job.trial is not None
        }
        self._store = store
        self._turns: dict[int, Sequence[Row[Any]]] = {}

    def turns(self, trial: Trial) -> Sequence[Row[Any]]:
        """Completed turns that are measured: no warm-up, no re-warming."""
        if trial.id not in self._turns:
            self._turns[trial.id] = measured_turns(self._store, trial.id)
        return self._turns[trial.id]

    def metric(self, trial: Trial, name: str, label: str = "") -> Metric | None:
        """With a value, else None."""
        found = self._metrics[trial.id].get((name, label))
        return found if found is not None and found.value is not None else None

    def groups(self, over: str | None) -> Sequence[Group]:
        """Trials by the values of every axis that the sweep varied, but seed, repeat, baseline and `over`."""
        axes = [axis for axis in varying_axes(self.sweep.overrides, self.trials) if axis != over]
        found: dict[tuple[str, ...], dict[str, list[Trial]]] = {}
        for trial in self.trials:
            place = tuple(axis_value(trial, axis) for axis in axes)
            found.setdefault(place, defaultdict(list))[trial.baseline].append(trial)
        return [Group(dict(zip(axes, place, strict=True)), dict(trials)) for place, trials in found.items()]


@dataclass(frozen=True, slots=True)
class Group:
    """at: the values of the sweep's other axes. trials: by baseline."""

    at: Mapping[str, str]
    trials: Mapping[str, Sequence[Trial]]

    @property
    def name(self) -> str:
        return ", ".join(f"{axis}={value}" for axis, value in self.at.items())

    def first_of(self, baselines: Iterable[str]) -> str | None:
        return next((name for name in baselines if name in self.trials), None)
