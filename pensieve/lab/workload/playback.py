"""Conversations whose every length is known, played: at recorded times, or with a next turn that waits for the reply."""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from types import MappingProxyType
from typing import Any

from pensieve.core.request import Free, Hint, Length, Request, Sampling, TokenArray
from pensieve.errors import ConfigError
from pensieve.lab.workload.base import (
    Arrival,
    Following,
    WorkloadContext,
    WorkloadPlan,
    exponential,
)
from pensieve.serve.record import TurnRecord, is_measured


@dataclass(frozen=True, slots=True)
class Step:
    """One turn. message: tokens sent; prompt: tokens of the whole prompt, history included; reply: tokens asked for.

    build: makes the message's tokens, each time anew. at_s, order, pause_s, waits_for, hint: as of the recorded call.
    said: makes the reply's tokens, where the system is to be told them. fields: further ones of its request, which go before
    those of the dialogue.
    """

    build: Callable[[], TokenArray[int]]
    message: int
    prompt: int
    reply: int
    continues: bool = True
    at_s: float = 0.0
    order: int = 0
    pause_s: float | None = None
    waits_for: tuple[str, ...] = ()
    hint: Hint | None = None
    said: Callable[[], TokenArray[int]] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Begun:
    """The conversation that began another one, and the turn (from 1) after whose reply it did."""

    conversation: str
    turn: int


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One conversation. recorded_turns: as many as were to be asked, before the model's context cut any. begun: as it was
    recorded. label: of all its turns."""

    session: str
    phase: str
    steps: tuple[Step, ...]
    recorded_turns: int
    begun: Begun | None = None
    label: str = ""

    @classmethod
    def written(
        cls,
        session: str,
        phase: str,
        turns: Iterable[tuple[TokenArray[int], int, Mapping[str, Any]]],
        whole: bool = False,
    ) -> Dialogue:
        """Of turns whose text is there: (message, tokens of the reply, fields of the request). whole: each message is the
        whole prompt."""
        steps: list[Step] = []
        held = 0
        for message, reply, fields in turns:
            prompt = len(message) if whole else held + len(message)
            build = partial(array, "i", message)  # a copy for each request
            steps.append(Step(build, len(message), prompt, reply, not whole, fields=fields))
            held = prompt + reply
        return cls(session, phase, tuple(steps), len(steps))

    @property
    def longest(self) -> int:
        """KV tokens when it ends; its last token has no KV."""
        return max(step.prompt + step.reply for step in self.steps) - 1

    @property
    def turns(self) -> int:
        return len(self.steps)


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
    """Each user has its conversations one after another, and all users start with their first one (load "closed")."""

    shares: Sequence[Sequence[Dialogue]]
    load = "closed"

    @classmethod
    def dealt(cls, dialogues: Sequence[Dialogue], users: int) -> Users:
        """The conversations dealt out to so many users in turn."""
        assert users <= len(dialogues), "a user without a conversation"
        return cls([dialogues[user::users] for user in range(users)])


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between a reply and the next message. Recorded ones times `scale`; where nothing is recorded, exponentially
    distributed with mean `mean_s`, fixed by (seed, session, turn)."""

    seed: int
    mean_s: float
    scale: float = 1.0

    def __call__(self, dialogue: Dialogue, turn: int) -> float:
        recorded = dialogue.steps[turn].pause_s if turn < dialogue.turns else None
        if recorded is None:
            return exponential(self.mean_s, self.seed, "think", dialogue.session, turn)
        return recorded * self.scale


