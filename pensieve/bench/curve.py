"""Load against latency: what throughput each system reaches at the same 90th percentile of normalized latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    """throughput at the common latency. bound: "" where it was interpolated; ">=" where the system never became that slow
    at the loads tried; "<=" where it was slower at the lowest one."""

    throughput: float
    bound: str


def common_latency(curves: Mapping[str, Sequence[Point]]) -> float:
    """A quarter above the lowest latency that every system keeps to at one load at least.

    The margin is there because a system that is not loaded is hardly slower at twice the load: without it, noise would
    say where its curve crosses.
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
