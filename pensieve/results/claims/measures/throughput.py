"""Numbers that a trial has once, side by side: an interval comes from seeds alone, and only from enough of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pensieve.results.claims.measures.sides import Pairs, Sides, missing, of_ratio
from pensieve.results.claims.verdict import Measured
from pensieve.results.schema import Trial
from pensieve.statistics import has_interval, paired_ratio


def metric_ratio(sides: Sides, name: str, label: str = "") -> Measured:
    """How many times ours is of theirs, paired by seed: geometric mean."""
    ours, theirs = (_values(sides, trials, name, label) for trials in (sides.ours, sides.theirs))
    return of_seeds(ours, theirs, sides, f"no seed has {name} of both")


def of_seeds(ours: Pairs, theirs: Pairs, sides: Sides, otherwise: str) -> Measured:
    """Ratio of what each seed has once; repeats of too few seeds give no interval."""
    if not ours.keys() & theirs.keys():
        raise missing(otherwise)
    found = of_ratio(paired_ratio(ours, theirs), sides, "trials")
    return found if has_interval(found.seeds) else replace(found, ci_low=None, ci_high=None)


def _values(sides: Sides, trials: Sequence[Trial], name: str, label: str) -> Pairs:
    found = {}
    for trial in trials:
        metric = sides.evidence.metric(trial, name, label)
        if metric is not None and metric.value is not None and metric.value > 0:
            found[trial.seed, str(trial.repeat)] = metric.value
    return found
