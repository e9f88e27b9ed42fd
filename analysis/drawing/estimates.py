"""Estimates over the trials of a cell: seeds are resampled first, then the conversations of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from analysis.drawing.source import BySession
from pensieve.statistics import Estimate, bootstrap_mean, bootstrap_percentiles_by_seed, paired_ratio

FEWEST_SEEDS = 5  # below, one value a trial leaves too little to draw an interval from


def percentile(values: BySession, p: float) -> Estimate:
    """Nearest rank over all turns; n counts turns."""
    return bootstrap_percentiles_by_seed(values, [p])[0]


def mean(values: BySession) -> Estimate:
    """Over all turns; n counts turns."""
    sums = {key: sum(found) for key, found in values.items()}
    counts = {key: float(len(found)) for key, found in values.items()}
    return _ratio(sums, counts, sum(len(found) for found in values.values()))


def rate(tops: BySession, bottoms: BySession) -> Estimate:
    """Sum over sum, such as hit tokens over history tokens; n counts conversations."""
    return _ratio(
        {key: sum(found) for key, found in tops.items()},
        {key: sum(found) for key, found in bottoms.items()},
        len(bottoms),
    )


def over_seeds(values: Mapping[tuple[int, int], float]) -> Estimate:
    """Mean of one value a trial, by (seed, repeat); an interval from FEWEST_SEEDS seeds on, by resampling them."""
    by_seed: dict[int, list[float]] = defaultdict(list)
    for (seed, _), value in values.items():
        by_seed[seed].append(value)
    found = bootstrap_mean({str(seed): [fmean(part)] for seed, part in sorted(by_seed.items())})
    if found.groups >= FEWEST_SEEDS:
        return found
    return Estimate(found.value, None, None, found.n, found.groups)


def _ratio(tops: Mapping[tuple[int, str], float], bottoms: Mapping[tuple[int, str], float], n: int) -> Estimate:
    found = paired_ratio(tops, bottoms, of="means")
    return Estimate(found.ratio, found.ci_low, found.ci_high, n, found.n_seeds)
