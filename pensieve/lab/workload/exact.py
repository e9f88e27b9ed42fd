"""Workloads of exact lengths in tokens: decoding, a prefix that changes, rounds, agents; and the text that they ask with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field

from pensieve.core.request import Hint, History, TokenArray, tokens_of
from pensieve.errors import ConfigError
from pensieve.lab.workload.base import (
    Arrival,
    Count,
    Following,
    NoneOrMore,
    NotNegative,
    Positive,
    WorkloadContext,
    shuffled,
    uniform,
)
from pensieve.lab.workload.chat import vocabulary
from pensieve.lab.workload.playback import Dialogue, Playback, Users
from pensieve.serve.record import TurnRecord
from pensieve.units import ceil_div


def prose(
    context: WorkloadContext, tokens: int, *names: object, unlike: TokenArray[int] | None = None
) -> TokenArray[int]:
    """Exactly `tokens` tokens of English words, a function of the seed and the names.

    unlike: tokens; the text begins with another one than they do, so that the two share no prefix. Text rather than
    random ids, so that an engine that takes text gets the same prompt.
    """
    assert tokens > 0
    words, found, drawn = vocabulary(), tokens_of([]), 0
    while len(found) < tokens:
        batch = [
            words[int(uniform(context.seed, *names, drawn + place) * len(words))] for place in range(tokens // 4 + 8)
        ]
        drawn += len(batch)
        encoded = context.encode((" " if found else "") + " ".join(batch))
        if not found and unlike is not None and encoded[0] == unlike[0]:
            continue  # other words
        found.extend(encoded)
    return found[:tokens]


class DecodeWorkload(Playback):
    """The same prompt `iterations` times, one request at a time (load "closed"), each in a conversation of its own. The first
    `discard` are phase "warmup", the others "throughput". Fields: conf/workload/decode.yaml.

    total_ms is arrival to last token, per_token_ms that divided by the tokens. An engine that shares prefixes between
    conversations finds the prompt again, as it would in production.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        prompt_tokens: Count = 72,
        new_tokens: Count = 50,
        iterations: Count = 30,
        discard: Count = 5,
        timeout_s: Positive | None = None,
    ) -> None:
        if discard >= iterations:
            raise ConfigError(
                f"workload.discard={discard} leaves none of workload.iterations={iterations} to measure; "
                "raise iterations, or lower discard."
            )
        prompt = prose(context, prompt_tokens, "decode")
        if len(prompt) + new_tokens > context.max_context:
            raise ConfigError(
                f"Prompt and output are {len(prompt)} + {new_tokens} tokens, and the model's context is "
                f"{context.max_context}; use a shorter prompt or a smaller workload.new_tokens."
            )
        phases = ["warmup"] * discard + ["throughput"] * (iterations - discard)
        asked = [
            Dialogue.written(f"iteration-{number}", phase, [(prompt, new_tokens, {"iteration": number})])
            for number, phase in enumerate(phases)
        ]
        super().__init__(
            context, (), asked, Users([asked]), lambda *_: 0.0,
            timeout_s=timeout_s, working_set=asked[0].longest,
        )  # fmt: skip


STREAMS = {"both": (True, False), "yes": (True,), "no": (False,)}


