"""Concurrent conversations of real English: open-loop (or N users) between conversations, closed-loop inside them."""

from __future__ import annotations

import math
from typing import Any, Literal

from pensieve.lab.workload.base import Arrival, WorkloadContext, WorkloadPlan
from pensieve.lab.workload.chance import between, exponential
from pensieve.lab.workload.fields import Count, NotNegative, Positive, in_order, refuse_untrained, within_memory
from pensieve.lab.workload.script import Script, ScriptWriter
from pensieve.lab.workload.talk import Talks, shares_of
from pensieve.serve.record import TurnRecord

FEWEST_CONVERSATIONS = 8
LONGEST_THOUGHT = 2.5
"""Means before the cut, with think_time_cap_s="auto": a trial ends with its longest pauses, and the machine idle."""
FILL = 1.2  # working set over both tiers, with pressure="auto": a sixth has to be dropped and recomputed
WARMUP_SESSIONS = (
    2  # side by side, so that batches of more than one row are warm too (open load: nobody knows how many)
)


class ChatWorkload(Talks[Script]):
    """Several people talk to one model at once.

    A conversation's turns follow each other: the next message is sent when the reply is complete and the user has
    thought, exponentially distributed with mean `think_time_s`, cut at `think_time_cap_s` and fixed by (seed, session,
    turn), so that every baseline meets the same thoughts. Conversations themselves arrive in one of two ways:

    - users=None (load "partly open"): as a Poisson process, `request_interval` seconds apart on average (0: all at
      once), whatever the system's speed.
    - users=N (load "closed"): N people work through the conversations, each with a fixed share, one after another.

    conversations: how many at least (None: 8, or one a user). pressure: conversations are added until the working set,
        the KV tokens of all measured conversations at their longest, is this multiple of context.gpu_tokens; 0 adds
        none; "auto": until it is FILL times what both tiers hold together, so that every tier is at work. Beyond the
        shipped ones they repeat under another session and with another opening sentence.
    turns_per_s: the offered load that think_time_s="auto" and request_interval="auto" follow: users (open load:
        conversations) / turns_per_s of think time, and one conversation every 1 / turns_per_s, so that all of them are
        alive at once. A system that answers late receives less.
    think_time_cap_s: nobody thinks longer; None: no limit; "auto": LONGEST_THOUGHT times the mean before the cut, which
        cuts 8 thoughts in 100; the draws are so much longer that their mean after it is think_time_s. A cap in seconds
        leaves the draws as they are.
    min_turns, max_turns: turns a conversation, drawn evenly; one longer than its text goes on with the next topic. A
        conversation that the model's context cannot hold ends early, which describe() counts.
    max_new_tokens: a reply has the words that the text suggests, one token a word, but at most this many. free: replies
        end where the model ends them, which real weights are needed for.
    warmup_turns: turns before the measured ones start, phase "warmup", in conversations of their own: two side by side,
        or one a user, and then at least one turn each, so that they run at the measured concurrency.
    timeout_s: a turn is cancelled this long after it was due; None: never.

    Turns count from 1. A conversation whose turn did not complete ends there.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        conversations: Count | None = None,
        users: Count | None = None,
        min_turns: Count = 8,
        max_turns: Count = 8,
        max_new_tokens: Count = 36,
        request_interval: NotNegative | Literal["auto"] = 0.3,
        think_time_s: NotNegative | Literal["auto"] = 0.5,
        think_time_cap_s: Positive | Literal["auto"] | None = None,
        turns_per_s: Positive = 10.0,
        pressure: NotNegative | Literal["auto"] = 2.0,
        warmup_turns: Count = 4,
        timeout_s: Positive | None = None,
        free: bool = False,
    ) -> None:
        in_order("min_turns", min_turns, "max_turns", max_turns)
        refuse_untrained(free, context)
        self._context = context
        self._users = users
        self._turns = (min_turns, max_turns)
        self._timeout_s = timeout_s
        self._free = free
        self._writer = ScriptWriter(context, max_new_tokens, free)
        both_tiers = context.gpu_tokens + context.cpu_tokens
        goal = FILL * both_tiers if pressure == "auto" else pressure * context.gpu_tokens
        fewest = max(conversations or FEWEST_CONVERSATIONS, users or 1)
        first = self._measured_scripts(1, 0)[0]
        for field, count in (
            ("users" if fewest == users else "conversations", fewest),
            ("pressure", goal / first.longest),
        ):
            within_memory(field, count, first.turns, first.longest, context.memory_bytes)
        measured = self._measured_scripts(fewest, goal)
        warmup = self._writer.warmup(max(warmup_turns, users or 1), users or WARMUP_SESSIONS)
        at_once = users or len(measured)
        self._think_time_s = at_once / turns_per_s if think_time_s == "auto" else think_time_s
        self._drawn_mean_s = self._think_time_s
        if think_time_cap_s == "auto":  # longer draws, so that their mean is think_time_s when they are cut
            self._drawn_mean_s /= 1 - math.exp(-LONGEST_THOUGHT)
        longest = LONGEST_THOUGHT * self._drawn_mean_s if think_time_cap_s == "auto" else think_time_cap_s
        self._think_time_cap_s = math.inf if longest is None else longest
        self._request_interval = 1 / turns_per_s if request_interval == "auto" else request_interval
        super().__init__(warmup, measured, shares_of(measured, users) if users else [])

    def describe(self) -> WorkloadPlan:
        facts: dict[str, Any] = {
            "conversations": len(self._measured),
            "topics": len({script.session.partition(".")[0] for script in self._measured}),
            "conversations_cut_by_context": sum(script.cut for script in self._measured),
            "message_tokens_mean": _mean([len(prompt) for script in self._measured for prompt in script.prompts]),
            "reply_tokens_mean": _mean([reply for script in self._measured for reply in script.replies]),
            "think_time_s": round(self._think_time_s, 6),
        }
        if self._think_time_cap_s < math.inf:
            facts["think_time_cap_s"] = round(self._think_time_cap_s, 6)
        if self._users is None:
            facts["request_interval_s"] = round(self._request_interval, 6)
        return self._plan("partly open" if self._users is None else "closed", self._free, facts)

    def _measured_starts(self, now: float) -> list[Arrival]:
        if self._users is None:
            return self._poisson_starts(self._measured, now, self._request_interval, self._context.seed)
        return super()._measured_starts(now)

    def _pause_s(self, script: Script, turn: int) -> float:
        thought_s = exponential(self._drawn_mean_s, self._context.seed, "think", script.session, turn)
        return min(thought_s, self._think_time_cap_s)

    def _arrival(self, script: Script, turn: int, at_s: float, before: TurnRecord | None = None) -> Arrival:
        return self._writer.arrival(script, turn, at_s, self._timeout_s, before)

    def _measured_scripts(self, fewest: int, goal: float) -> list[Script]:
        """Write at least `fewest` conversations, and as many as have `goal` tokens together."""
        scripts: list[Script] = []
        tokens = 0
        while len(scripts) < fewest or tokens < goal:
            number = len(scripts)
            turns = between(*self._turns, self._context.seed, "turns", self._writer.session(number))
            scripts.append(self._writer.write(number, turns))
            tokens += scripts[-1].longest
        return scripts


def _mean(values: list[int]) -> float:
    return round(sum(values) / len(values), 1)
