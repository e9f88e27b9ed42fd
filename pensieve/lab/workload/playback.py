"""Plays fitted dialogues: at recorded times, or as conversations whose next turn waits for the reply."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from pensieve.core.request import Free, Length, Output, Request, Sampling, is_measured
from pensieve.lab.statistics import nearest_rank
from pensieve.lab.workload.base import Arrival, Following, WorkloadContext, WorkloadPlan, said_end, unless_said
from pensieve.lab.workload.chance import exponential
from pensieve.lab.workload.fit import Dialogue, Step
from pensieve.lab.workload.talk import Talks, shares_of
from pensieve.serve.record import TurnRecord


@dataclass(frozen=True, slots=True)
class Recorded:
    """Every request at its own time (load "open"), but none before the turn before it is over. scale: 0.5 is twice
    as fast."""

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


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between a reply and the next message. Recorded ones times `scale`, at most `cap_s` (None: as long as they are);
    where nothing is recorded, exponentially distributed with mean `mean_s`, fixed by (seed, session, turn)."""

    mean_s: float
    scale: float = 1.0
    cap_s: float | None = None

    def recorded(self, pause_s: float) -> float:
        scaled = pause_s * self.scale
        return scaled if self.cap_s is None else min(scaled, self.cap_s)


class Playback(Talks[Dialogue]):
    """A workload of dialogues. Warm-up conversations run first; when the last of them is over, the measured ones start.

    Without recorded times a turn is sent when the reply before it is complete and the pause is over; a conversation whose
    turn did not complete ends there. One that another conversation began starts when that one's reply is complete, and a turn
    that waits for such conversations is sent when the last of them has ended, also where that is by a failure. With recorded
    times a request waits for the turn before it in its conversation alone. Turns count from 1.
    Prompts are built when they are due.

    first_user_ends: as WorkloadPlan.until_first_user. hints: requests carry what the recorded clients knew.
    """

    def __init__(
        self,
        context: WorkloadContext,
        warmup: Sequence[Dialogue],
        measured: Sequence[Dialogue],
        arrivals: Recorded | Poisson | Users,
        *,
        pauses: Pauses,
        free: bool,
        timeout_s: float | None,
        facts: Mapping[str, Any],
        first_user_ends: bool = False,
        hints: bool = True,
    ) -> None:
        assert warmup and measured
        people = [dialogue for dialogue in measured if dialogue.begun is None]
        assert not isinstance(arrivals, Users) or arrivals.users <= len(people), "a user without a conversation"
        assert not first_user_ends or isinstance(arrivals, Users)
        super().__init__(warmup, measured, shares_of(people, arrivals.users) if isinstance(arrivals, Users) else [])
        self._context, self._arrivals = context, arrivals
        self._people = people
        self._pauses, self._free, self._timeout_s = pauses, free, timeout_s
        self._first_user_ends, self._hints = first_user_ends, hints
        self._facts = facts
        self._ids = count(1)
        self._family = Family(measured)

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
        plan = self._plan(self._arrivals.load, self._free, facts)
        return replace(plan, until_first_user=self._first_user_ends)

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        talk, now = self._talks[turn.session], turn.finished_s
        assert now is not None
        if not is_measured(talk.phase):
            return super().on_finished(turn)
        if isinstance(self._arrivals, Recorded):
            return []
        completed = turn.status == "completed"
        begun = self._family.begun_after(talk, turn.turn) if completed else ()
        following = [self._arrival(one, 1, now + self._pause_s(one, 0)) for one in begun]
        if completed and turn.turn < talk.turns:
            if self._family.wait(talk, turn.turn, turn):
                return following
            return [*following, self._arrival(talk, turn.turn + 1, now + self._pause_s(talk, turn.turn), turn)]
        for waiting, before in self._family.over(talk, turn.turn if completed else turn.turn - 1):
            following.append(self._arrival(waiting, before.turn + 1, now + self._pause_s(waiting, before.turn), before))
        return [*following, *super().on_finished(turn)]

    def foresee(self, session: str, turn: int) -> Following | None:
        if is_measured(self._talks[session].phase):
            if isinstance(self._arrivals, Recorded):  # the next turn, where it was due before this one's end
                return (
                    Following(0.0, ((session, turn + 1),)) if turn < self._talks[session].turns else Following(math.inf)
                )
            if self._family.related:
                return None
        return super().foresee(session, turn)

    def out_of_work(self, turn: TurnRecord, following: Sequence[Arrival]) -> bool:
        """Whether a person has nothing left to ask after this turn; not one whose next turn waits for other conversations,
        nor a conversation that no person began."""
        talk = self._talks[turn.session]
        return (
            talk.begun is None
            and not self._share_of.get(talk.session)
            and not self._family.waits(talk)
            and (turn.turn >= talk.turns or turn.status != "completed")
        )

    def _measured_starts(self, now: float) -> list[Arrival]:
        if isinstance(self._arrivals, Recorded):
            return self._as_recorded(now, self._arrivals.scale)
        if isinstance(self._arrivals, Poisson):
            return self._poisson_starts(self._people, now, self._arrivals.interval_s, self._context.seed)
        return super()._measured_starts(now)

    def _as_recorded(self, now: float, scale: float) -> list[Arrival]:
        calls = [
            (dialogue, turn, step) for dialogue in self._measured for turn, step in enumerate(dialogue.steps, start=1)
        ]
        calls.sort(key=lambda call: (_at(call[2]), call[2].order))
        first = _at(calls[0][2])
        return [self._arrival(dialogue, turn, now + (_at(step) - first) * scale) for dialogue, turn, step in calls]

    def _pause_s(self, dialogue: Dialogue, turn: int) -> float:
        recorded = dialogue.steps[turn].pause_s if turn < dialogue.turns else None
        if recorded is not None:
            return self._pauses.recorded(recorded)
        return exponential(self._pauses.mean_s, self._context.seed, "think", dialogue.session, turn)

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
            phase=dialogue.phase,
            hint=step.hint if self._hints else None,
        )
        deadline = None if self._timeout_s is None else at_s + self._timeout_s
        end = said_end(before) if step.continues else None
        return Arrival(at_s, request, deadline, lambda: unless_said(step.build(), end), step.continues)


