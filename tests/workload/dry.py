"""Drives a workload by hand: every arrival is served in the same time, none needs an engine."""

from __future__ import annotations

from collections.abc import Container

from pensieve.lab.workload.base import Arrival, Workload
from pensieve.serve.record import TurnRecord


def finished(arrival: Arrival, at_s: float, status: str = "completed") -> TurnRecord:
    request = arrival.request
    turn = TurnRecord(
        request.session, request.turn, iteration=request.iteration, phase=request.phase, label=request.label
    )
    turn.status, turn.finished_s = status, at_s
    return turn


def drive(workload: Workload, service_s: float = 1.0, fail: Container[tuple[str, int]] = ()) -> list[Arrival]:
    """The arrivals in the order in which they are due. fail: (session, turn) of those that time out."""
    waiting, seen = list(workload.start()), []
    while waiting:
        arrival = min(waiting, key=lambda one: (one.at_s, one.request.id))
        waiting.remove(arrival)
        seen.append(arrival)
        status = "timeout" if (arrival.request.session, arrival.request.turn) in fail else "completed"
        waiting += workload.on_finished(finished(arrival, arrival.at_s + service_s, status))
    return seen
