"""The trials of a sweep as a claim sees them: groups that differ in nothing but seed, repeat and baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from pensieve.metrics import UNMEASURED, Metric
from pensieve.results.schema import Sweep, Trial
from pensieve.results.store import JobResult, ResultsStore
from pensieve.results.summary import axis_value, varying_axes


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
            self._turns[trial.id] = [
                row
                for row in self._store.turns_of(trial.id)
                if row.status == "completed" and row.phase not in UNMEASURED
            ]
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


def mixtures(trials: Sequence[Trial]) -> list[str]:
    """Why times of these trials must not stand beside each other, a clause each."""
    found = []
    if len({trial.simulated for trial in trials}) > 1:
        found.append("simulated and real trials are mixed")
    hashes: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for trial in trials:  # the source of a class outside the package is part of the hash of the trials that name it
        hashes[tuple(sorted(_outside(trial.config or {})))].add(trial.code_hash)
    if any(len(same) > 1 for same in hashes.values()):
        found.append("the trials ran different versions of the code: run the sweep's command again")
    if len({trial.weights == "random" for trial in trials if trial.weights not in (None, "none")}) > 1:
        found.append("random and trained weights are mixed")
    contended = sum(trial.contended for trial in trials)
    if contended:
        found.append(f"{contended} of the trials shared their device with others")
    return found


def _outside(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _outside(value)
        elif key == "_target_" and not str(value).startswith("pensieve."):
            yield str(value)
