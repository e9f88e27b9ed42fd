"""Plays fitted dialogues: at recorded times, or as conversations whose next turn waits for the reply."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from pensieve.record import TurnRecord
from pensieve.request import Free, Length, Output, Request, Sampling
from pensieve.statistics import nearest_rank
from pensieve.workload.base import Arrival, WorkloadContext, WorkloadPlan
from pensieve.workload.chance import exponential
from pensieve.workload.fit import Dialogue, Step
from pensieve.workload.talk import Talks, shares_of


@dataclass(frozen=True, slots=True)
class Recorded:
    """Every request at its own time, whatever the system does (load "open"). scale: 0.5 is twice as fast."""

    scale: float = 1.0
    load = "open"


@dataclass(frozen=True, slots=True)
class Poisson:
    """Conversations arrive as a Poisson process, `interval_s` apart on average (load "partly open")."""

    interval_s: float
    load = "partly open"


@dataclass(frozen=True, slots=True)
class Users:
    """So many people work through the conversations, each with a fixed share, one after another (load "closed")."""

    users: int
    load = "closed"


class Playback(Talks[Dialogue]):
    """A workload of dialogues. Warm-up conversations run first; when the last of them is over, the measured ones start.

    Without recorded times a turn is sent when the reply before it is complete and the user has thought, exponentially
    distributed with mean `think_time_s` and fixed by (seed, session, turn); a conversation whose turn did not complete
    ends there. With recorded times a request waits for nothing; two of one conversation that overlap are served in
    their order. Turns count from 1. Prompts are built when they are due.
    """

    def __init__(
        self,
        context: WorkloadContext,
        warmup: Sequence[Dialogue],
        measured: Sequence[Dialogue],
        arrivals: Recorded | Poisson | Users,
        *,
        think_time_s: float,
        free: bool,
        timeout_s: float | None,
        facts: Mapping[str, Any],
    ) -> None:
        assert warmup and measured
        assert not isinstance(arrivals, Users) or arrivals.users <= len(measured), "a user without a conversation"
        super().__init__(warmup, measured, shares_of(measured, arrivals.users) if isinstance(arrivals, Users) else [])
        self._context, self._arrivals = context, arrivals
        self._think_time_s, self._free, self._timeout_s = think_time_s, free, timeout_s
        self._facts = facts
        self._ids = count(1)

    def describe(self) -> WorkloadPlan:
        steps = [step for dialogue in self._measured for step in dialogue.steps]
        facts = {
            **self._facts,
            "conversations": len(self._measured),
            "mean_turns": round(len(steps) / len(self._measured), 3),
            **_spread("message_tokens", [step.message for step in steps]),
            **_spread("prompt_tokens", [step.prompt for step in steps]),
            **_spread("reply_tokens", [step.reply for step in steps]),
        }
        return self._plan(self._arrivals.load, self._free, facts)

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        if isinstance(self._arrivals, Recorded) and self._talks[turn.session].phase != "warmup":
            return []
        return super().on_finished(turn)

    def _measured_starts(self, now: float) -> list[Arrival]:
        if isinstance(self._arrivals, Recorded):
            return self._as_recorded(now, self._arrivals.scale)
        if isinstance(self._arrivals, Poisson):
            return self._poisson_starts(now, self._arrivals.interval_s, self._context.seed)
        return super()._measured_starts(now)

    def _as_recorded(self, now: float, scale: float) -> list[Arrival]:
        calls = [
            (dialogue, turn, step) for dialogue in self._measured for turn, step in enumerate(dialogue.steps, start=1)
        ]
        calls.sort(key=lambda call: (_at(call[2]), call[2].order))
        first = _at(calls[0][2])
        return [self._arrival(dialogue, turn, now + (_at(step) - first) * scale) for dialogue, turn, step in calls]

    def _pause_s(self, dialogue: Dialogue, turn: int) -> float:
        return exponential(self._think_time_s, self._context.seed, "think", dialogue.session, turn)

    def _arrival(self, dialogue: Dialogue, turn: int, at_s: float) -> Arrival:
        step = dialogue.steps[turn - 1]
        output: Output = Free(step.reply) if self._free else Length(step.reply)
        request = Request(
            id=next(self._ids),
            session=dialogue.session,
            turn=turn,
            prompt=array("i"),
            output=output,
            sampling=Sampling(seed=self._context.seed),
            continues=step.continues,
            phase=dialogue.phase,
        )
        deadline = None if self._timeout_s is None else at_s + self._timeout_s
        return Arrival(at_s, request, deadline, prompt=step.build)


def _at(step: Step) -> float:
    assert step.at_s is not None
    return step.at_s


def _spread(name: str, values: Sequence[int]) -> dict[str, float]:
    return {
        f"{name}_mean": round(sum(values) / len(values), 1),
        f"{name}_p50": nearest_rank(values, 0.5),
        f"{name}_p99": nearest_rank(values, 0.99),
    }