class PrefixInvalidationWorkload(Playback):
    """Blocks A and B and a query Q, one request at a time (load "closed").

    Each case is a conversation of its own with blocks of its own, and goes through four turns: [A, B] for one token (phase
    "warmup", its latency is warmup_ms), then [A, B, Q] (phase "hit") or [B, Q] (phase "miss") for one token, then [A, B]
    again ("rewarm"), then the same question for `new_tokens` tokens ("throughput"). `settle_s` passes between them. The
    first three are labelled "hit" or "miss" by their case, the last "throughput_hit" or "throughput_miss". A round has one
    case of every kind, in an order that the seed shuffles, so that hits and misses interleave; cases of a round are paired
    by `iteration`. `stream` may double them; it depends on the engine whether the first token then comes earlier. What is
    discarded is a warm-up from end to end. Fields: conf/workload/prefix_invalidation.yaml.

    What was warmed and occurs in a prompt counts as its history: all of A and B in a hit, B in a miss, which therefore
    shows up as recomputed. Raises ConfigError for a field that is out of range.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        blocks: Annotated[str, Field(pattern=r"^[1-9]\d*/[1-9]\d*$")] = "512/256",
        query_tokens: Count = 20,
        new_tokens: Count = 50,
        rounds: Count = 10,
        stream: Literal["both", "yes", "no"] = "both",
        settle_s: NotNegative = 0.5,
        discard: NoneOrMore = 1,
        timeout_s: Positive | None = None,
    ) -> None:
        a_tokens, b_tokens = map(int, blocks.split("/"))
        longest = a_tokens + b_tokens + query_tokens + new_tokens
        if longest > context.max_context:
            raise ConfigError(
                f"workload.blocks={blocks} with query and output makes {longest} tokens, and the model's context is "
                f"{context.max_context}; use shorter blocks."
            )

        def case(session: str, number: int, kind: str, stream: bool, discarded: bool = False) -> Dialogue:
            # B begins unlike A, so that [B, Q] has nothing in common with [A, B].
            a = prose(context, a_tokens, session, "A")
            b = prose(context, b_tokens, session, "B", unlike=a)
            known = b if kind == "miss" else a + b  # of what is asked, what was warmed
            asked = known + prose(context, query_tokens, session, "Q")

            written = []
            for prompt, reply, phase, label, history in (
                (a + b, 1, "warmup", kind, 0),
                (asked, 1, kind, kind, len(known)),
                (a + b, 1, "rewarm", kind, len(a + b)),
                (asked, new_tokens, "throughput", f"throughput_{kind}", len(known)),
            ):
                fields: dict[str, Any] = {"phase": "warmup"} if discarded else {"phase": phase, "label": label}
                fields |= {"iteration": number, "stream": stream, "history": History(history) if history else None}
                written.append((prompt, reply, fields))
            return Dialogue.written(session, "", written, whole=True)

        cases = [case(f"discarded-{index}", -1 - index, "hit", True, discarded=True) for index in range(discard)]
        kinds = list(product(STREAMS[stream], ("hit", "miss")))
        for number in range(rounds):
            for place in shuffled(len(kinds), context.seed, "order", number):
                streamed, kind = kinds[place]
                cases.append(case(f"{number}-{kind}{'' if streamed else '-whole'}", number, kind, streamed))
        super().__init__(
            context, (), cases, Users([cases]), lambda _, turn: settle_s if turn else 0.0,
            timeout_s=timeout_s, cache_state="primed", working_set=longest - 1,
        )  # fmt: skip


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
        measured = [written(f"conversation-{one}", rounds) for one in range(count)]
        super().__init__(
            context, [written("warmup", warmup_turns)], measured, Users(()), lambda *_: 0.0,
            timeout_s=timeout_s,
        )  # fmt: skip
        self._at_once = at_once
        orders = [
            shuffled(count, context.seed, "round", number) if order == "random" else range(count)
            for number in range(rounds)
        ]
        self._to_ask = [(measured[one], number) for number, places in enumerate(orders, start=1) for one in places]
        self._under_way: set[str] = set()

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        if turn.session in self._warming:
            return super().on_finished(turn)
        assert turn.finished_s is not None
        self._under_way.discard(turn.session)
        if turn.status != "completed":
            self._to_ask = [(talk, number) for talk, number in self._to_ask if talk.session != turn.session]
        return self._ask_next(turn.finished_s)

    def foresee(self, session: str, turn: int) -> Following | None:
        return None

    def out_of_work(self, turn: TurnRecord, following: Sequence[Arrival]) -> bool:
        return not following

    def _measured_starts(self, now: float) -> list[Arrival]:
        return [arrival for _ in range(self._at_once) for arrival in self._ask_next(now)]

    def _ask_next(self, now: float) -> list[Arrival]:
        """The next conversation that is not under way: one of the round before may still have no answer."""
        for place, (talk, turn) in enumerate(self._to_ask):
            if talk.session not in self._under_way:
                del self._to_ask[place]
                self._under_way.add(talk.session)
                return [self._arrival(talk, turn, now)]
        return []


ACT_SPREAD = 0.2


class AgentsWorkload(Playback):
    """N agents on one engine (load "closed"), each a conversation that goes through `steps` rounds of three stages.

    Reason sends a prompt; Act waits for the world, `act_s` seconds give or take a tenth, and asks the model nothing;
    Reflect sends only what the world answered, and its context is everything said before. The next Reason follows the
    reflection at once. Each turn carries its stage as phase and label, and as a hint the tool and its mean seconds. One
    Reason and one Reflect of as many agents, without the Act between, are the warm-up.

    cache.gpu is the memory limit, on a CPU too: contexts beyond it are evicted or recomputed, as the baseline does it. A
    turn whose own context does not fit is out of memory: it is refused, counted as oom_turns, and its agent ends.
    Fields: conf/workload/agents.yaml.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        agents: Count = 4,
        act_s: NotNegative = 10.0,
        steps: Count = 3,
        reason_tokens: Count = 192,
        reason_output: Count = 32,
        observation_tokens: Count = 64,
        reflect_output: Count = 24,
        timeout_s: Positive | None = None,
    ) -> None:
        stages = {"reason": (reason_tokens, reason_output), "reflect": (observation_tokens, reflect_output)}

        def hint(turn: int) -> Hint:
            """What an agent's harness knows: its tool and how long that takes on average; after a reflection it goes on at
            once, after the last one not at all."""
            if turn % 2:
                return Hint("tool_use", "act", expected_s=act_s)
            return Hint("end_turn") if turn == 2 * steps else Hint(expected_s=0.0)

        def written(session: str, rounds: int, warmup: bool = False) -> Dialogue:
            turns = []
            for turn, stage in enumerate(list(stages) * rounds, start=1):
                tokens, reply = stages[stage]
                own = {} if warmup else {"phase": stage, "label": stage}
                turns.append((prose(context, tokens, session, turn), reply, {"hint": hint(turn), **own}))
            return Dialogue.written(session, "warmup" if warmup else "agent", turns)

        def pause_s(agent: Dialogue, turn: int) -> float:
            spread = ACT_SPREAD * (uniform(context.seed, "act", agent.session, turn) - 0.5)
            return act_s * (1.0 + spread) if turn % 2 else 0.0

        measured = [written(f"agent-{agent}", steps) for agent in range(agents)]
        facts = {
            "longest_context_tokens": measured[0].longest,
            "longest_conversation_tokens": None,  # out of memory is something to measure here, not to refuse
        }
        warmup = [written(f"warmup-{agent}", 1, warmup=True) for agent in range(agents)]
        super().__init__(
            context, warmup, measured, Users.dealt(measured, agents), pause_s, timeout_s=timeout_s, facts=facts
        )
