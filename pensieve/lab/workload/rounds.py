"""Conversations that return in turn, more of them than fit: what a cache keeps when everything comes back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pensieve.errors import ConfigError
from pensieve.lab.workload.base import Arrival, Count, Following, NoneOrMore, NotNegative, Positive, WorkloadContext
from pensieve.lab.workload.chance import shuffled
from pensieve.lab.workload.playback import Dialogue, Playback, Users
from pensieve.lab.workload.prose import prose
from pensieve.serve.record import TurnRecord
from pensieve.units import ceil_div


class RoundsWorkload(Playback):
    """Every conversation is asked once a round, `at_once` of them at a time; the next is asked when one is answered (load
    "closed"). Each message and each reply has the same length, so the live set is known: all conversations at their longest.

    conversations None: as many as make the live set `pressure` times both tiers (cache.gpu + cache.cpu), whoever has which.
    The strict order is the worst there is for least recently used. A conversation whose turn did not complete is asked no
    more. Fields: conf/workload/rounds.yaml. Raises ConfigError for a field that is out of range.
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
        turn = message_tokens + reply_tokens
        longest = max(system_tokens + rounds * turn, warmup_turns * turn)
        if longest > context.max_context:
            raise ConfigError(
                f"workload.rounds={rounds} of {message_tokens} + {reply_tokens} tokens, and workload.system_tokens="
                f"{system_tokens} before them, make {longest}, and the model's "
                f"context is {context.max_context}; use fewer or shorter turns."
            )
        system = prose(context, system_tokens, "system") if system_tokens else None

        def written(name: str, turns: int) -> Dialogue:
            # Now: who writes text between two turns is measured with them.
            said = [prose(context, message_tokens, name, number) for number in range(1, turns + 1)]
            if system is not None and name != "warmup":
                said[0] = system + said[0]
            return Dialogue.written(
                name, "warmup" if name == "warmup" else "chat", [(one, reply_tokens, {}) for one in said]
            )

        there = context.gpu_tokens + context.cpu_tokens
        each = system_tokens + rounds * turn - 1  # the last token has no KV
        count = conversations or max(1, ceil_div(round(pressure * there), each))
        facts = {
            "conversations": count,
            "rounds": rounds,
            "order": order,
            "live_set_over_both_tiers": round(count * each / there, 3) if there else None,
            "message_tokens": message_tokens,
            "reply_tokens": reply_tokens,
            **({"system_tokens": system_tokens} if system_tokens else {}),
            "requests_at_once": at_once,
        }
        measured = [written(f"conversation-{one}", rounds) for one in range(count)]
        super().__init__(
            context, [written("warmup", warmup_turns)], measured, Users(()), lambda *_: 0.0,
            timeout_s=timeout_s, facts=facts,
        )  # fmt: skip
        self._at_once = at_once
        orders = [
            shuffled(count, context.seed, "round", number) if order == "random" else range(count)
            for number in range(rounds)
        ]
        turns = [(measured[one], number) for number, places in enumerate(orders, start=1) for one in places]
        self._to_ask = turns[::-1]  # the next one last
        self._under_way: set[str] = set()
        self._ended: set[str] = set()

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        if turn.session in self._warming:
            return super().on_finished(turn)
        assert turn.finished_s is not None
        self._under_way.discard(turn.session)
        if turn.status != "completed":
            self._ended.add(turn.session)
        return self._ask_next(turn.finished_s)

    def foresee(self, session: str, turn: int) -> Following | None:
        return None

    def out_of_work(self, turn: TurnRecord, following: Sequence[Arrival]) -> bool:
        return not following

    def _measured_starts(self, now: float) -> list[Arrival]:
        return [arrival for _ in range(self._at_once) for arrival in self._ask_next(now)]

    def _ask_next(self, now: float) -> list[Arrival]:
        """The next conversation that is not under way: one of the round before may still have no answer."""
        for place in range(len(self._to_ask) - 1, -1, -1):
            talk, turn = self._to_ask[place]
            if talk.session not in self._ended and talk.session not in self._under_way:
                del self._to_ask[place]
                self._under_way.add(talk.session)
                return [self._arrival(talk, turn, now)]
        return []