class Family:
    """Which conversations began which, and which of them wait for others to end."""

    def __init__(self, dialogues: Sequence[Dialogue]) -> None:
        self._begun: dict[tuple[str, int], list[Dialogue]] = defaultdict(list)
        for dialogue in dialogues:
            if dialogue.begun is not None:
                self._begun[dialogue.begun.conversation, dialogue.begun.turn].append(dialogue)
        self._going: set[str] = {dialogue.session for dialogue in dialogues}  # not over yet
        self._waiting: dict[str, tuple[Dialogue, TurnRecord, set[str]]] = {}
        self.related = any(one.begun is not None or any(step.waits_for for step in one.steps) for one in dialogues)

    def begun_after(self, dialogue: Dialogue, turn: int) -> Sequence[Dialogue]:
        return self._begun.get((dialogue.session, turn), ())

    def waits(self, dialogue: Dialogue) -> bool:
        return dialogue.session in self._waiting

    def wait(self, dialogue: Dialogue, turn: int, before: TurnRecord) -> bool:
        """Whether the turn after this one, whose record is `before`, has to wait; `over` will say when it may go on."""
        needed = {name for name in dialogue.steps[turn].waits_for if name in self._going}
        if needed:
            self._waiting[dialogue.session] = (dialogue, before, needed)
        return bool(needed)

    def over(self, dialogue: Dialogue, turns: int) -> list[tuple[Dialogue, TurnRecord]]:
        """A conversation ended after so many turns: those that waited for nobody else, with the turn they come after. What it
        would have begun later never begins."""
        ended, left = [dialogue.session], [(dialogue, turns)]
        while left:
            parent, done = left.pop()
            never = [begun for turn in range(done, parent.turns) for begun in self.begun_after(parent, turn + 1)]
            ended += [begun.session for begun in never]
            left += [(begun, 0) for begun in never]
        self._going.difference_update(ended)
        free = []
        for session, (waiting, before, needed) in list(self._waiting.items()):
            needed.difference_update(ended)
            if not needed:
                del self._waiting[session]
                free.append((waiting, before))
        return free


def _at(step: Step) -> float:
    assert step.at_s is not None
    return step.at_s


def _spread(name: str, values: Sequence[int]) -> dict[str, float]:
    return {
        f"{name}_mean": round(sum(values) / len(values), 1),
        f"{name}_p50": nearest_rank(values, 0.5),
        f"{name}_p99": nearest_rank(values, 0.99),
    }
