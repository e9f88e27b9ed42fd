"""Conversations whose next turn waits for the reply: what every workload of people who talk to a model has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from pensieve.lab.workload.base import Arrival, Following, WorkloadPlan
from pensieve.lab.workload.chance import exponential
from pensieve.serve.record import TurnRecord


class Talk(Protocol):
    """One conversation: turns count from 1. phase: of all its turns. longest: KV tokens when it ends; its last token has no
    KV."""

    @property
    def session(self) -> str: ...

    @property
    def phase(self) -> str: ...

    @property
    def turns(self) -> int: ...

    @property
    def longest(self) -> int: ...


T = TypeVar("T", bound=Talk)


class Talks(ABC, Generic[T]):
    """Warm-up conversations run first; when the last of them is over, the measured ones start. A turn is sent when the reply
    before it is complete and a pause is over; in the warm-up there is none. A conversation whose turn did not complete ends
    there.

    shares: of each user, the conversations that it has one after another; each user starts with its first one (load
    "closed"). Without users a subclass says when the measured ones start.
    """

    def __init__(self, warmup: Sequence[T], measured: Sequence[T], shares: Sequence[Sequence[T]]) -> None:
        self._warmup, self._measured = warmup, measured
        self._talks = {talk.session: talk for talk in (*warmup, *measured)}
        assert len(self._talks) == len(warmup) + len(measured), "two conversations have one name"
        self._warming = len(warmup)
        self._shares = [list(share)[::-1] for share in shares]  # what is left of each, the next one last
        self._share_of = {talk.session: share for share in self._shares for talk in share}
        self._next = {one.session: (then.session, 1) for share in shares for one, then in pairwise(share)}

    @abstractmethod
    def _arrival(self, talk: T, turn: int, at_s: float, before: TurnRecord | None = None) -> Arrival:
        """The request of a turn."""

    @abstractmethod
    def _pause_s(self, talk: T, turn: int) -> float:
        """Seconds between the reply of this turn and the user's next message, in this conversation or the next; turn 0:
        before the user's first message."""

    def _plan(self, load: str, free: bool, facts: Mapping[str, Any]) -> WorkloadPlan:
        """free: the model ends its replies."""
        warmup_turns = sum(talk.turns for talk in self._warmup)
        return WorkloadPlan(
            load=load,
            sessions=len(self._measured),
            turns=warmup_turns + sum(talk.turns for talk in self._measured),
            working_set_tokens=sum(talk.longest for talk in self._measured),
            warmup_turns=warmup_turns,
            facts={
                **facts,
                "longest_conversation_tokens": max(talk.longest for talk in self._measured),
                "replies": "free" if free else "forced lengths",
            },
        )

    def start(self) -> Iterable[Arrival]:
        return [self._arrival(talk, 1, 0.0) for talk in self._warmup]

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        talk, now = self._talks[turn.session], turn.finished_s
        assert now is not None
        warming = talk.phase == "warmup"
        if turn.status == "completed" and turn.turn < talk.turns:
            pause_s = 0.0 if warming else self._pause_s(talk, turn.turn)
            return [self._arrival(talk, turn.turn + 1, now + pause_s, turn)]
        if warming:
            self._warming -= 1
            return self._measured_starts(now) if self._warming == 0 else []
        share = self._share_of.get(talk.session)
        return [self._arrival(share.pop(), 1, now + self._pause_s(talk, turn.turn))] if share else []

    def is_over(self, turn: TurnRecord) -> bool:
        return turn.turn >= self._talks[turn.session].turns or turn.status != "completed"

    def foresee(self, session: str, turn: int) -> Following | None:
        """The next turn of its conversation, or the first of its user's next one."""
        talk = self._talks[session]
        if talk.phase == "warmup":
            return None  # the last of them starts all the others
        own = ((session, turn + 1),) if turn < talk.turns else ()
        other = self._next.get(session)
        return Following(self._pause_s(talk, turn), own if other is None else (*own, other))

    def _measured_starts(self, now: float) -> list[Arrival]:
        first = [share.pop() for share in self._shares]
        return [self._arrival(talk, 1, now + self._pause_s(talk, 0)) for talk in first]

    def _poisson_starts(self, talks: Sequence[T], now: float, interval_s: float, seed: int) -> list[Arrival]:
        """Make the first arrivals of these conversations, `interval_s` apart on average."""
        arrivals = []
        for index, talk in enumerate(talks):
            now += exponential(interval_s, seed, "arrival", index) if index else 0.0
            arrivals.append(self._arrival(talk, 1, now))
        return arrivals


def shares_of(talks: Sequence[T], users: int) -> list[Sequence[T]]:
    """The conversations dealt out to so many users in turn."""
    return [talks[user::users] for user in range(users)]
