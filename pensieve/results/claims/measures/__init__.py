"""Named measures: what a claim can ask of the database, from rows to a value with its interval."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from pensieve.results.claims.measures.probes import axis_ratio, miss_penalty_pct, r_squared
from pensieve.results.claims.measures.sides import Sides
from pensieve.results.claims.measures.trials import (
    case_excess_pct,
    largest_load_ratio,
    metric_ratio,
    throughput_at_latency_ratio,
)
from pensieve.results.claims.measures.turns import (
    extreme_speedup,
    label_ratio,
    speedup,
    streaming_difference,
    token_share,
    turn_mean,
    turn_percentile,
)
from pensieve.results.claims.verdict import Measured

Measure = Callable[..., Measured]
"""(Sides, **arguments) -> Measured. Raises MissingSeries, with what is missing, where the rows cannot give a value."""

MEASURES: Mapping[str, Measure] = {
    function.__name__: function
    for function in (
        axis_ratio,
        case_excess_pct,
        extreme_speedup,
        label_ratio,
        largest_load_ratio,
        metric_ratio,
        miss_penalty_pct,
        r_squared,
        speedup,
        streaming_difference,
        throughput_at_latency_ratio,
        token_share,
        turn_mean,
        turn_percentile,
    )
}


def arguments_of(measure: str) -> set[str]:
    """What a claim may give the measure beside its trials."""
    return {name for name in inspect.signature(MEASURES[measure]).parameters if name != "sides"}


__all__ = ["MEASURES", "Measure", "Sides", "arguments_of"]
