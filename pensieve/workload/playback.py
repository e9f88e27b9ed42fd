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
from pensieve.workload.base import Arrival, WorkloadContext, WorkloadPlan, said_end, unless_said
from pensieve.workload.chance import exponential
from pensieve.workload.fit import Dialogue, Step


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


class Playback:
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
        self._context = context
        self._warmup, self._measured, self._arrivals = list(warmup), list(measured), arrivals
        self._think_time_s, self._free, self._timeout_s = think_time_s, free, timeout_s
        self._facts = facts
        self._dialogues = {dialogue.session: dialogue for dialogue in (*warmup, *measured)}
        assert len(self._dialogues) == len(warmup) + len(measured), "two conversations have one name"
        self._warming = len(self._warmup)
        self._share_of: dict[str, list[Dialogue]] = {}  # what is left of its user's conversations, the next one last
        self._ids = count(1)

    def describe(self) -> WorkloadPlan:
        turns = sum(dialogue.turns for dialogue in self._measured)
        warmup_turns = sum(dialogue.turns for dialogue in self._warmup)
        longest = [dialogue.longest for dialogue in self._measured]
        return WorkloadPlan(
            load=self._arrivals.load,
            sessions=len(self._measured),
            turns=warmup_turns + turns,
            working_set_tokens=sum(longest),
            warmup_turns=warmup_turns,
            facts={
                **self._facts,
                "conversations": len(self._measured),
                "mean_turns": round(turns / len(self._measured), 3),
                "longest_conversation_tokens": max(longest),
                "replies": "free" if self._free else "forced lengths",
                **_spread("message_tokens", [step.message for dialogue in self._measured for step in dialogue.steps]),
                **_spread("prompt_tokens", [step.prompt for dialogue in self._measured for step in dialogue.steps]),
                **_spread("reply_tokens", [step.reply for dialogue in self._measured for step in dialogue.steps]),
            },
        )

    def start(self) -> Iterable[Arrival]:
        return [self._arrival(dialogue, 1, 0.0) for dialogue in self._warmup]

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        dialogue = self._dialogues[turn.session]
        assert turn.finished_s is not None
        now = turn.finished_s
        warming = dialogue.phase == "warmup"
        if not warming and isinstance(self._arrivals, Recorded):
            return []
        if turn.status == "completed" and turn.turn < dialogue.turns:
            pause_s = 0.0 if warming else self._think(dialogue, turn.turn)
            return [self._arrival(dialogue, turn.turn + 1, now + pause_s, turn)]
        if warming:
            self._warming -= 1
            return self._measured_starts(now) if self._warming == 0 else []
        return self._next_of_user(dialogue, turn.turn, now)

    def _measured_starts(self, now: float) -> list[Arrival]:
        if isinstance(self._arrivals, Recorded):
            return self._as_recorded(now, self._arrivals.scale)
        if isinstance(self._arrivals, Poisson):
            arrivals = []
            for index, dialogue in enumerate(self._measured):
                now += exponential(self._arrivals.interval_s, self._context.seed, "arrival", index) if index else 0.0
                arrivals.append(self._arrival(dialogue, 1, now))
            return arrivals
        users = self._arrivals.users
        for user in range(users):
            share = self._measured[user::users][::-1]
            self._share_of.update((dialogue.session, share) for dialogue in share)
        first = self._measured[:users]
        for dialogue in first:
            self._share_of[dialogue.session].pop()
        return [self._arrival(dialogue, 1, now + self._think(dialogue, 0)) for dialogue in first]

    def _as_recorded(self, now: float, scale: float) -> list[Arrival]:
        calls = [
            (dialogue, turn, step) for dialogue in self._measured for turn, step in enumerate(dialogue.steps, start=1)
        ]
        calls.sort(key=lambda call: (_at(call[2]), call[2].order))
        first = _at(calls[0][2])
        return [self._arrival(dialogue, turn, now + (_at(step) - first) * scale) for dialogue, turn, step in calls]

    def _next_of_user(self, dialogue: Dialogue, turn: int, now: float) -> list[Arrival]:
        share = self._share_of.get(dialogue.session)
        return [self._arrival(share.pop(), 1, now + self._think(dialogue, turn))] if share else []

    def _think(self, dialogue: Dialogue, turn: int) -> float:
        return exponential(self._think_time_s, self._context.seed, "think", dialogue.session, turn)

    def _arrival(self, dialogue: Dialogue, turn: int, at_s: float, before: TurnRecord | None = None) -> Arrival:
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
        end = said_end(before) if step.continues else None
        return Arrival(at_s, request, deadline, prompt=lambda: unless_said(step.build(), end))


def _at(step: Step) -> float:
    assert step.at_s is not None
    return step.at_s


def _spread(name: str, values: Sequence[int]) -> dict[str, float]:
    return {
        f"{name}_mean": round(sum(values) / len(values), 1),
        f"{name}_p50": nearest_rank(values, 0.5),
        f"{name}_p99": nearest_rank(values, 0.99),
    }
