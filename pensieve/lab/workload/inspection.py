"""What a workload would ask, found by answering it at once: no engine, no time."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from pensieve.core.request import TokenArray, is_measured
from pensieve.core.session import common_prefix
from pensieve.lab.workload.base import Arrival, Workload, WorkloadPlan
from pensieve.serve.record import TurnRecord

UNKNOWN = -1  # a reply's token: only the model could say it


@dataclass(frozen=True, slots=True)
class Inspection:
    """warmup_turns: those that are not measured. turns_by_label: of the measured ones, by phase and label. message, reply,
    prompt: tokens of each turn: of what is sent anew, of the (longest) reply, and of the whole prompt with its history.

    reuse: share of prompt tokens that were said before in the same conversation. span_s: first to last measured arrival if
    every reply took no time; session_rate and request_rate: arrivals a second over it, so an upper bound where the next
    turn waits for the reply. None where all arrive at once.
    """

    plan: WorkloadPlan
    sessions: int
    turns: int
    warmup_turns: int
    turns_by_label: dict[tuple[str, str], int]
    turns_per_session: Sequence[int]
    message: Sequence[int]
    reply: Sequence[int]
    prompt: Sequence[int]
    reuse: float
    span_s: float
    session_rate: float | None
    request_rate: float | None


@dataclass(frozen=True, slots=True)
class _Turn:
    session: str
    phase: str
    label: str
    at_s: float
    new: int
    reply: int
    prompt: int


def inspect(workload: Workload) -> Inspection:
    """Drive the workload with a system that answers at once, at full length, and never fails. The workload is used up."""
    plan = workload.describe()
    said: dict[str, TokenArray[int]] = {}
    heap: list[tuple[float, int, Arrival]] = []
    order = count()
    turns: list[_Turn] = []

    def push(arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            heapq.heappush(heap, (arrival.at_s, next(order), arrival))

    push(workload.start())
    while heap:
        at_s, _, arrival = heapq.heappop(heap)
        held = said.get(arrival.request.session, array("i"))
        request = arrival.due(held)
        prompt, history = request.prompt, request.history
        known = min(common_prefix(held, prompt) if history is None else history.tokens, len(prompt) - 1)
        reply = request.output.max_new_tokens
        turns.append(
            _Turn(request.session, request.phase, request.label, at_s, len(prompt) - known, reply, len(prompt))
        )
        said[request.session] = prompt + array("i", [UNKNOWN]) * reply
        answer = TurnRecord(request.session, request.turn, iteration=request.iteration, label=request.label)
        answer.phase, answer.stream, answer.request_id, answer.intended_s = (
            request.phase,
            request.stream,
            request.id,
            at_s,
        )
        answer.finished_s, answer.output_tokens, answer.prompt_tokens = at_s, reply, len(prompt)
        push(workload.on_finished(answer))
    return _summed(plan, turns)


def _summed(plan: WorkloadPlan, turns: Sequence[_Turn]) -> Inspection:
    measured = [turn for turn in turns if is_measured(turn.phase)]
    per_session = Counter(turn.session for turn in measured)
    times = [turn.at_s for turn in measured]
    span_s = max(times) - min(times) if times else 0.0
    message, prompt = [turn.new for turn in measured], [turn.prompt for turn in measured]
    return Inspection(
        plan=plan,
        sessions=len(per_session),
        turns=len(measured),
        warmup_turns=len(turns) - len(measured),
        turns_by_label=dict(Counter((turn.phase, turn.label) for turn in measured)),
        turns_per_session=list(per_session.values()),
        message=message,
        reply=[turn.reply for turn in measured],
        prompt=prompt,
        reuse=1.0 - sum(message) / sum(prompt) if measured else 0.0,
        span_s=span_s,
        session_rate=len(per_session) / span_s if span_s else None,
        request_rate=len(measured) / span_s if span_s else None,
    )
