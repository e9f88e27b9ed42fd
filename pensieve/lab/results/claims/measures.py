"""Named measures: what a claim can ask of the database, from rows to a value with its interval.

Over turns (speed-ups, means, token shares) intervals count seeds where there are several, else conversations; over the probes
of a changing prefix, seeds or rounds. Of numbers that a trial has once (metrics, loads along a sweep's axis, cases of a
benchmark) an interval comes from seeds alone, and only from enough of them.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal

from pensieve.errors import MissingSeries
from pensieve.lab.metric_registry import REAL, Better, Support, metric_of
from pensieve.lab.results.frame import (
    PROBES,
    by_conversation,
    by_round,
    conversation_ends,
    conversation_means,
    conversation_sums,
    paired,
    positive_ratio,
    speed_up,
    values_of,
)
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.trials import Evidence, axis_value
from pensieve.lab.statistics import (
    CONFIDENCE,
    Estimate,
    PairedRatio,
    estimate_percentiles_by_seed,
    fit_line,
    has_interval,
    paired_ratio,
    rate_by_seed,
)

if TYPE_CHECKING:
    import pandas as pd

Pairs = dict[tuple[int, str], float]
"""(seed, what is paired within it: a conversation, a round, a repeat) -> value."""

Curve = list[tuple[float, float]]
"""(throughput, latency) of one seed's trials, by rising load."""

Which = int | Literal["first", "last"] | None


# What a measure reads, and how it answers


@dataclass(frozen=True, slots=True)
class Sides:
    """Trials of one group. theirs: empty where nothing is compared. over: the axis that the trials may differ in."""

    evidence: Evidence
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

    def values(
        self, trials: Iterable[Trial], column: str, label: str | None = None, phase: str | None = None
    ) -> pd.Series[float]:
        """A column of the trials' turns, of those with this label and phase; indexed by frame.KEY."""
        turns = self.evidence.turns(trials)
        for name, wanted in (("label", label), ("phase", phase)):
            if wanted is not None:
                turns = turns[turns[name] == wanted]
        return values_of(turns, column)

    def unless(self, metric: str) -> Sides:
        """Those of the trials in which this count is 0: who lost part of its load has the machine for what is left. Raises
        MissingSeries where a side has none."""
        ours, theirs = (
            [trial for trial in trials if not self.evidence.metric(trial, metric)]
            for trials in (self.ours, self.theirs)
        )
        for kept, trials in ((ours, self.ours), (theirs, self.theirs)):
            if trials and not kept:
                raise MissingSeries(f"every trial of {trials[0].baseline} has {metric}, and serves the load in part")
        return replace(self, ours=ours, theirs=theirs)

    @property
    def trial_ids(self) -> tuple[int, ...]:
        return tuple(sorted({trial.id for trial in chain(self.ours, self.theirs)}))


