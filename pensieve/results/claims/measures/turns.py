"""Measures over turns: speed-ups, means, token shares. Paired by seed and conversation; intervals resample seeds first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pensieve.errors import MissingSeries
from pensieve.results.claims.measures.sides import Pairs, Sides, of_estimate, of_ratio
from pensieve.results.claims.verdict import Measured
from pensieve.results.frame import (
    PROBES,
    by_conversation,
    conversation_ends,
    conversation_means,
    conversation_sums,
    paired,
    positive_ratio,
    speed_up,
)
from pensieve.statistics import PairedRatio, bootstrap_percentiles_by_seed, paired_ratio

if TYPE_CHECKING:
    import pandas as pd

Which = int | Literal["first", "last"] | None


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
    return of_ratio(_found(speed_up(pairs), f"no conversation has {column}{_where(label, phase)} {of} in both"), sides)


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
    return of_ratio(ratio, sides, about=f"at turn {number}")


def label_ratio(sides: Sides, of: str, to: str, column: str = "latency_ms") -> Measured:
    """Within ours: turns labelled `of` over turns labelled `to`, paired by conversation."""
    a, b = (conversation_means(sides.values(sides.ours, column, label)) for label in (of, to))
    return of_ratio(
        _found(positive_ratio(a, b), f"no conversation has {column} of turns labelled {of} and {to}"), sides
    )


def turn_mean(sides: Sides, column: str, label: str | None = None, phase: str | None = None) -> Measured:
    """The mean over ours: of a conversation's turns, then of conversations."""
    values = conversation_means(sides.values(sides.ours, column, label, phase))
    return of_ratio(_mean(values, f"no turn has {column}{_where(label, phase)}"), sides)


def turn_percentile(
    sides: Sides, column: str, p: float, label: str | None = None, phase: str | None = None
) -> Measured:
    """The nearest-rank percentile (0 < p < 1) of ours over all turns."""
    values = by_conversation(sides.values(sides.ours, column, label, phase))
    if not values:
        raise MissingSeries(f"no turn has {column}{_where(label, phase)}")
    [found] = bootstrap_percentiles_by_seed(values, [p])
    return of_estimate(found, sides, "turns")


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
    return of_ratio(_mean(found, "no round was asked for both with and without streaming"), sides, "pairs")


def token_share(sides: Sides, column: str, label: str | None = None, scale: float = 100.0) -> Measured:
    """Tokens of `column` (gpu_hit_tokens, cpu_hit_tokens, recomputed_tokens) a token of history: sums over sums."""
    both = paired(*(sides.values(sides.ours, name, label) for name in (column, "history_tokens")))
    a, b = (conversation_sums(both[side]) for side in ("a", "b"))
    if not sum(b.values()):
        raise MissingSeries(f"no turn has {column} of any history")
    return of_ratio(paired_ratio(a, b, of="means"), sides, scale=scale)


def _paired(sides: Sides, column: str, label: str | None = None, phase: str | None = None) -> pd.DataFrame:
    """Column a: theirs, b: ours, of the turns that both have."""
    return paired(*(sides.values(trials, column, label, phase) for trials in (sides.theirs, sides.ours)))


def _found(ratio: PairedRatio | None, otherwise: str) -> PairedRatio:
    if ratio is None:
        raise MissingSeries(otherwise)
    return ratio


def _mean(values: Pairs, otherwise: str) -> PairedRatio:
    """The mean, as a ratio to 1: paired_ratio then resamples seeds first, then conversations."""
    if not values:
        raise MissingSeries(otherwise)
    return paired_ratio(values, dict.fromkeys(values, 1.0), of="means")


def _where(label: str | None, phase: str | None) -> str:
    return (f" of turns labelled {label}" if label else "") + (f" in phase {phase}" if phase else "")
