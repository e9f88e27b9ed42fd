"""What the serve benchmark compares: throughput at equal latency, and the ratio that a roofline allows between systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pensieve.cost.roofline import Roofline

MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class Point:
    """One trial at one load. latency: P90 of latency over output tokens, ms. ttft_ms: p50 by turn."""

    load: int
    throughput: float
    latency: float
    trial_id: int | None = None
    ttft_ms: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reached:
    """throughput at the common latency. bound: "" where it was interpolated; ">=" where the system stayed faster than that
    at all loads tried; "<=" where it was slower at all of them."""

    throughput: float
    bound: str


def common_latency(curves: Mapping[str, Sequence[Point]]) -> float:
    """The lowest latency that every system keeps to at one load at least, and a quarter more.

    A system that is not loaded is hardly slower at twice the load: without the margin noise would decide where its curve
    crosses.
    """
    assert curves
    return MARGIN * max(min(point.latency for point in points) for points in curves.values())


def at_latency(points: Sequence[Point], latency: float) -> Reached:
    """Throughput where the curve crosses `latency`, linear between the two loads around it."""
    ordered = sorted(points, key=lambda point: point.load)
    below = [point for point in ordered if point.latency <= latency]
    if not below:
        return Reached(min(point.throughput for point in ordered), "<=")
    last = below[-1]
    beyond = [point for point in ordered if point.load > last.load]
    if not beyond:
        return Reached(last.throughput, "" if last.latency == latency else ">=")
    after = beyond[0]
    share = (latency - last.latency) / (after.latency - last.latency)
    return Reached(last.throughput + share * (after.throughput - last.throughput), "")


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens of one turn: already in the conversation, new in the prompt, generated."""

    history: int
    new: int
    output: int


def turn_s(roofline: Roofline, turns: Sequence[Turn], batch: int, keeps: bool) -> float:
    """Mean seconds of device time that a turn takes by the roofline when `batch` conversations decode together.

    keeps: all history is found in GPU memory; otherwise all of it is computed again. A prompt is computed by itself; a
    decode step is shared evenly by the batch.
    """
    assert turns and batch >= 1
    total = 0.0
    for turn in turns:
        start = turn.history if keeps else 0
        context = turn.history + turn.new
        total += roofline.iteration_s([(start, context)], 1)
        middle = context + turn.output // 2
        total += turn.output * roofline.iteration_s([(middle, middle + 1)] * batch, batch) / batch
    return total / len(turns)


def all_hit_ratio(roofline: Roofline, turns: Sequence[Turn], batch: int) -> float:
    """Turns a second with every history found, over turns a second with every history computed again."""
    return turn_s(roofline, turns, batch, keeps=False) / turn_s(roofline, turns, batch, keeps=True)