@dataclass(frozen=True, slots=True)
class Measured:
    """A value from the database. ci_*: its 95 % interval, None where none is due. n counts n_unit, from `seeds` seeds.

    trial_ids: every trial that it was computed from. about: a remark for the reader, such as the turn it belongs to.
    at_least: the value is a lower bound: loads between what was carried and what was refused, or beyond, were not tried.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    n: int
    n_unit: str
    seeds: int
    trial_ids: tuple[int, ...]
    about: str = ""
    at_least: bool = False


def _of_ratio(ratio: PairedRatio, sides: Sides, n_unit: str = "conversations", about: str = "") -> Measured:
    return Measured(ratio.ratio, ratio.ci_low, ratio.ci_high, ratio.n, n_unit, ratio.n_seeds, sides.trial_ids, about)


def _of_estimate(estimate: Estimate, sides: Sides, n_unit: str, about: str = "") -> Measured:
    low, high = estimate.ci_low, estimate.ci_high
    return Measured(estimate.value, low, high, estimate.n, n_unit, estimate.groups, sides.trial_ids, about)


def _percent_above_one(ratio: Measured) -> Measured:
    """A ratio as the percentage by which it exceeds 1."""
    value, low, high = (None if x is None else (x - 1.0) * 100 for x in (ratio.value, ratio.ci_low, ratio.ci_high))
    assert value is not None
    return replace(ratio, value=value, ci_low=low, ci_high=high)


# Over turns


def speedup(
    sides: Sides,
    column: str = "ttft_ms",
    turn: Which = None,
    label: str | None = None,
    phase: str | None = None,
    unless: str | None = None,
) -> Measured:
    """How many times theirs is of ours, over the turns that both have: one ratio a conversation, geometric mean.

    turn: its number in the conversation, or "first" or "last" of those that both have; None: the mean of all of them. unless:
    a count that has to be 0 in a trial, see Sides.unless.
    """
    if unless is not None:
        sides = sides.unless(unless)
    pairs = _paired(sides, column, label, phase)
    if isinstance(turn, str):
        pairs = conversation_ends(pairs, last=turn == "last")
    elif turn is not None:
        pairs = pairs[pairs.index.get_level_values("turn") == turn]
    of = "of all turns" if turn is None else f"at the {turn} turn" if isinstance(turn, str) else f"at turn {turn}"
    return _of_ratio(_found(speed_up(pairs), f"no conversation has {column}{_where(label, phase)} {of} in both"), sides)


def extreme_speedup(
    sides: Sides, which: Literal["lowest", "highest"], column: str = "ttft_ms", fewest: int = 5, from_turn: int = 1
) -> Measured:
    """The speed-up at the turn where it is lowest or highest, of the turns from `from_turn` on that `fewest` conversations
    have in both."""
    found: list[tuple[float, int, PairedRatio]] = []
    every = _paired(sides, column)
    numbers = every.index.get_level_values("turn")
    for number in sorted(set(numbers.to_list())):
        pairs = every[numbers == number]
        if number >= from_turn and len(conversation_means(pairs["a"])) >= fewest:
            ratio = _found(speed_up(pairs), f"no conversation has a {column} above 0 at turn {number} in both")
            found.append((ratio.ratio, number, ratio))
    if len(found) < 2:
        after = f" from turn {from_turn} on" if from_turn > 1 else ""
        raise MissingSeries(f"fewer than two turns{after} have {column} in {fewest} conversations of both")
    _, number, ratio = min(found) if which == "lowest" else max(found)
    return _of_ratio(ratio, sides, about=f"at turn {number}")


def label_ratio(sides: Sides, of: str, to: str, column: str = "latency_ms") -> Measured:
    """Within ours: turns labelled `of` over turns labelled `to`, paired by conversation."""
    a, b = (conversation_means(sides.values(sides.ours, column, label)) for label in (of, to))
    return _of_ratio(
        _found(positive_ratio(a, b), f"no conversation has {column} of turns labelled {of} and {to}"), sides
    )


def turn_mean(sides: Sides, column: str, label: str | None = None, phase: str | None = None) -> Measured:
    """The mean over ours: of a conversation's turns, then of conversations."""
    values = conversation_means(sides.values(sides.ours, column, label, phase))
    return _of_ratio(_mean(values, metric_of(column).support, f"no turn has {column}{_where(label, phase)}"), sides)


def turn_percentile(
    sides: Sides, column: str, p: float, label: str | None = None, phase: str | None = None
) -> Measured:
    """The nearest-rank percentile (0 < p < 1) of ours over all turns."""
    values = by_conversation(sides.values(sides.ours, column, label, phase))
    if not values:
        raise MissingSeries(f"no turn has {column}{_where(label, phase)}")
    [found] = estimate_percentiles_by_seed(values, [p])
    return _of_estimate(found, sides, "turns")


def streaming_difference(sides: Sides, column: str = "ttft_ms") -> Measured:
    """Streaming less not streaming, paired by seed, phase and round, over the turns that probe hits and misses."""
    turns = sides.evidence.turns(sides.ours)
    values = sides.values(sides.ours, column)
    rounds: dict[tuple[int, str], dict[bool, float]] = {}
    streamed = turns.loc[values.index, ["phase", "stream"]]
    for key, value, phase, stream in zip(
        values.index.to_list(), values.to_list(), streamed["phase"], streamed["stream"], strict=True
    ):
        seed, repeat, _, _, iteration = key
        if phase in PROBES:
            rounds.setdefault((seed, f"{phase}/{iteration}/{repeat}"), {})[bool(stream)] = value
    found = {key: pair[True] - pair[False] for key, pair in rounds.items() if len(pair) == 2}
    return _of_ratio(_mean(found, REAL, "no round was asked for both with and without streaming"), sides, "pairs")


