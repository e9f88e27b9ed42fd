"""What a measure reads (the trials that a claim is about, and those they are compared with), and how it answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from pensieve.errors import MissingSeries
from pensieve.results.claims.verdict import Measured
from pensieve.results.evidence import Evidence
from pensieve.results.fields import axis_value
from pensieve.results.frame import values_of
from pensieve.results.schema import Trial
from pensieve.statistics import Estimate, PairedRatio

if TYPE_CHECKING:
    import pandas as pd

Pairs = dict[tuple[int, str], float]
"""(seed, what is paired within it: a conversation, a round, a repeat) -> value."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Trials of one group. theirs: empty where nothing is compared. over: the axis that the trials may differ in."""

    evidence: Evidence
    ours: Sequence[Trial]
    theirs: Sequence[Trial] = ()
    over: str | None = None

    def at(self, trial: Trial) -> float:
        """The trial's place on the axis. Raises MissingSeries where it has none."""
        assert self.over is not None, "the claim names no axis"
        try:
            return float(axis_value(trial, self.over))
        except ValueError:
            raise MissingSeries(f"{self.over} is not set to a number") from None

    def values(
        self, trials: Iterable[Trial], column: str, label: str | None = None, phase: str | None = None
    ) -> pd.Series[float]:
        """A column of the trials' turns, of those with this label and phase; indexed by frame.KEY."""
        turns = self.evidence.turns(trials)
        for name, wanted in (("label", label), ("phase", phase)):
            if wanted is not None:
                turns = turns[turns[name] == wanted]
        return values_of(turns, column)

    def unless(self, metric: str) -> Sides:
        """Those of the trials in which this count is 0: who lost part of its load has the machine for what is left. Raises
        MissingSeries where a side has none."""
        ours, theirs = (
            [trial for trial in trials if not self.evidence.metric(trial, metric)]
            for trials in (self.ours, self.theirs)
        )
        for kept, trials in ((ours, self.ours), (theirs, self.theirs)):
            if trials and not kept:
                raise MissingSeries(f"every trial of {trials[0].baseline} has {metric}, and serves the load in part")
        return replace(self, ours=ours, theirs=theirs)

    @property
    def trial_ids(self) -> tuple[int, ...]:
        return tuple(sorted({trial.id for trial in chain(self.ours, self.theirs)}))


def of_ratio(
    ratio: PairedRatio, sides: Sides, n_unit: str = "conversations", about: str = "", scale: float = 1.0
) -> Measured:
    low, high = (None if end is None else end * scale for end in (ratio.ci_low, ratio.ci_high))
    return Measured(ratio.ratio * scale, low, high, ratio.n, n_unit, ratio.n_seeds, sides.trial_ids, about)


def of_estimate(estimate: Estimate, sides: Sides, n_unit: str, about: str = "") -> Measured:
    low, high = estimate.ci_low, estimate.ci_high
    return Measured(estimate.value, low, high, estimate.n, n_unit, estimate.groups, sides.trial_ids, about)


def percent_above_one(ratio: Measured) -> Measured:
    """A ratio as the percentage by which it exceeds 1."""
    value, low, high = (None if x is None else (x - 1.0) * 100 for x in (ratio.value, ratio.ci_low, ratio.ci_high))
    assert value is not None
    return replace(ratio, value=value, ci_low=low, ci_high=high)
