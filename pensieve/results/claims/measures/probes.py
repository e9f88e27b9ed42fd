"""Measures over the probes of prefix invalidation: what a miss costs, and what its cost depends on."""

from __future__ import annotations

import math
from collections import defaultdict

from pensieve.errors import MissingSeries
from pensieve.results.claims.measures.sides import Sides, of_ratio, percent_above_one
from pensieve.results.claims.verdict import Measured
from pensieve.results.frame import PROBES, by_round, paired
from pensieve.statistics import CONFIDENCE, fit_line, paired_ratio


def miss_penalty_pct(sides: Sides, column: str = "ttft_ms") -> Measured:
    """(miss - hit) / hit of the means in percent, paired by seed and round."""
    hit, miss = (by_round(sides.values(sides.ours, column, phase=phase)) for phase in PROBES)
    if not hit.keys() & miss.keys():
        raise MissingSeries(f"no round has {column} of a hit and of a miss")
    return percent_above_one(of_ratio(paired_ratio(miss, hit, of="means"), sides, "rounds"))


def axis_ratio(sides: Sides, phase: str, column: str = "ttft_ms") -> Measured:
    """Turns of a phase at the axis's largest value, over the same at its smallest: paired by seed and round."""
    places = sorted({sides.at(trial) for trial in sides.ours})
    if len(places) < 2:
        raise MissingSeries(f"the sweep has one value of {sides.over} only")
    ends = [[trial for trial in sides.ours if sides.at(trial) == place] for place in (places[-1], places[0])]
    a, b = (by_round(sides.values(trials, column, phase=phase)) for trials in ends)
    if not a.keys() & b.keys():
        raise MissingSeries(f"no round has {column} in phase {phase} at {sides.over} {places[0]:g} and {places[-1]:g}")
    return of_ratio(paired_ratio(a, b, of="means"), sides, "rounds", f"{places[-1]:g} over {places[0]:g}")


def r_squared(sides: Sides, x: str = "recomputed_tokens", y: str = "ttft_ms", fewest_places: int = 3) -> Measured:
    """How much of y's variance a line through x explains, over the probes of ours; the interval is Fisher's.

    Two places on the x axis always lie on a line: fewer than `fewest_places` give no value.
    """
    points: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for trial in sides.ours:
        for phase in PROBES:
            both = paired(*(sides.values([trial], column, phase=phase) for column in (x, y)))
            for (seed, _, session, *_), *point in zip(both.index.to_list(), both["a"], both["b"], strict=True):
                points[seed, f"{trial.id}/{session}"].append((point[0], point[1]))
    places = len({at for values in points.values() for at, _ in values})
    if places < fewest_places:
        raise MissingSeries(
            f"the probes have {places} different {x}, and a line needs {fewest_places}; sweep workload.blocks"
        )
    line = fit_line(points)
    if line.r_squared is None:
        raise MissingSeries(f"all {y} are equal")
    due = line.slope.ci_low is not None
    low, high = fisher_interval(line.r_squared, len(points)) if due else (None, None)
    slope = f"slope {line.slope.value:.3g} ms a token"
    return Measured(line.r_squared, low, high, line.n, "turns", line.groups, sides.trial_ids, slope)


def fisher_interval(r_squared: float, n: int) -> tuple[float, float]:
    """95 % interval of a squared correlation of n independent points, by Fisher's transformation of its root."""
    r = math.sqrt(min(max(r_squared, 0.0), 1.0))
    if r == 1.0:
        return 1.0, 1.0
    from scipy.special import ndtri  # scipy.stats has it too, and takes a second to import

    half = float(ndtri(0.5 + CONFIDENCE / 2)) / math.sqrt(n - 3)
    return max(0.0, math.tanh(math.atanh(r) - half)) ** 2, math.tanh(math.atanh(r) + half) ** 2
