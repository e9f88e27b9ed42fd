"""Reductions over the probes of prefix invalidation: what a miss costs, and what its cost depends on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from scipy import stats

from pensieve.results.claims.measures.sides import Pairs, Sides, missing, of_ratio, value_of
from pensieve.results.claims.verdict import Measured
from pensieve.results.schema import Trial
from pensieve.statistics import CONFIDENCE, fit_line, paired_ratio

PROBES = ("hit", "miss")


def miss_penalty_pct(sides: Sides, column: str = "ttft_ms") -> Measured:
    """(miss - hit) / hit of the means in percent, paired by seed and round."""
    hit, miss = (_rounds(sides, sides.ours, phase, column) for phase in PROBES)
    if not hit.keys() & miss.keys():
        raise missing(f"no round has {column} of a hit and of a miss")
    return _percent_above_one(of_ratio(paired_ratio(miss, hit, of="means"), sides, "rounds"))


def axis_ratio(sides: Sides, phase: str, column: str = "ttft_ms") -> Measured:
    """Turns of a phase at the axis's largest value, over the same at its smallest: paired by seed and round."""
    places = sorted({sides.at(trial) for trial in sides.ours})
    if len(places) < 2:
        raise missing(f"the sweep has one value of {sides.over} only")
    ends = [[trial for trial in sides.ours if sides.at(trial) == place] for place in (places[-1], places[0])]
    a, b = (_rounds(sides, trials, phase, column) for trials in ends)
    if not a.keys() & b.keys():
        raise missing(f"no round has {column} in phase {phase} at {sides.over} {places[0]:g} and {places[-1]:g}")
    return of_ratio(paired_ratio(a, b, of="means"), sides, "rounds", f"{places[-1]:g} over {places[0]:g}")


def r_squared(sides: Sides, x: str = "recomputed_tokens", y: str = "ttft_ms", fewest_places: int = 3) -> Measured:
    """How much of y's variance a line through x explains, over the probes of ours; the interval is Fisher's.

    Two places on the x axis always lie on a line: fewer than `fewest_places` give no value.
    """
    points: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for trial, row in sides.turns(sides.ours):
        at, value = value_of(row, x), value_of(row, y)
        if row.phase in PROBES and at is not None and value is not None:
            points[trial.seed, f"{trial.id}/{row.session}"].append((at, value))
    places = len({at for values in points.values() for at, _ in values})
    if places < fewest_places:
        raise missing(
            f"the probes have {places} different {x}, and a line needs {fewest_places}; sweep workload.blocks"
        )
    line = fit_line(points)
    if line.r_squared is None:
        raise missing(f"all {y} are equal")
    due = line.slope.ci_low is not None
    low, high = fisher_interval(line.r_squared, len(points)) if due else (None, None)
    slope = f"slope {line.slope.value:.3g} ms a token"
    return Measured(line.r_squared, low, high, line.n, "turns", line.groups, sides.trial_ids, slope)


def fisher_interval(r_squared: float, n: int) -> tuple[float, float]:
    """95 % interval of a squared correlation of n independent points, by Fisher's transformation of its root."""
    r = math.sqrt(min(max(r_squared, 0.0), 1.0))
    if r == 1.0:
        return 1.0, 1.0
    half = float(stats.norm.ppf(0.5 + CONFIDENCE / 2)) / math.sqrt(n - 3)
    return max(0.0, math.tanh(math.atanh(r) - half)) ** 2, math.tanh(math.atanh(r) + half) ** 2


def _rounds(sides: Sides, trials: Sequence[Trial], phase: str, column: str) -> Pairs:
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for trial, row in sides.turns(trials):
        value = value_of(row, column)
        if row.phase == phase and value is not None:
            found[trial.seed, f"{row.iteration}/{trial.repeat}"].append(value)
    return {key: fmean(values) for key, values in found.items()}


def _percent_above_one(ratio: Measured) -> Measured:
    def percent(value: float | None) -> float | None:
        return None if value is None else (value - 1.0) * 100

    return Measured(
        (ratio.value - 1.0) * 100,
        percent(ratio.ci_low),
        percent(ratio.ci_high),
        ratio.n,
        ratio.n_unit,
        ratio.seeds,
        ratio.trial_ids,
    )
