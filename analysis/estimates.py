"""Estimates over the trials of a cell: seeds are resampled first, then the conversations of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pandas as pd

from analysis.sweep import ByConversation, by_conversation
from pensieve.statistics import (
    Estimate,
    PairedRatio,
    bootstrap_mean,
    bootstrap_percentile_by_seed,
    bootstrap_percentiles_by_seed,
    paired_ratio,
)


def percentile(values: ByConversation, p: float) -> Estimate:
    """Nearest rank over all turns; n counts turns."""
    return bootstrap_percentiles_by_seed(values, [p])[0]


def median(values: pd.Series[Any]) -> Estimate:
    """Of one value a conversation; n counts conversations."""
    return bootstrap_percentile_by_seed(one_each(values), 0.5)


def mean(values: ByConversation) -> Estimate:
    """Over all turns; n counts turns."""
    sums = {key: sum(found) for key, found in values.items()}
    counts = {key: float(len(found)) for key, found in values.items()}
    return as_estimate(paired_ratio(sums, counts, of="means"), sum(len(found) for found in values.values()))


def rate(tops: pd.Series[Any], bottoms: pd.Series[Any]) -> Estimate:
    """Sum over sum, such as hit tokens over history tokens; n counts conversations."""
    sums = [one_each(part.astype("float64").groupby(level=[0, 1]).sum()) for part in (tops, bottoms)]
    return as_estimate(paired_ratio(*sums, of="means"), len(sums[1]))


def over_seeds(values: Mapping[tuple[int, int], float]) -> Estimate:
    """Mean of one value a trial, by (seed, repeat); seeds are what is resampled."""
    by_seed: dict[int, list[float]] = defaultdict(list)
    for (seed, _), value in values.items():
        by_seed[seed].append(value)
    return bootstrap_mean({str(seed): [fmean(part)] for seed, part in sorted(by_seed.items())})


def speed_up(reference: pd.DataFrame, own: pd.DataFrame) -> PairedRatio | None:
    """How many times longer the reference takes to the first token: geometric mean over conversations of the ratio of
    their mean times, over the turns that both completed; None where they share none."""
    sides = [_by_turn(turns) for turns in (reference, own)]
    both = pd.concat(sides, axis=1, join="inner", keys=["reference", "own"])
    if both.empty:
        return None
    means = both.groupby(level=[0, 1]).agg(fmean)
    return paired_ratio(one_each(means["reference"]), one_each(means["own"]))


def one_each(values: pd.Series[Any]) -> dict[tuple[int, str], float]:
    """The one value of each conversation; of several, its last."""
    return {key: found[-1] for key, found in by_conversation(values).items()}


def as_estimate(found: PairedRatio, n: int | None = None) -> Estimate:
    return Estimate(found.ratio, found.ci_low, found.ci_high, found.n if n is None else n, found.n_seeds)


def _by_turn(turns: pd.DataFrame) -> pd.Series[Any]:
    """Times to first token by seed, conversation and turn."""
    known = turns.loc[turns["ttft_ms"] > 0].set_index("turn", append=True)["ttft_ms"]
    return known[~known.index.duplicated(keep="last")]