def token_share(sides: Sides, column: str, label: str | None = None, scale: float = 100.0) -> Measured:
    """Tokens of `column` (gpu_hit_tokens, cpu_hit_tokens, recomputed_tokens) a token of history: sums over sums."""
    both = paired(*(sides.values(sides.ours, name, label) for name in (column, "history_tokens")))
    a, b = (conversation_sums(both[side]) for side in ("a", "b"))
    if not sum(b.values()):
        raise MissingSeries(f"no turn has {column} of any history")
    found = rate_by_seed({key: (part, b[key]) for key, part in a.items()})
    low, high = (None if end is None else end * scale for end in (found.ci_low, found.ci_high))
    return Measured(found.value * scale, low, high, found.n, "conversations", found.groups, sides.trial_ids)


def _paired(sides: Sides, column: str, label: str | None = None, phase: str | None = None) -> pd.DataFrame:
    """Column a: theirs, b: ours, of the turns that both have."""
    return paired(*(sides.values(trials, column, label, phase) for trials in (sides.theirs, sides.ours)))


def _found(ratio: PairedRatio | None, otherwise: str) -> PairedRatio:
    if ratio is None:
        raise MissingSeries(otherwise)
    return ratio


def _mean(values: Pairs, support: Support, otherwise: str) -> PairedRatio:
    """The mean, as a ratio to 1."""
    if not values:
        raise MissingSeries(otherwise)
    return paired_ratio(values, dict.fromkeys(values, 1.0), of="means", support=support)


def _where(label: str | None, phase: str | None) -> str:
    return (f" of turns labelled {label}" if label else "") + (f" in phase {phase}" if phase else "")


# Over the probes of a changing prefix: what a miss costs, and what its cost depends on


def miss_penalty_pct(sides: Sides, column: str = "ttft_ms") -> Measured:
    """(miss - hit) / hit of the means in percent, paired by seed and round."""
    hit, miss = (by_round(sides.values(sides.ours, column, phase=phase)) for phase in PROBES)
    if not hit.keys() & miss.keys():
        raise MissingSeries(f"no round has {column} of a hit and of a miss")
    return _percent_above_one(_of_ratio(paired_ratio(miss, hit, of="means"), sides, "rounds"))


def axis_ratio(sides: Sides, phase: str, column: str = "ttft_ms") -> Measured:
    """Turns of a phase at the axis's largest value, over the same at its smallest: paired by seed and round."""
    places = sorted({sides.at(trial) for trial in sides.ours})
    if len(places) < 2:
        raise MissingSeries(f"the sweep has one value of {sides.over} only")
    ends = [[trial for trial in sides.ours if sides.at(trial) == place] for place in (places[-1], places[0])]
    a, b = (by_round(sides.values(trials, column, phase=phase)) for trials in ends)
    if not a.keys() & b.keys():
        raise MissingSeries(f"no round has {column} in phase {phase} at {sides.over} {places[0]:g} and {places[-1]:g}")
    return _of_ratio(paired_ratio(a, b, of="means"), sides, "rounds", f"{places[-1]:g} over {places[0]:g}")


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


