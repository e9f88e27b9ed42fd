"""Conversations that return in turn, more of them than fit: what a cache keeps when everything comes back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pensieve.core.request import Length, TokenArray
from pensieve.errors import ConfigError
from pensieve.lab.workload.base import (
    Arrival,
    Asking,
    Count,
    NoneOrMore,
    NotNegative,
    Positive,
    WorkloadContext,
    WorkloadPlan,
)
from pensieve.lab.workload.chance import shuffled
from pensieve.lab.workload.prose import prose
from pensieve.serve.record import TurnRecord
from pensieve.units import ceil_div


class RoundsWorkload(Asking):
    """Every conversation is asked once a round, `at_once` of them at a time; the next is asked when one is answered (load
    "closed"). Each message and each reply has the same length, so the live set is known: all conversations at their longest.

    conversations: how many; None: as many as make the live set `pressure` times both tiers (cache.gpu + cache.cpu), whoever
        has which. rounds: turns of each. order: strict (the same in every round, which is the worst there is for least
        recently used) or random (another in every round, drawn under the seed).
    message_tokens, reply_tokens: of a turn. system_tokens: of a system prompt, with which each conversation begins; the
        live set counts it for each. warmup_turns: of one conversation of its own before the first round.
    timeout_s: a turn is cancelled this long after it was due; None: never.

    A conversation whose turn did not complete is asked no more. Raises ConfigError for a field that is out of range.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        conversations: Count | None = None,
        pressure: NotNegative = 1.8,
        rounds: Count = 5,
        order: Literal["strict", "random"] = "strict",
        message_tokens: Count = 96,
        reply_tokens: Count = 16,
        system_tokens: NoneOrMore = 0,
        at_once: Count = 1,
        warmup_turns: Count = 2,
        timeout_s: Positive | None = None,
    ) -> None:
        super().__init__(context, timeout_s)
        turn = message_tokens + reply_tokens
        self._longest = max(system_tokens + rounds * turn, warmup_turns * turn)
        if self._longest > context.max_context:
            raise ConfigError(
                f"workload.rounds={rounds} of {message_tokens} + {reply_tokens} tokens, and workload.system_tokens="
                f"{system_tokens} before them, make {self._longest}, and the model's "
                f"context is {context.max_context}; use fewer or shorter turns."
            )
        each = system_tokens + rounds * turn - 1  # the last token has no KV
        there = context.gpu_tokens + context.cpu_tokens
        self._conversations = conversations or max(1, ceil_div(round(pressure * there), each))
        self._each, self._there = each, there
        self._rounds, self._order = rounds, order
        self._message, self._reply, self._at_once = message_tokens, reply_tokens, at_once
        self._warmup, self._system = warmup_turns, system_tokens
        self._waiting: list[tuple[int, int]] = []  # (round, conversation) that are still to be asked, the next one last
        self._prompts: dict[tuple[str, int], TokenArray[int]] = {}
        self._under_way: set[int] = set()
        self._ended: set[int] = set()

    def describe(self) -> WorkloadPlan:
        live = self._conversations * self._each
        return WorkloadPlan(
            load="closed",
            sessions=self._conversations,
            turns=self._warmup + self._conversations * self._rounds,
            working_set_tokens=live,
            warmup_turns=self._warmup,
            facts={
                "conversations": self._conversations,
                "rounds": self._rounds,
                "order": self._order,
                "live_set_over_both_tiers": round(live / self._there, 3) if self._there else None,
                "message_tokens": self._message,
                "reply_tokens": self._reply,
                **({"system_tokens": self._system} if self._system else {}),
                "requests_at_once": self._at_once,
                "longest_conversation_tokens": self._longest,
            },
        )

    def start(self) -> Iterable[Arrival]:
        turns = [("warmup", turn) for turn in range(1, self._warmup + 1)]
        turns += [
            (f"conversation-{one}", turn) for one in range(self._conversations) for turn in range(1, self._rounds + 1)
        ]
        # Now: who writes text between two turns is measured with them.
        self._prompts = {(name, turn): prose(self._context, self._message, name, turn) for name, turn in turns}
        if self._system:
            system = prose(self._context, self._system, "system")
            for one in range(self._conversations):
                first = f"conversation-{one}", 1
                self._prompts[first] = system + self._prompts[first]
        return [self._arrival("warmup", 1, 0.0)]

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        assert turn.finished_s is not None
        now_s = turn.finished_s
        if turn.session == "warmup":
            if turn.status == "completed" and turn.turn < self._warmup:
                return [self._arrival("warmup", turn.turn + 1, now_s)]
            self._waiting = [
                (number, conversation) for number in range(self._rounds) for conversation in self._round(number)
            ][::-1]
            return [arrival for _ in range(self._at_once) for arrival in self._next(now_s)]
        conversation = int(turn.session.removeprefix("conversation-"))
        self._under_way.discard(conversation)
        if turn.status != "completed":
            self._ended.add(conversation)
        return self._next(now_s)

    def _round(self, number: int) -> Iterable[int]:
        if self._order == "strict":
            return range(self._conversations)
        return shuffled(self._conversations, self._context.seed, "round", number)

    def _next(self, now_s: float) -> list[Arrival]:
        """The next conversation that is not under way: one of the round before may still have no answer."""
        for place in range(len(self._waiting) - 1, -1, -1):
            number, conversation = self._waiting[place]
            if conversation in self._ended:
                continue
            if conversation not in self._under_way:
                del self._waiting[place]
                self._under_way.add(conversation)
                return [self._arrival(f"conversation-{conversation}", number + 1, now_s)]
        return []

    def _arrival(self, session: str, turn: int, at_s: float) -> Arrival:
        prompt, phase = self._prompts.pop((session, turn)), "warmup" if session == "warmup" else "chat"
        return self._ask(at_s, session, turn, prompt, Length(self._reply), phase)
