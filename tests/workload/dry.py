"""Drives a workload by hand: every arrival is served in the same time, none needs an engine."""

import json
from collections.abc import Callable, Container, Iterable
from functools import partial
from heapq import heappop, heappush
from pathlib import Path

from pensieve.lab.workload.base import Arrival, Workload, WorkloadContext
from pensieve.lab.workload.chat import ChatWorkload, HotnessWorkload
from pensieve.lab.workload.exact import AgentsWorkload, DecodeWorkload, PrefixInvalidationWorkload, RoundsWorkload
from pensieve.lab.workload.trace import trace_workload
from pensieve.serve.record import TurnRecord, is_measured

sharegpt_workload = partial(trace_workload, dataset="sharegpt", format="sharegpt", conversations=200)
"""As conf/workload/sharegpt.yaml has it."""

MAKERS: dict[str, Callable[[WorkloadContext], Workload]] = {
    "chat": lambda at: ChatWorkload(at, conversations=9, pressure=0, min_turns=2, max_turns=5, timeout_s=7.0),
    "chat users": lambda at: ChatWorkload(at, users=3, conversations=8, min_turns=2, max_turns=2, timeout_s=7.0),
    "chat auto": lambda at: ChatWorkload(
        at, pressure="auto", think_time_s="auto", think_time_cap_s="auto", request_interval="auto", timeout_s=7.0
    ),
    "hotness": lambda at: HotnessWorkload(at, users=7, turns=3, warmup_turns=2, timeout_s=7.0),
    "sharegpt": lambda at: sharegpt_workload(at, conversations=6, max_turns=4, timeout_s=7.0),
    "sharegpt systems": lambda at: sharegpt_workload(
        at, conversations=9, max_turns=2, system_tokens=7, systems=4, timeout_s=7.0
    ),
    "sharegpt users": lambda at: sharegpt_workload(at, users=4, conversations=6, max_turns=4, timeout_s=7.0),
    "rounds system": lambda at: RoundsWorkload(at, conversations=4, system_tokens=9, at_once=2, timeout_s=7.0),
    "rounds": lambda at: RoundsWorkload(at, conversations=3, rounds=2, order="random", timeout_s=7.0),
    "rounds pressed": lambda at: RoundsWorkload(
        at, conversations=9, rounds=3, order="random", at_once=5, timeout_s=7.0
    ),
    "agents": lambda at: AgentsWorkload(at, agents=2, steps=2, timeout_s=7.0),
    "prefix": lambda at: PrefixInvalidationWorkload(at, blocks="64/32", rounds=2, timeout_s=7.0),
    "decode": lambda at: DecodeWorkload(at, iterations=7, timeout_s=7.0),
}
"""Small ones of each kind."""


def lines(path: Path, *rows: object) -> Path:
    """A file with a row a line: a text as it is, anything else as JSON."""
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def finished(arrival: Arrival, at_s: float, status: str = "completed") -> TurnRecord:
    request = arrival.request
    turn = TurnRecord(
        request.session, request.turn, iteration=request.iteration, phase=request.phase, label=request.label
    )
    turn.status, turn.finished_s = status, at_s
    return turn


def drive(workload: Workload, service_s: float = 1.0, fail: Container[tuple[str, int]] = ()) -> list[Arrival]:
    """The arrivals in the order in which they are due. fail: (session, turn) of those that time out."""
    seen: list[Arrival] = []
    waiting: list[tuple[float, int, Arrival]] = []

    def push(arrivals: Iterable[Arrival]) -> None:
        for one in arrivals:
            heappush(waiting, (one.at_s, one.request.id, one))

    push(workload.start())
    while waiting:
        _, _, arrival = heappop(waiting)
        seen.append(arrival)
        status = "timeout" if (arrival.request.session, arrival.request.turn) in fail else "completed"
        push(workload.on_finished(finished(arrival, arrival.at_s + service_s, status)))
    return seen


def measured(arrivals: Iterable[Arrival]) -> list[Arrival]:
    return [arrival for arrival in arrivals if is_measured(arrival.request.phase)]