class Playback:
    """A workload of dialogues. Warm-up conversations, if any, run first, without a pause; when the last of them is over, the
    measured ones start.

    Without recorded times a turn is sent when the reply before it is complete and the pause is over; a conversation whose
    turn did not complete ends there. One that another conversation began starts when that one's reply is complete, and a turn
    that waits for such conversations is sent when the last of them has ended, also where that is by a failure. With recorded
    times a request waits for the turn before it in its conversation alone. Turns count from 1.
    Prompts are built when they are due.

    pause_s: of (dialogue, turn), the seconds between the reply of this turn and the user's next message, in this conversation
    or the next; turn 0: before the user's first message. free: the model ends its replies. timeout_s: a request is cancelled
    so long after it was due; None: never. facts, cache_state, working_set (None: all conversations at their longest): for
    describe().
    """

    def __init__(
        self,
        context: WorkloadContext,
        warmup: Sequence[Dialogue],
        measured: Sequence[Dialogue],
        arrivals: Recorded | Poisson | Users,
        pause_s: Callable[[Dialogue, int], float],
        *,
        free: bool = False,
        timeout_s: float | None = None,
        facts: Mapping[str, Any] = MappingProxyType({}),
        cache_state: str = "cold",
        working_set: int | None = None,
    ) -> None:
        assert measured
        if free and context.force_lengths:
            raise ConfigError("workload.free=true needs a trained model; with random weights leave it false.")
        self._context, self._timeout_s, self._ids = context, timeout_s, count(1)
        self._warmup, self._measured = warmup, measured
        self._arrivals, self._pause_s = arrivals, pause_s
        self._free, self._facts, self._cache_state = free, facts, cache_state
        self._working_set = sum(talk.longest for talk in measured) if working_set is None else working_set
        self._talks = {talk.session: talk for talk in (*warmup, *measured)}
        assert len(self._talks) == len(warmup) + len(measured), "two conversations have one name"
        self._warming = {talk.session for talk in warmup}
        shares = arrivals.shares if isinstance(arrivals, Users) else []
        self._shares = [list(share)[::-1] for share in shares]  # what is left of each, the next one last
        self._share_of = {talk.session: share for share in self._shares for talk in share}
        self._next = {one.session: (then.session, 1) for share in shares for one, then in pairwise(share)}
        self._family = Family(measured)
        self._began = 0.0, 0.0  # the first recorded turn: when it was sent, and when it was recorded

    def describe(self) -> WorkloadPlan:
        steps = [step for talk in self._measured for step in talk.steps]
        cut = [talk.recorded_turns - talk.turns for talk in self._measured]
        counted = [
            [is_measured(step.fields.get("phase", talk.phase)) for step in talk.steps] for talk in self._talks.values()
        ]
        return WorkloadPlan(
            load=self._arrivals.load,
            sessions=sum(map(any, counted)),
            turns=sum(map(len, counted)),
            working_set_tokens=self._working_set,
            warmup_turns=sum(not one for talk in counted for one in talk),
            cache_state=self._cache_state,
            facts={
                "conversations": len(self._measured),
                "mean_turns": round(len(steps) / len(self._measured), 3),
                "message_tokens_mean": round(sum(step.message for step in steps) / len(steps), 1),
                "reply_tokens_mean": round(sum(step.reply for step in steps) / len(steps), 1),
                "longest_conversation_tokens": max(talk.longest for talk in self._measured),
                "conversations_cut_by_context": sum(turns > 0 for turns in cut),
                "turns_cut_by_context": sum(cut),
                "replies": "free" if self._free else "forced lengths",
                **self._facts,
            },
        )

    def start(self) -> Iterable[Arrival]:
        return [self._arrival(talk, 1, 0.0) for talk in self._warmup] or self._measured_starts(0.0)

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        talk, now, completed = self._talks[turn.session], turn.finished_s, turn.status == "completed"
        assert now is not None
        if turn.session in self._warming:
            if completed and turn.turn < talk.turns:
                return [self._arrival(talk, turn.turn + 1, now, turn)]
            self._warming.discard(turn.session)
            return [] if self._warming else self._measured_starts(now)
        if isinstance(self._arrivals, Recorded):
            return []
        begun = self._family.begun_after(talk, turn.turn) if completed else ()
        following = [self._arrival(one, 1, now + self._pause_s(one, 0)) for one in begun]
        if completed and turn.turn < talk.turns:
            if self._family.wait(talk, turn.turn, turn):
                return following
            return [*following, self._arrival(talk, turn.turn + 1, now + self._pause_s(talk, turn.turn), turn)]
        for waiting, before in self._family.over(talk, turn.turn if completed else turn.turn - 1):
            following.append(self._arrival(waiting, before.turn + 1, now + self._pause_s(waiting, before.turn), before))
        if share := self._share_of.get(talk.session):
            following.append(self._arrival(share.pop(), 1, now + self._pause_s(talk, turn.turn)))
        return following

    def is_over(self, turn: TurnRecord) -> bool:
        return turn.turn >= self._talks[turn.session].turns or turn.status != "completed"

    def foresee(self, session: str, turn: int) -> Following | None:
        """The next turn of its conversation, or the first of its user's next one."""
        talk = self._talks[session]
        if session in self._warming or (self._family.related and not isinstance(self._arrivals, Recorded)):
            return None  # the last of the warm-up starts all the others
        own = ((session, turn + 1),) if turn < talk.turns else ()
        if isinstance(self._arrivals, Recorded):  # the next turn, when this one has ended and it is due
            return (
                Following(0.0, own, self._due_s(talk.steps[turn], self._arrivals.scale)) if own else Following(math.inf)
            )
        following = (*own, self._next[session]) if session in self._next else own
        return Following(self._pause_s(talk, turn) if following else math.inf, following)

    def out_of_work(self, turn: TurnRecord, following: Sequence[Arrival]) -> bool:
        """Whether a person has nothing left to ask after this turn; not one whose next turn waits for other conversations,
        nor a conversation that no person began."""
        talk = self._talks[turn.session]
        over = talk.begun is None and not self._share_of.get(talk.session) and talk.session not in self._family.waiting
        return over and self.is_over(turn)

    def _measured_starts(self, now: float) -> list[Arrival]:
        if isinstance(self._arrivals, Users):
            first = [share.pop() for share in self._shares]
            return [self._arrival(talk, 1, now + self._pause_s(talk, 0)) for talk in first]
        if isinstance(self._arrivals, Recorded):
            calls = [(talk, turn, step) for talk in self._measured for turn, step in enumerate(talk.steps, start=1)]
            calls.sort(key=lambda call: (call[2].at_s, call[2].order))
            self._began, scale = (now, calls[0][2].at_s), self._arrivals.scale
            return [self._arrival(talk, turn, self._due_s(step, scale)) for talk, turn, step in calls]
        arrivals = []
        for index, talk in enumerate(talk for talk in self._measured if talk.begun is None):
            now += exponential(self._arrivals.interval_s, self._context.seed, "arrival", index) if index else 0.0
            arrivals.append(self._arrival(talk, 1, now))
        return arrivals

    def _due_s(self, step: Step, scale: float) -> float:
        """When a recorded turn is due, once the first has begun."""
        now, first = self._began
        return now + (step.at_s - first) * scale

    def _arrival(self, talk: Dialogue, turn: int, at_s: float, before: TurnRecord | None = None) -> Arrival:
        step = talk.steps[turn - 1]
        end: TokenArray[int] = array("i")  # what ends the reply before it, where the model sampled that itself
        if step.continues and before is not None and before.finish_reason == "eos":
            end = before.token_ids[-1:]

        def message() -> TokenArray[int]:
            said = step.build()
            return said[1:] if end and said[:1] == end else said

        output = Free(step.reply) if self._free else Length(step.reply)
        fields = {"phase": talk.phase, "label": talk.label, "hint": step.hint, **step.fields}
        sampling = Sampling(seed=self._context.seed)
        request = Request(next(self._ids), talk.session, turn, array("i"), output, sampling, **fields)
        deadline_s = None if self._timeout_s is None else at_s + self._timeout_s
        return Arrival(at_s, request, deadline_s, message, step.continues, step.said)


