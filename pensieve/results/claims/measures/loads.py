"""Reductions along an axis of load: what a system carries before it is too slow, or out of memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from pensieve.results.claims.measures.sides import Pairs, Sides
from pensieve.results.claims.measures.throughput import of_seeds
from pensieve.results.claims.verdict import Measured
from pensieve.results.schema import Trial

Curve = list[tuple[float, float]]
"""(throughput, latency) of one seed's trials, by rising load."""


def throughput_at_latency_ratio(
    sides: Sides, limit: float, latency: str = "normalized_latency_ms_p90", throughput: str = "throughput_req_s"
) -> Measured:
    """Requests a second that ours finishes at this latency (ms), over theirs: paired by seed, from a sweep over rates.

    Between the last rate at which the latency is within the limit and the next one, both are taken as linear.
    """
    ours, theirs = (_reached(sides, trials, limit, latency, throughput) for trials in (sides.ours, sides.theirs))
    return of_seeds(
        ours, theirs, sides, f"{latency} of no seed crosses {limit:g} ms in both over the rates of this sweep"
    )


def largest_load_ratio(sides: Sides, refusals: str = "oom_turns") -> Measured:
    """The largest load (a number on the axis) that ours bears without refusals, over theirs, paired by seed.

    Both have to reach refusals in the sweep: what was not loaded to its limit has an unknown one.
    """
    ours, theirs = (_largest(sides, trials, refusals) for trials in (sides.ours, sides.theirs))
    return of_seeds(ours, theirs, sides, "no seed reaches its limit in both over the loads of this sweep")


def _reached(sides: Sides, trials: Sequence[Trial], limit: float, latency: str, throughput: str) -> Pairs:
    curves: dict[tuple[int, str], list[tuple[float, float, float]]] = defaultdict(list)
    for trial in trials:
        y, x = sides.evidence.metric(trial, latency), sides.evidence.metric(trial, throughput)
        if y is not None and x is not None and y.value is not None and x.value is not None:
            curves[trial.seed, str(trial.repeat)].append((sides.at(trial), x.value, y.value))
    found = {key: crossing([(x, y) for _, x, y in sorted(curve)], limit) for key, curve in curves.items()}
    return {key: value for key, value in found.items() if value}


def crossing(curve: Curve, limit: float) -> float | None:
    """The throughput at which the latency passes the limit for good; None where it never does, or was never below."""
    for (x, y), (next_x, next_y) in reversed(list(pairwise(curve))):
        if y <= limit < next_y:
            return x + (next_x - x) * (limit - y) / (next_y - y)
    return None


def _largest(sides: Sides, trials: Sequence[Trial], refusals: str) -> Pairs:
    refused: dict[tuple[int, str], dict[float, float]] = defaultdict(dict)
    for trial in trials:
        metric = sides.evidence.metric(trial, refusals)
        if metric is not None and metric.value is not None:
            refused[trial.seed, str(trial.repeat)][sides.at(trial)] = metric.value
    found = {}
    for key, by_load in refused.items():
        limit = min((load for load, count in by_load.items() if count > 0), default=None)
        borne = max((load for load in by_load if limit is not None and load < limit), default=None)
        if borne is not None:
            found[key] = borne
    return found
