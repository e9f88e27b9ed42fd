"""Measures over numbers that a trial has once: its metrics, loads along a sweep's axis, and cases of a benchmark.

An interval comes from seeds alone, and only from enough of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise

from pensieve.errors import MissingSeries
from pensieve.results.claims.measures.sides import Pairs, Sides, of_ratio, percent_above_one
from pensieve.results.claims.verdict import Measured
from pensieve.results.schema import Trial
from pensieve.statistics import has_interval, paired_ratio

Curve = list[tuple[float, float]]
"""(throughput, latency) of one seed's trials, by rising load."""


def metric_ratio(sides: Sides, name: str, label: str = "") -> Measured:
    """How many times ours is of theirs, paired by seed: geometric mean."""
    ours, theirs = (_values(sides, trials, name, label) for trials in (sides.ours, sides.theirs))
    return _of_seeds(ours, theirs, sides, f"no seed has {name} of both")


def throughput_at_latency_ratio(
    sides: Sides, limit: float, latency: str = "normalized_latency_ms_p90", throughput: str = "throughput_req_s"
) -> Measured:
    """Requests a second that ours finishes at this latency (ms), over theirs: paired by seed, from a sweep over rates.

    Between the last rate at which the latency is within the limit and the next one, both are taken as linear.
    """
    ours, theirs = (_reached(sides, trials, limit, latency, throughput) for trials in (sides.ours, sides.theirs))
    return _of_seeds(
        ours, theirs, sides, f"{latency} of no seed crosses {limit:g} ms in both over the rates of this sweep"
    )


def largest_load_ratio(sides: Sides, refusals: str = "oom_turns") -> Measured:
    """The largest load (a count on the axis) that ours carries without refusals, over theirs, paired by seed.

    Theirs must reach refusals in the sweep, otherwise its limit is unknown. Between the largest load that it carried and the
    first that it refused nothing is known of it either, so it counts as one less than that; and ours as the largest that it
    carried, whether or not it met a limit. Where that leaves something open the ratio is a lower bound.
    """
    ours, theirs = (_largest(sides, trials, refusals) for trials in (sides.ours, sides.theirs))
    limits = {key: math.ceil(first) - 1.0 for key, (_, first) in theirs.items() if first is not None and first > 1}
    carried = {key: borne for key, (borne, _) in ours.items() if borne}
    both = carried.keys() & limits.keys()
    return replace(
        _of_seeds(carried, limits, sides, "no seed of the other side reaches its limit over the loads of this sweep"),
        at_least=any(ours[key][1] != carried[key] + 1 or theirs[key][0] != limits[key] for key in both),
    )


def case_excess_pct(sides: Sides, case: str = "*") -> Measured:
    """By how many percent ours takes longer than theirs, over the cases whose name fits the pattern.

    Repetitions of the two were interleaved, so they are paired; the interval resamples cases, then repetitions.
    """
    cases = {trial.id: str((trial.config.get("bench") or {}).get("case")) for trial in (*sides.ours, *sides.theirs)}
    names = sorted({name for name in cases.values() if fnmatchcase(name, case)})
    places = {name: place for place, name in enumerate(names)}
    ours, theirs = (_repetitions(trials, cases, places) for trials in (sides.ours, sides.theirs))
    if not ours.keys() & theirs.keys():
        raise MissingSeries(
            f"no case {case} has repetitions of both" if case != "*" else "no case has repetitions of both"
        )
    found = of_ratio(paired_ratio(ours, theirs), sides, "repetitions")
    about = "one case" if found.seeds == 1 else f"{found.seeds} cases"
    return replace(percent_above_one(found), seeds=1, about=about)


def _of_seeds(ours: Pairs, theirs: Pairs, sides: Sides, otherwise: str) -> Measured:
    """Ratio of what each seed has once; repeats of too few seeds give no interval."""
    if not ours.keys() & theirs.keys():
        raise MissingSeries(otherwise)
    found = of_ratio(paired_ratio(ours, theirs), sides, "trials")
    return found if has_interval(found.seeds) else replace(found, ci_low=None, ci_high=None)


def _values(sides: Sides, trials: Sequence[Trial], name: str, label: str) -> Pairs:
    found = {}
    for trial in trials:
        value = sides.evidence.metric(trial, name, label)
        if value is not None and value > 0:
            found[trial.seed, str(trial.repeat)] = value
    return found


def _reached(sides: Sides, trials: Sequence[Trial], limit: float, latency: str, throughput: str) -> Pairs:
    curves: dict[tuple[int, str], list[tuple[float, float, float]]] = defaultdict(list)
    for trial in trials:
        y, x = sides.evidence.metric(trial, latency), sides.evidence.metric(trial, throughput)
        if y is not None and x is not None:
            curves[trial.seed, str(trial.repeat)].append((sides.at(trial), x, y))
    found = {key: crossing([(x, y) for _, x, y in sorted(curve)], limit) for key, curve in curves.items()}
    return {key: value for key, value in found.items() if value}


def crossing(curve: Curve, limit: float) -> float | None:
    """The throughput at which the latency passes the limit for good; None where it never does, or was never below."""
    for (x, y), (next_x, next_y) in reversed(list(pairwise(curve))):
        if y <= limit < next_y:
            return x + (next_x - x) * (limit - y) / (next_y - y)
    return None


def _largest(
    sides: Sides, trials: Sequence[Trial], refusals: str
) -> dict[tuple[int, str], tuple[float | None, float | None]]:
    """Of each seed, the largest load below the first with refusals, and that one; None where there is none."""
    refused: dict[tuple[int, str], dict[float, float]] = defaultdict(dict)
    for trial in trials:
        count = sides.evidence.metric(trial, refusals)
        if count is not None:
            refused[trial.seed, str(trial.repeat)][sides.at(trial)] = count
    found = {}
    for key, by_load in refused.items():
        first = min((load for load, count in by_load.items() if count > 0), default=None)
        borne = max((load for load in by_load if first is None or load < first), default=None)
        found[key] = (borne, first)
    return found


def _repetitions(trials: Sequence[Trial], cases: dict[int, str], places: dict[str, int]) -> Pairs:
    found = {}
    for trial in trials:
        place = places.get(cases[trial.id])
        if place is not None:
            for number, value in enumerate((trial.engine or {}).get("values") or ()):
                if value and value > 0:
                    found[place, f"{trial.seed}/{trial.repeat}/{number}"] = float(value)
    return found
