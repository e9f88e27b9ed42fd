"""The ledger of misses: for each turn why each prompt token had no KV, and what of its time to first token that took.

A turn that ended without a token (cancelled in prefill, timed out, failed) has a ledger of the time until it ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pensieve.cost.base import CostModel, PositionPrices, marginal_s

Cause = Literal["new", "edited", "evicted", "expired", "restarted", "never_stored"]
"""new: never said before in this conversation. edited: other tokens stood in its place. evicted: its KV was given up for a
request of `evicted_by`. expired, restarted: the conversation was forgotten for its age, or the server was started again.
never_stored: its KV was computed and not kept, by design (stateless; the part of a block at the end of a turn in
prefix_cache), since its step failed, or since another conversation that shared it was forgotten."""

MOST_EVICTORS = 8


@dataclass(frozen=True, slots=True)
class Loss:
    """For whose request KV was given up, and when, in seconds of the engine's clock."""

    by: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Missed:
    """Positions [start, stop) of a prompt that had no KV."""

    start: int
    stop: int
    cause: Cause
    loss: Loss | None = None


@dataclass(frozen=True, slots=True)
class Miss:
    """A line of a turn's ledger. ms: of the turn's time to first token, or to its end without one. evicted_by, evicted_s:
    the conversation for whose request, and when the last of these tokens was given up; evicted_by None beside them: several
    others."""

    cause: Cause
    tokens: int
    ms: float
    evicted_by: str | None = None
    evicted_s: float | None = None


def ledger_of(missed: Sequence[Missed], waited_ms: float, cost: CostModel, chunk_tokens: int) -> tuple[Miss, ...]:
    """Divide the time that a turn waited for its first token among the causes of its missed positions, in proportion to
    what the cost model says each position takes to compute. Returns a line for each cause and evicting conversation (the
    MOST_EVICTORS largest): their tokens add up to the positions missed, their ms to waited_ms."""
    seconds: dict[tuple[Cause, str | None], float] = {}
    tokens: dict[tuple[Cause, str | None], int] = {}
    when: dict[tuple[Cause, str | None], float] = {}
    for one in missed:
        key = (one.cause, one.loss.by if one.loss else None)
        seconds[key] = seconds.get(key, 0.0) + marginal_s(cost, one.start, one.stop, chunk_tokens)
        tokens[key] = tokens.get(key, 0) + one.stop - one.start
        if one.loss is not None:
            when[key] = max(when.get(key, one.loss.at_s), one.loss.at_s)
    named = sorted((key for key in tokens if key[1] is not None), key=lambda key: (-tokens[key], key))
    for key in named[MOST_EVICTORS:]:
        rest = (key[0], None)
        tokens[rest] = tokens.get(rest, 0) + tokens.pop(key)
        seconds[rest] = seconds.get(rest, 0.0) + seconds.pop(key)
        when[rest] = max(when.get(rest, when[key]), when.pop(key))
    total = sum(seconds.values())
    count = sum(tokens.values())
    return tuple(
        Miss(
            cause,
            tokens[cause, by],
            waited_ms * (seconds[cause, by] / total if total else tokens[cause, by] / count),
            by,
            when.get((cause, by)),
        )
        for cause, by in tokens
    )


def seconds_of(missed: Iterable[Missed], below: int, prices: PositionPrices) -> float:
    """Seconds to compute the missed positions below `below`, as part of a longer prefill."""
    return prices.of((one.start, min(one.stop, below)) for one in missed if one.start < below)


def joined(missed: Iterable[Missed]) -> tuple[Missed, ...]:
    """Join neighbours of one cause and loss, and leave empty ones out."""
    runs: list[Missed] = []
    for one in missed:
        if one.start >= one.stop:
            continue
        last = runs[-1] if runs else None
        if last is not None and (last.stop, last.cause, last.loss) == (one.start, one.cause, one.loss):
            runs[-1] = Missed(last.start, one.stop, one.cause, one.loss)
        else:
            runs.append(one)
    return tuple(runs)