class Family:
    """Which conversations began which, and which of them wait for others to end."""

    def __init__(self, dialogues: Sequence[Dialogue]) -> None:
        self._begun: dict[tuple[str, int], list[Dialogue]] = defaultdict(list)
        for dialogue in dialogues:
            if dialogue.begun is not None:
                self._begun[dialogue.begun.conversation, dialogue.begun.turn].append(dialogue)
        self._going: set[str] = {dialogue.session for dialogue in dialogues}  # not over yet
        self.waiting: dict[str, tuple[Dialogue, TurnRecord, set[str]]] = {}
        self.related = any(one.begun is not None or any(step.waits_for for step in one.steps) for one in dialogues)

    def begun_after(self, dialogue: Dialogue, turn: int) -> Sequence[Dialogue]:
        return self._begun.get((dialogue.session, turn), ())

    def wait(self, dialogue: Dialogue, turn: int, before: TurnRecord) -> bool:
        """Whether the turn after this one, whose record is `before`, has to wait; `over` will say when it may go on."""
        needed = {name for name in dialogue.steps[turn].waits_for if name in self._going}
        if needed:
            self.waiting[dialogue.session] = (dialogue, before, needed)
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
        for session, (waiting, before, needed) in list(self.waiting.items()):
            needed.difference_update(ended)
            if not needed:
                del self.waiting[session]
                free.append((waiting, before))
        return free
