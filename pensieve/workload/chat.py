"""Concurrent conversations of real English: open-loop (or N users) between conversations, closed-loop inside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pensieve.errors import ConfigError
from pensieve.record import TurnRecord
from pensieve.workload.base import Arrival, WorkloadContext, WorkloadPlan
from pensieve.workload.chance import between, exponential
from pensieve.workload.fields import at_least, positive_seconds
from pensieve.workload.script import Script, ScriptWriter

FEWEST_CONVERSATIONS = 8
WARMUP_SESSIONS = (
    2  # side by side, so that batches of more than one row are warm too (open load: nobody knows how many)
)


class ChatWorkload:
    """Several people talk to one model at once.

    A conversation's turns follow each other: the next message is sent when the reply is complete and the user has
    thought, exponentially distributed with mean `think_time_s` and fixed by (seed, session, turn), so that every
    baseline meets the same thoughts. Conversations themselves arrive in one of two ways:

    - users=None (load "partly open"): as a Poisson process, `request_interval` seconds apart on average (0: all at
      once), whatever the system's speed.
    - users=N (load "closed"): N people work through the conversations, each with a fixed share, one after another.

    conversations: how many at least (None: 8, or one a user). pressure: conversations are added until the working set,
        the KV tokens of all measured conversations at their longest, is this multiple of context.gpu_tokens; 0 adds
        none. Beyond the shipped ones they repeat under another session and with another opening sentence.
    min_turns, max_turns: turns a conversation, drawn evenly; one longer than its text goes on with the next topic. A
        conversation that the model's context cannot hold ends early, which describe() counts.
    max_new_tokens: a reply has the words that the text suggests, one token a word, but at most this many. free: replies
        end where the model ends them, which real weights are needed for.
    warmup_turns: turns before the measured ones start, phase "warmup", in conversations of their own: two side by side,
        or one a user, and then at least one turn each, so that they run at the measured concurrency.
    timeout_s: a turn is cancelled this long after it was due; None: never.

    Turns count from 1. A conversation whose turn did not complete ends there. Raises ConfigError for a field that is
    out of range.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        conversations: int | None = None,
        users: int | None = None,
        min_turns: int = 8,
        max_turns: int = 8,
        max_new_tokens: int = 36,
        request_interval: float = 0.3,
        think_time_s: float = 0.5,
        pressure: float = 2.0,
        warmup_turns: int = 4,
        timeout_s: float | None = None,
        free: bool = False,
    ) -> None:
        for name, whole in (("conversations", conversations), ("users", users)):
            if whole is not None:
                at_least(name, whole, 1, whole=True)
        at_least("min_turns", min_turns, 1, whole=True)
        at_least("max_turns", max_turns, min_turns, whole=True, than="min_turns")
        at_least("max_new_tokens", max_new_tokens, 1, whole=True)
        at_least("request_interval", request_interval, 0)
        at_least("think_time_s", think_time_s, 0)
        at_least("pressure", pressure, 0)
        at_least("warmup_turns", warmup_turns, 1, whole=True)
        positive_seconds("timeout_s", timeout_s)
        if free and context.force_lengths:
            raise ConfigError("workload.free=true needs a trained model; with random weights leave it false.")
        self._context = context
        self._users = users
        self._turns = (min_turns, max_turns)
        self._request_interval = request_interval
        self._think_time_s = think_time_s
        self._timeout_s = timeout_s
        self._free = free
        self._writer = ScriptWriter(context, max_new_tokens, free)

        self._warmup = self._writer.warmup(
            warmup_turns if users is None else max(warmup_turns, users), users or WARMUP_SESSIONS
        )
        self._measured = self._measured_scripts(max(conversations or FEWEST_CONVERSATIONS, users or 1), pressure)
        self._scripts = {script.session: script for script in (*self._warmup, *self._measured)}
        self._warming = len(self._warmup)
        self._share_of: dict[str, list[Script]] = {}  # what is left of its user's conversations, the next one last

    def describe(self) -> WorkloadPlan:
        sizes = [script.longest - 1 for script in self._measured]  # the last token of a conversation has no KV
        warmup_turns = sum(len(script.prompts) for script in self._warmup)
        topics = {script.session.partition(".")[0] for script in self._measured}
        facts: dict[str, Any] = {
            "conversations": len(self._measured),
            "topics": len(topics),
            "conversations_cut_by_context": sum(script.cut for script in self._measured),
            "longest_conversation_tokens": max(sizes),
            "message_tokens_mean": _mean([len(prompt) for script in self._measured for prompt in script.prompts]),
            "reply_tokens_mean": _mean([reply for script in self._measured for reply in script.replies]),
            "replies": "free" if self._free else "forced lengths",
        }
        return WorkloadPlan(
            load="partly open" if self._users is None else "closed",
            sessions=len(self._measured),
            turns=warmup_turns + sum(len(script.prompts) for script in self._measured),
            working_set_tokens=sum(sizes),
            warmup_turns=warmup_turns,
            facts=facts,
        )

    def start(self) -> Iterable[Arrival]:
        return [self._arrival(script, 1, 0.0) for script in self._warmup]

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        script = self._scripts[turn.session]
        assert turn.finished_s is not None
        now = turn.finished_s
        if turn.status == "completed" and turn.turn < len(script.prompts):
            warming = script.phase == "warmup"
            pause_s = 0.0 if warming else self._think(script, turn.turn)
            return [self._arrival(script, turn.turn + 1, now + pause_s, turn)]
        if script.phase == "warmup":
            self._warming -= 1
            return self._measured_starts(now) if self._warming == 0 else []
        return self._next_of_user(script, turn.turn, now)

    def _measured_starts(self, now: float) -> list[Arrival]:
        if self._users is None:
            arrivals = []
            for index, script in enumerate(self._measured):
                now += exponential(self._request_interval, self._context.seed, "arrival", index) if index else 0.0
                arrivals.append(self._arrival(script, 1, now))
            return arrivals
        for user in range(self._users):
            share = self._measured[user :: self._users][::-1]
            self._share_of.update((script.session, share) for script in share)
        first = self._measured[: self._users]
        for script in first:
            self._share_of[script.session].pop()
        return [self._arrival(script, 1, now + self._think(script, 0)) for script in first]

    def _next_of_user(self, script: Script, turn: int, now: float) -> list[Arrival]:
        if self._users is None:
            return []
        share = self._share_of[script.session]
        return [self._arrival(share.pop(), 1, now + self._think(script, turn))] if share else []

    def _think(self, script: Script, turn: int) -> float:
        return exponential(self._think_time_s, self._context.seed, "think", script.session, turn)

    def _arrival(self, script: Script, turn: int, at_s: float, before: TurnRecord | None = None) -> Arrival:
        return self._writer.arrival(script, turn, at_s, self._timeout_s, before)

    def _measured_scripts(self, fewest: int, pressure: float) -> list[Script]:
        goal = pressure * self._context.gpu_tokens
        scripts: list[Script] = []
        tokens = 0
        while len(scripts) < fewest or tokens < goal:
            number = len(scripts)
            turns = between(*self._turns, self._context.seed, "turns", self._writer.session(number))
            scripts.append(self._writer.write(number, turns))
            tokens += scripts[-1].longest - 1
        return scripts


def _mean(values: list[int]) -> float:
    return round(sum(values) / len(values), 1)
