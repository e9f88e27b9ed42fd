"""Users who come back at different speeds: who profits from a cache that remembers?"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from pensieve.errors import ConfigError
from pensieve.record import TurnRecord
from pensieve.workload.base import Arrival, WorkloadContext, WorkloadPlan
from pensieve.workload.chance import uniform
from pensieve.workload.fields import at_least, positive_seconds
from pensieve.workload.script import Script, ScriptWriter

INTERVALS = {"hot": 0.3, "warm": 1.0, "cold": 2.5}
"""Of each class, its request interval in multiples of `request_interval`."""


class HotnessWorkload:
    """N users at once, a third of them hot, a third warm, a third cold (load "closed").

    A user sends the next message `request_interval` x 0.3 (hot), x 1.0 (warm) or x 2.5 (cold) seconds after the reply,
    give or take half of it, fixed by (seed, session, turn). Every turn carries its class as label.

    users: the first third is hot, the next warm, the last cold; one user is hot, two are hot and warm.
    turns: turns a conversation; the same for all classes, so that their contexts are equally long.
    conversations: of each cold user, one after another. Warm and hot users have as many more as their intervals are
        shorter, so that nobody is left alone with the system while the others are done.
    max_new_tokens: a reply has the words that the text suggests, one token a word, but at most this many. free: replies
        end where the model ends them, which real weights are needed for.
    warmup_turns: at least one a user, phase "warmup", at the measured concurrency and in conversations of their own.
    timeout_s: a turn is cancelled this long after it was due; None: never.

    Raises ConfigError for a field that is out of range.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        users: int = 6,
        request_interval: float = 0.5,
        turns: int = 8,
        conversations: int = 1,
        max_new_tokens: int = 12,
        warmup_turns: int = 6,
        timeout_s: float | None = None,
        free: bool = False,
    ) -> None:
        for name, value in (("users", users), ("turns", turns), ("conversations", conversations)):
            at_least(name, value, 1, whole=True)
        at_least("max_new_tokens", max_new_tokens, 1, whole=True)
        at_least("warmup_turns", warmup_turns, 1, whole=True)
        at_least("request_interval", request_interval, 0)
        positive_seconds("timeout_s", timeout_s)
        if free and context.force_lengths:
            raise ConfigError("workload.free=true needs a trained model; with random weights leave it false.")
        self._context = context
        self._request_interval = request_interval
        self._timeout_s = timeout_s
        self._free = free
        self._writer = writer = ScriptWriter(context, max_new_tokens, free)
        self._warmup = writer.warmup(max(warmup_turns, users), users)
        self._labels = [class_of(user, users) for user in range(users)]
        self._shares: list[list[Script]] = []  # a list a user: what is left of its conversations, the next one last
        self._user_of: dict[str, int] = {}
        numbers = count()
        for user, label in enumerate(self._labels):
            share = [writer.write(next(numbers), turns, label=label) for _ in range(conversations * _share(label))]
            self._user_of.update((script.session, user) for script in share)
            self._shares.append(share[::-1])
        self._measured = [script for share in self._shares for script in share]
        self._scripts = {script.session: script for script in (*self._warmup, *self._measured)}
        self._warming = len(self._warmup)

    def describe(self) -> WorkloadPlan:
        sizes = [script.longest - 1 for script in self._measured]  # the last token of a conversation has no KV
        warmup_turns = sum(len(script.prompts) for script in self._warmup)
        seconds = {label: factor * self._request_interval for label, factor in INTERVALS.items()}
        return WorkloadPlan(
            load="closed",
            sessions=len(self._measured),
            turns=warmup_turns + sum(len(script.prompts) for script in self._measured),
            working_set_tokens=sum(sizes),
            warmup_turns=warmup_turns,
            facts={
                "users": {label: self._labels.count(label) for label in INTERVALS},
                "request_interval_s": {label: round(value, 6) for label, value in seconds.items()},
                "conversations": {label: sum(s.label == label for s in self._measured) for label in INTERVALS},
                "conversations_cut_by_context": sum(script.cut for script in self._measured),
                "longest_conversation_tokens": max(sizes),
                "replies": "free" if self._free else "forced lengths",
            },
        )

    def start(self) -> Iterable[Arrival]:
        return [self._arrival(script, 1, 0.0) for script in self._warmup]

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        script = self._scripts[turn.session]
        assert turn.finished_s is not None
        now = turn.finished_s
        warming = script.phase == "warmup"
        if turn.status == "completed" and turn.turn < len(script.prompts):
            pause_s = 0.0 if warming else self._interval(script, turn.turn)
            return [self._arrival(script, turn.turn + 1, now + pause_s, turn)]
        if warming:
            self._warming -= 1
            return self._measured_starts(now) if self._warming == 0 else []
        share = self._shares[self._user_of[script.session]]
        return [self._arrival(share.pop(), 1, now + self._interval(script, turn.turn))] if share else []

    def _measured_starts(self, now: float) -> list[Arrival]:
        first = [share.pop() for share in self._shares]
        return [self._arrival(script, 1, now + self._interval(script, 0)) for script in first]

    def _interval(self, script: Script, turn: int) -> float:
        spread = 0.5 + uniform(self._context.seed, "interval", script.session, turn)
        return self._request_interval * INTERVALS[script.label] * spread

    def _arrival(self, script: Script, turn: int, at_s: float, before: TurnRecord | None = None) -> Arrival:
        return self._writer.arrival(script, turn, at_s, self._timeout_s, before)


def class_of(user: int, users: int) -> str:
    """The class of user `user` (from 0) among `users`: thirds in the order hot, warm, cold."""
    return list(INTERVALS)[user * len(INTERVALS) // users]


def _share(label: str) -> int:
    """Conversations for each one of a cold user: the ratio of the intervals, rounded."""
    return int(INTERVALS["cold"] / INTERVALS[label] + 0.5)
