"""Reductions over the cases of a benchmark: a trial is one backend's answer to one case, a value a repetition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from pensieve.results.claims.measures.sides import Pairs, Sides, missing, of_ratio
from pensieve.results.claims.verdict import Measured
from pensieve.results.schema import Trial
from pensieve.statistics import paired_ratio


def case_excess_pct(sides: Sides, case: str = "*") -> Measured:
    """By how many percent ours takes longer than theirs, over the cases whose name fits the pattern.

    Repetitions of the two were interleaved, so they are paired; the interval resamples cases, then repetitions.
    """
    cases = {trial.id: str((trial.config.get("bench") or {}).get("case")) for trial in (*sides.ours, *sides.theirs)}
    names = sorted({name for name in cases.values() if fnmatchcase(name, case)})
    places = {name: place for place, name in enumerate(names)}
    ours, theirs = (_values(trials, cases, places) for trials in (sides.ours, sides.theirs))
    if not ours.keys() & theirs.keys():
        raise missing(f"no case {case} has repetitions of both" if case != "*" else "no case has repetitions of both")
    found = of_ratio(paired_ratio(ours, theirs), sides, "repetitions")
    about = "one case" if found.seeds == 1 else f"{found.seeds} cases"
    low, high = (None if end is None else (end - 1) * 100 for end in (found.ci_low, found.ci_high))
    return replace(found, value=(found.value - 1) * 100, ci_low=low, ci_high=high, seeds=1, about=about)


def _values(trials: Sequence[Trial], cases: dict[int, str], places: dict[str, int]) -> Pairs:
    found = {}
    for trial in trials:
        place = places.get(cases[trial.id])
        if place is not None:
            for number, value in enumerate((trial.engine or {}).get("values") or ()):
                if value and value > 0:
                    found[place, f"{trial.seed}/{trial.repeat}/{number}"] = float(value)
    return found
