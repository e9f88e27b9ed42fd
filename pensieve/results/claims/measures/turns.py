"""Reductions over turns: speed-ups, means, shares of tokens. Paired by seed and conversation, resampled seeds first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, Literal

from pensieve.results.claims.measures.sides import Pairs, Sides, conversation, missing, of_estimate, of_ratio, value_of
from pensieve.results.claims.verdict import Measured
from pensieve.results.schema import Trial
from pensieve.statistics import PairedRatio, bootstrap_percentiles_by_seed, paired_ratio

Which = int | Literal["first", "last"] | None
Turns = dict[tuple[int, str], dict[tuple[int, int], float]]
"""Conversation -> (turn, iteration) -> value."""


def speedup(
    sides: Sides, column: str = "ttft_ms", turn: Which = None, label: str | None = None, phase: str | None = None
) -> Measured:
    """How many times theirs is of ours, over the turns that both have: one ratio a conversation, geometric mean.

    turn: its number in the conversation, or "first" or "last" of those that both have; None: the mean of all of them.
    """
    ours, theirs = (_turns(sides, trials, column, label, phase) for trials in (sides.ours, sides.theirs))
    a: Pairs = {}
    b: Pairs = {}
    for key in ours.keys() & theirs.keys():
        shared = sorted(ours[key].keys() & theirs[key].keys())
        chosen = _chosen(shared, turn)
        if chosen:
            a[key], b[key] = fmean(theirs[key][one] for one in chosen), fmean(ours[key][one] for one in chosen)
    of = "of all turns" if turn is None else f"at the {turn} turn" if isinstance(turn, str) else f"at turn {turn}"
    return of_ratio(_ratio(a, b, f"no conversation has {column}{_where(label, phase)} {of} in both"), sides)


def extreme_speedup(
    sides: Sides, which: Literal["lowest", "highest"], column: str = "ttft_ms", fewest: int = 5, from_turn: int = 1
) -> Measured:
    """The speed-up at the turn where it is lowest or highest, of the turns from `from_turn` on that `fewest` conversations
    have in both."""
    ours, theirs = (_turns(sides, trials, column) for trials in (sides.ours, sides.theirs))
    numbers = {turn for turns in ours.values() for turn, _ in turns if turn >= from_turn}
    found: list[tuple[float, int, PairedRatio]] = []
    for number in sorted(numbers):
        a = {
            k: fmean(v) for k, turns in theirs.items() if (v := [x for (turn, _), x in turns.items() if turn == number])
        }
        b = {k: fmean(v) for k, turns in ours.items() if (v := [x for (turn, _), x in turns.items() if turn == number])}
        if len(a.keys() & b.keys()) >= fewest:
            ratio = _ratio(a, b, "")
            found.append((ratio.ratio, number, ratio))
    if len(found) < 2:
        after = f" from turn {from_turn} on" if from_turn > 1 else ""
        raise missing(f"fewer than two turns{after} have {column} in {fewest} conversations of both")
    _, number, ratio = min(found) if which == "lowest" else max(found)
    return of_ratio(ratio, sides, about=f"at turn {number}")


def label_ratio(sides: Sides, of: str, to: str, column: str = "latency_ms") -> Measured:
    """Within ours: turns labelled `of` over turns labelled `to`, paired by conversation."""
    a, b = (_means(_turns(sides, sides.ours, column, label)) for label in (of, to))
    return of_ratio(_ratio(a, b, f"no conversation has {column} of turns labelled {of} and {to}"), sides)


def turn_mean(sides: Sides, column: str, label: str | None = None, phase: str | None = None) -> Measured:
    """The mean over ours: of a conversation's turns, then of conversations."""
    values = _means(_turns(sides, sides.ours, column, label, phase))
    return of_ratio(_mean(values, f"no turn has {column}{_where(label, phase)}"), sides)


def turn_percentile(
    sides: Sides, column: str, p: float, label: str | None = None, phase: str | None = None
) -> Measured:
    """The nearest-rank percentile (0 < p < 1) of ours over all turns."""
    turns = _turns(sides, sides.ours, column, label, phase)
    if not turns:
        raise missing(f"no turn has {column}{_where(label, phase)}")
    [found] = bootstrap_percentiles_by_seed({key: list(values.values()) for key, values in turns.items()}, [p])
    return of_estimate(found, sides, "turns")


def streaming_difference(sides: Sides, column: str = "ttft_ms") -> Measured:
    """Streaming less not streaming, paired by seed, phase and round, over the turns that probe hits and misses."""
    found: dict[tuple[int, str], dict[bool, float]] = defaultdict(dict)
    for trial, row in sides.turns(sides.ours):
        value = value_of(row, column)
        if row.phase in ("hit", "miss") and value is not None:
            found[trial.seed, f"{row.phase}/{row.iteration}/{trial.repeat}"][bool(row.stream)] = value
    values = {key: pair[True] - pair[False] for key, pair in found.items() if len(pair) == 2}
    return of_ratio(_mean(values, "no round was asked for both with and without streaming"), sides, "pairs")


def token_share(sides: Sides, column: str, label: str | None = None, scale: float = 100.0) -> Measured:
    """Tokens of `column` (gpu_hit_tokens, cpu_hit_tokens, recomputed_tokens) a token of history: sums over sums."""
    a: Pairs = defaultdict(float)
    b: Pairs = defaultdict(float)
    for trial, row in sides.turns(sides.ours):
        part = value_of(row, column)
        if part is not None and row.history_tokens is not None and label in (None, row.label):
            key = conversation(trial, row.session)
            a[key] += part
            b[key] += row.history_tokens
    if not sum(b.values()):
        raise missing(f"no turn has {column} of any history")
    return of_ratio(paired_ratio(a, b, of="means"), sides, scale=scale)


def _turns(
    sides: Sides, trials: Iterable[Trial], column: str, label: str | None = None, phase: str | None = None
) -> Turns:
    found: Turns = defaultdict(dict)
    for trial, row in sides.turns(trials):
        value = value_of(row, column)
        if value is not None and label in (None, row.label) and phase in (None, row.phase):
            found[conversation(trial, row.session)][row.turn, row.iteration] = value
    return dict(found)


def _chosen(shared: list[Any], turn: Which) -> list[Any]:
    if turn is None or not shared:
        return shared
    if turn == "first":
        return shared[:1]
    return shared[-1:] if turn == "last" else [one for one in shared if one[0] == turn]


def _means(turns: Turns) -> Pairs:
    return {key: fmean(values.values()) for key, values in turns.items()}


def _mean(values: Mapping[tuple[int, str], float], otherwise: str) -> PairedRatio:
    """As a ratio to one, whose resampling is that of a mean: seeds first, then conversations."""
    if not values:
        raise missing(otherwise)
    return paired_ratio(values, dict.fromkeys(values, 1.0), of="means")


def _ratio(a: Pairs, b: Pairs, otherwise: str) -> PairedRatio:
    positive = {key for key in a.keys() & b.keys() if a[key] > 0 and b[key] > 0}
    if not positive:
        raise missing(otherwise)
    return paired_ratio({key: a[key] for key in positive}, {key: b[key] for key in positive})


def _where(label: str | None, phase: str | None) -> str:
    return (f" of turns labelled {label}" if label else "") + (f" in phase {phase}" if phase else "")
