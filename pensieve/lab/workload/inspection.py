"""What a workload would ask, found by answering it at once: no engine, no time."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from pensieve.core.request import TokenArray
from pensieve.core.session import common_prefix
from pensieve.lab.workload.base import Arrival, Workload, WorkloadPlan
from pensieve.serve.record import TurnRecord, is_measured

UNKNOWN = -1  # a reply's token: only the model could say it


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn. new, reply, prompt: tokens of what is sent anew, of the (longest) reply, and of the whole prompt with its
    history."""

    session: str
    phase: str
    label: str
    at_s: float
    new: int
    reply: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """turns: the measured ones. warmup_turns: the others."""

    plan: WorkloadPlan
    turns: Sequence[Asked]
    warmup_turns: int

    @property
    def sessions(self) -> int:
        return len({turn.session for turn in self.turns})

    @property
    def reuse(self) -> float:
        """Share of prompt tokens that were said before in the same conversation."""
        whole = sum(turn.prompt for turn in self.turns)
        return 1.0 - sum(turn.new for turn in self.turns) / whole if whole else 0.0

    @property
    def span_s(self) -> float:
        """First to last arrival if every reply took no time. Arrivals over it are an upper bound of a rate where the next
        turn waits for the reply."""
        times = [turn.at_s for turn in self.turns]
        return max(times) - min(times) if times else 0.0


def inspect(workload: Workload) -> Inspection:
    """Drive the workload with a system that answers at once, at full length, and never fails. The workload is used up."""
    plan = workload.describe()
    said: dict[str, TokenArray[int]] = {}
    heap: list[tuple[float, int, Arrival]] = []
    order = count()
    turns: list[Asked] = []

    def push(arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            heapq.heappush(heap, (arrival.at_s, next(order), arrival))

    push(workload.start())
    while heap:
        at_s, _, arrival = heapq.heappop(heap)
        held = said.get(arrival.request.session, array("i"))
        request = arrival.due(held)
        prompt, history, session = request.prompt, request.history, request.session
        known = min(common_prefix(held, prompt) if history is None else history.tokens, len(prompt) - 1)
        reply = request.output.max_new_tokens
        turns.append(Asked(session, request.phase, request.label, at_s, len(prompt) - known, reply, len(prompt)))
        said[session] = prompt + array("i", [UNKNOWN]) * reply
        push(
            workload.on_finished(
                TurnRecord(
                    session,
                    request.turn,
                    iteration=request.iteration,
                    label=request.label,
                    phase=request.phase,
                    stream=request.stream,
                    request_id=request.id,
                    intended_s=at_s,
                    finished_s=at_s,
                    output_tokens=reply,
                    prompt_tokens=len(prompt),
                )
            )
        )
    measured = [turn for turn in turns if is_measured(turn.phase)]
    return Inspection(plan, measured, len(turns) - len(measured))
