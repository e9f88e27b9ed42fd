"""Named measures: what a claim can ask of the database, from rows to a value with its interval.

Over turns intervals count seeds where there are several, else conversations. Of numbers that a trial has once an interval
comes from seeds alone, and only from enough of them.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import Frame, conversation_ends, paired, speed_up, values_of
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.trials import axis_value
from pensieve.lab.statistics import PairedRatio, has_interval, paired_ratio

Pairs = dict[tuple[int, str], float]
"""(seed, repeat) -> value."""

Curve = list[tuple[float, float]]
"""(throughput, latency) of one seed's trials, by rising load."""

Which = int | Literal["first", "last"] | None


@dataclass(frozen=True, slots=True)
class Sides:
    """Trials of one group. theirs: empty where nothing is compared. over: the axis that the trials may differ in."""

    evidence: Frame
    ours: Sequence[Trial]
    theirs: Sequence[Trial] = ()
    over: str | None = None

    def at(self, trial: Trial) -> float:
        """The trial's place on the axis. Raises MissingSeries where it has none."""
        assert self.over is not None, "the claim names no axis"
        try:
            return float(axis_value(trial, self.over))
        except ValueError:
            raise MissingSeries(f"{self.over} is not set to a number") from None


@dataclass(frozen=True, slots=True)
class Measured:
    """A value from the database. ci_*: its 95 % interval, None where none is due. n counts n_unit, from `seeds` seeds.

    trial_ids: every trial that it was computed from.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    n: int
    n_unit: str
    seeds: int
    trial_ids: tuple[int, ...]


def speedup(sides: Sides, column: str = "ttft_ms", turn: Which = None) -> Measured:
    """How many times theirs is of ours, over the turns that both have: one ratio a conversation, geometric mean.

    turn: its number in the conversation, or "first" or "last" of those that both have; None: the mean of all of them.
    """
    pairs = paired(*(values_of(sides.evidence.turns(trials), column) for trials in (sides.theirs, sides.ours)))
    if isinstance(turn, str):
        pairs = conversation_ends(pairs, last=turn == "last")
    elif turn is not None:
        pairs = pairs[pairs.index.get_level_values("turn") == turn]
    found = speed_up(pairs)
    if found is None:
        of = "of all turns" if turn is None else f"at the {turn} turn" if isinstance(turn, str) else f"at turn {turn}"
        raise MissingSeries(f"no conversation has {column} {of} in both")
    return _measured(found, sides, "conversations")


def throughput_at_latency_ratio(
    sides: Sides, limit: float, latency: str = "normalized_latency_ms_p90", throughput: str = "throughput_req_s"
) -> Measured:
    """Requests a second that ours finishes at this latency (ms), over theirs: paired by seed, from a sweep over rates.

    Between the last rate at which the latency is within the limit and the next one, both are taken as linear.
    """
    ours, theirs = (_reached(sides, trials, limit, latency, throughput) for trials in (sides.ours, sides.theirs))
    if not ours.keys() & theirs.keys():
        raise MissingSeries(f"{latency} of no seed crosses {limit:g} ms in both over the rates of this sweep")
    return _measured(paired_ratio(ours, theirs), sides, "trials")


def _measured(found: PairedRatio, sides: Sides, n_unit: str) -> Measured:
    """Repeats of too few seeds give no interval."""
    due = n_unit != "trials" or has_interval(found.n_seeds)
    low, high = (found.ci_low, found.ci_high) if due else (None, None)
    trial_ids = sorted({trial.id for trial in chain(sides.ours, sides.theirs)})
    return Measured(found.ratio, low, high, found.n, n_unit, found.n_seeds, tuple(trial_ids))


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


Measure = Callable[..., Measured]
"""(Sides, **arguments) -> Measured. Raises MissingSeries, with what is missing, where the rows cannot give a value."""

MEASURES: Mapping[str, Measure] = {one.__name__: one for one in (speedup, throughput_at_latency_ratio)}


def arguments_of(measure: str) -> set[str]:
    """What a claim may give the measure beside its trials."""
    return {name for name in inspect.signature(MEASURES[measure]).parameters if name != "sides"}