# Over numbers that a trial has once


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
    """The largest load (a count on the axis) that ours carries with every turn completed, over theirs, paired by seed.

    Theirs must reach refusals in the sweep, otherwise its limit is unknown. Between the largest load that it carried and the
    first that it refused nothing is known of it either, so it counts as one less than that; and ours as the largest that it
    carried, whether or not it met a limit. Where that leaves something open the ratio is a lower bound. Raises MissingSeries
    where ours refuses the smallest load tried: leaving such seeds out would be to its favour.
    """
    ours = _largest(sides, sides.ours, lambda trial: _unserved(sides.evidence, trial, refusals))
    theirs = _largest(sides, sides.theirs, lambda trial: sides.evidence.metric(trial, refusals))
    if nothing := [key for key, (borne, first) in ours.items() if borne is None and first is not None]:
        raise MissingSeries(
            f"{sides.ours[0].baseline} refuses the smallest load of this sweep in {len(nothing)} of {len(ours)} seeds and "
            "repeats, and what it carries is not known; add smaller loads"
        )
    limits = {key: math.ceil(first) - 1.0 for key, (_, first) in theirs.items() if first is not None and first > 1}
    carried = {key: borne for key, (borne, _) in ours.items() if borne}
    both = carried.keys() & limits.keys()
    found = _of_seeds(
        carried, limits, sides, "no seed of the other side reaches its limit over the loads of this sweep"
    )
    left_out = len(theirs) - len(both)
    return replace(
        found,
        about=f"{left_out} of {len(theirs)} seeds and repeats left out, whose limit is not known"
        if left_out
        else found.about,
        at_least=any(ours[key][1] != carried[key] + 1 or theirs[key][0] != limits[key] for key in both),
    )


def case_excess_pct(sides: Sides, case: str = "*") -> Measured:
    """By how many percent ours takes longer than theirs, over the cases whose name fits the pattern.

    Repetitions of the two were interleaved, so they are paired; the interval counts cases where there are several, else
    repetitions.
    """
    cases = {trial.id: str((trial.config.get("bench") or {}).get("case")) for trial in (*sides.ours, *sides.theirs)}
    names = sorted({name for name in cases.values() if fnmatchcase(name, case)})
    places = {name: place for place, name in enumerate(names)}
    ours, theirs = (_repetitions(trials, cases, places) for trials in (sides.ours, sides.theirs))
    if not ours.keys() & theirs.keys():
        raise MissingSeries(
            f"no case {case} has repetitions of both" if case != "*" else "no case has repetitions of both"
        )
    found = _of_ratio(paired_ratio(ours, theirs), sides, "repetitions")
    about = "one case" if found.seeds == 1 else f"{found.seeds} cases"
    return replace(_percent_above_one(found), seeds=1, about=about)


def _of_seeds(ours: Pairs, theirs: Pairs, sides: Sides, otherwise: str) -> Measured:
    """Ratio of what each seed has once; repeats of too few seeds give no interval."""
    if not ours.keys() & theirs.keys():
        raise MissingSeries(otherwise)
    found = _of_ratio(paired_ratio(ours, theirs), sides, "trials")
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


def _unserved(evidence: Evidence, trial: Trial, refusals: str) -> float | None:
    """Refusals, and turns that ended otherwise than completed: a load of which a part timed out was not carried."""
    count = evidence.metric(trial, refusals)
    return None if count is None else count + evidence.incomplete([trial]).total()


def _largest(
    sides: Sides, trials: Sequence[Trial], refused_of: Callable[[Trial], float | None]
) -> dict[tuple[int, str], tuple[float | None, float | None]]:
    """Of each seed, the largest load below the first with refusals, and that one; None where there is none."""
    refused: dict[tuple[int, str], dict[float, float]] = defaultdict(dict)
    for trial in trials:
        count = refused_of(trial)
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


_RATIOS = {"speedup": "column", "extreme_speedup": "column", "label_ratio": "column", "metric_ratio": "name"}
"""Measures that compare one quantity, by the argument that names it. metric_ratio is ours over theirs, the others theirs
over ours, or what is slower over what is faster."""


def better_of(measure: str, arguments: Mapping[str, Any]) -> Better:
    """Which way a measure is better, by the metric that it is about; "none" where it is not a ratio of two sides."""
    if measure in ("throughput_at_latency_ratio", "largest_load_ratio"):
        return "higher"
    if measure not in _RATIOS:
        return "none"
    argument = _RATIOS[measure]
    default = inspect.signature(MEASURES[measure]).parameters[argument].default
    better = metric_of(arguments.get(argument, default)).better
    if measure == "metric_ratio" or better == "none":
        return better
    return "lower" if better == "higher" else "higher"
