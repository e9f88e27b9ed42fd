"""Estimates over the trials of a cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from pensieve.lab.results.frame import ByConversation, by_conversation, conversation_sums
from pensieve.lab.statistics import (
    Estimate,
    PairedRatio,
    estimate_mean,
    estimate_percentile_by_seed,
    estimate_percentiles_by_seed,
    paired_ratio,
    rate_by_seed,
)


def percentile(values: ByConversation, p: float) -> Estimate:
    """Nearest rank over all turns; n counts turns."""
    return estimate_percentiles_by_seed(values, [p])[0]


def median(values: pd.Series[Any]) -> Estimate:
    """Of one value a conversation; n counts conversations."""
    return estimate_percentile_by_seed(one_each(values), 0.5)


def mean(values: ByConversation) -> Estimate:
    """Over all turns; n counts turns."""
    sums = {key: sum(found) for key, found in values.items()}
    counts = {key: float(len(found)) for key, found in values.items()}
    return as_estimate(paired_ratio(sums, counts, of="means"), sum(len(found) for found in values.values()))


def percent(parts: pd.Series[Any], wholes: pd.Series[Any]) -> Estimate:
    """Sum over sum in percent, such as hit tokens of history tokens; n counts conversations."""
    tops, bottoms = (conversation_sums(one) for one in (parts, wholes))
    found = rate_by_seed({key: (tops[key], whole) for key, whole in bottoms.items()})
    low, high = (None if end is None else 100 * end for end in (found.ci_low, found.ci_high))
    return Estimate(100 * found.value, low, high, len(bottoms), found.groups)


def over_seeds(values: Mapping[tuple[int, int], float]) -> Estimate:
    """Mean of one value a trial, by (seed, repeat); seeds are the groups."""
    return estimate_mean({str(seed): [value] for seed, value in sorted(seed_means(values).items())})


def seed_means(values: Mapping[tuple[int, int], float]) -> dict[int, float]:
    """Of one value a trial, by (seed, repeat), the mean of each seed."""
    by_seed: dict[int, list[float]] = defaultdict(list)
    for (seed, _), value in values.items():
        by_seed[seed].append(value)
    return {seed: fmean(part) for seed, part in by_seed.items()}


def one_each(values: pd.Series[Any]) -> dict[tuple[int, str], float]:
    """The one value of each conversation; of several, its last."""
    return {key: found[-1] for key, found in by_conversation(values).items()}


def as_estimate(found: PairedRatio, n: int | None = None) -> Estimate:
    return Estimate(found.ratio, found.ci_low, found.ci_high, found.n if n is None else n, found.n_seeds)
