"""What a simulated machine did and when: iterations, copies and requests as a Chrome trace, for ui.perfetto.dev."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

_MACHINE, _REQUESTS = 1, 2  # processes of the trace
_LANES = ("compute", "CPU to GPU", "GPU to CPU", "read from disk", "write to disk")
"""What one lane holds comes one after the other: viewers nest what overlaps on it. Other tiers get lanes behind these."""


class Drawn(Protocol):
    """What a trace shows of a request: a TurnRecord has it, of which workers know nothing."""

    request_id: int
    session: str
    turn: int
    status: str
    intended_s: float
    admitted_s: float | None
    first_token_s: float | None
    finished_s: float | None


class Timeline:
    """Collects events of Chrome's trace format, times in microseconds of the simulated clock."""

    def __init__(self) -> None:
        self._names: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": _MACHINE, "args": {"name": "machine"}},
            {"ph": "M", "name": "process_name", "pid": _REQUESTS, "args": {"name": "requests"}},
        ]
        self._lanes: dict[str, int] = {}
        for name in _LANES:
            self._lane(name)
        self._events: list[dict[str, Any]] = []

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            lane = self._lanes[name] = len(self._lanes) + 1
            self._names.append({"ph": "M", "name": "thread_name", "pid": _MACHINE, "tid": lane, "args": {"name": name}})
        return self._lanes[name]

    def add(self, lane: str, name: str, begins_ns: int, ends_ns: int, **args: int) -> None:
        """One iteration, or one copy."""
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "pid": _MACHINE,
                "tid": self._lane(lane),
                "ts": begins_ns / 1e3,
                "dur": (ends_ns - begins_ns) / 1e3,
                "args": args,
            }
        )

    def write(self, path: Path, turns: Iterable[Drawn], origin_s: float) -> None:
        """Compressed, as Perfetto opens it, in the order of time: a copy is known when it is done, and a request at its end.
        turns: whose times count from `origin_s` of the simulated clock."""
        requests = [event for turn in turns for event in _phases(turn, origin_s)]
        events = self._names + sorted(self._events + requests, key=itemgetter("ts"))
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)


def _phases(turn: Drawn, origin_s: float) -> list[dict[str, Any]]:
    """Waiting, prefill and decode of one request, as far as it came: the phase in which it was given up ends with it."""
    reached = {"waiting": turn.admitted_s, "prefill": turn.first_token_s, "decode": turn.finished_s}
    begins_s, events = turn.intended_s, []
    for name, ends_s in reached.items():
        given_up = ends_s is None
        ends_s = turn.finished_s if ends_s is None else ends_s
        if ends_s is None:
            break  # never finished
        shared = {
            "cat": "request",
            "name": name,
            "pid": _REQUESTS,
            "tid": turn.request_id,
            "id": turn.request_id,
            "args": {"session": turn.session, "turn": turn.turn, "status": turn.status},
        }
        events.append({**shared, "ph": "b", "ts": 1e6 * (origin_s + begins_s)})
        events.append({**shared, "ph": "e", "ts": 1e6 * (origin_s + ends_s)})
        if given_up:
            break
        begins_s = ends_s
    return events
