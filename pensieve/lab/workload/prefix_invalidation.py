"""A prefix that changes: what a hit saves, and what a miss costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pensieve.core.request import History, Length
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

Stream = Literal["both", "yes", "no"]


@dataclass(frozen=True, slots=True)
class _Case:
    """One conversation, which goes through the four steps. round: cases of one round differ in kind and stream only."""

    session: str
    round: int
    kind: str
    stream: bool
    warmup_only: bool = False


class PrefixInvalidationWorkload(Asking):
    """Blocks A and B and a query Q, one request at a time (load "closed").

    Each case is a conversation of its own with blocks of its own, and goes through four turns: [A, B] for one token (phase
    "warmup", its latency is warmup_ms), then [A, B, Q] (phase "hit") or [B, Q] (phase "miss") for one token, then [A, B]
    again ("rewarm"), then the same question for `new_tokens` tokens ("throughput"). `settle_s` passes between them. The
    first three are labelled "hit" or "miss" by their case, the last "throughput_hit" or "throughput_miss". A round has one
    case of every kind, in an order that the seed shuffles, so that hits and misses interleave; cases of a round are paired
    by `iteration`.

    blocks: lengths of A and B, "512/256". query_tokens: of Q. rounds: how many.
    stream: yes, no, or both, which doubles the cases of a round and gives stream_overhead_ms; it depends on
        the engine whether the first token then comes earlier.
    discard: rounds of one case before the first, all of them of phase "warmup", since what runs first is slow.
    timeout_s: a turn is cancelled this long after it was due; None: never.

    What was warmed and occurs in a prompt counts as its history: all of A and B in a hit, B in a miss, which therefore
    shows up as recomputed. Raises ConfigError for a field that is out of range.
    """

    def __init__(
        self,
        context: WorkloadContext,
        *,
        blocks: str = "512/256",
        query_tokens: Count = 20,
        new_tokens: Count = 50,
        rounds: Count = 10,
        stream: Stream = "both",
        settle_s: NotNegative = 0.5,
        discard: NoneOrMore = 1,
        timeout_s: Positive | None = None,
    ) -> None:
        self._a_tokens, self._b_tokens = _lengths(blocks)
        longest = self._a_tokens + self._b_tokens + query_tokens + new_tokens
        if longest > context.max_context:
            raise ConfigError(
                f"workload.blocks={blocks} with query and output makes {longest} tokens, and the model's context is "
                f"{context.max_context}; use shorter blocks."
            )
        super().__init__(context, timeout_s)
        self._query_tokens, self._new_tokens = query_tokens, new_tokens
        self._settle_s, self._stream = settle_s, stream
        self._cases = [
            *(_Case(f"discarded-{index}", -1 - index, "hit", True, warmup_only=True) for index in range(discard)),
            *(case for number in range(rounds) for case in self._round(number)),
        ]
        self._place = {case.session: place for place, case in enumerate(self._cases)}

    def describe(self) -> WorkloadPlan:
        whole = self._a_tokens + self._b_tokens + self._query_tokens + self._new_tokens - 1
        measured = [case for case in self._cases if not case.warmup_only]
        return WorkloadPlan(
            load="closed",
            sessions=len(measured),
            turns=4 * len(self._cases),
            working_set_tokens=whole,  # one conversation at a time; finished ones are never asked again
            warmup_turns=4 * (len(self._cases) - len(measured)) + 2 * len(measured),
            cache_state="primed",
            facts={
                "blocks": f"{self._a_tokens}/{self._b_tokens}",
                "query_tokens": self._query_tokens,
                "new_tokens": self._new_tokens,
                "hits": sum(case.kind == "hit" for case in measured),
                "misses": sum(case.kind == "miss" for case in measured),
                "streaming": self._stream,
                "settle_s": self._settle_s,
                "n_ctx": self._context.max_context,
                "requests_at_once": 1,
                "longest_conversation_tokens": whole,
            },
        )

    def start(self) -> Iterable[Arrival]:
        return [self._arrival(self._cases[0], 1, 0.0)]

    def on_finished(self, turn: TurnRecord) -> Iterable[Arrival]:
        assert turn.finished_s is not None
        place, due = self._place[turn.session], turn.finished_s + self._settle_s
        if turn.status == "completed" and turn.turn < 4:
            return [self._arrival(self._cases[place], turn.turn + 1, due)]
        return [self._arrival(self._cases[place + 1], 1, due)] if place + 1 < len(self._cases) else []

    def _round(self, number: int) -> list[_Case]:
        streams = {"both": (True, False), "yes": (True,), "no": (False,)}[self._stream]
        cases = [
            _Case(f"{number}-{kind}{'' if stream else '-whole'}", number, kind, stream)
            for stream in streams
            for kind in ("hit", "miss")
        ]
        return [cases[place] for place in shuffled(len(cases), self._context.seed, "order", number)]

    def _arrival(self, case: _Case, turn: int, at_s: float) -> Arrival:
        # B begins unlike A, so that [B, Q] has nothing in common with [A, B].
        a = prose(self._context, self._a_tokens, case.session, "A")
        b = prose(self._context, self._b_tokens, case.session, "B", unlike=a)
        known = b if case.kind == "miss" else a + b  # of what is asked, what was warmed
        asks, last = turn in (2, 4), turn == 4
        prompt = known + prose(self._context, self._query_tokens, case.session, "Q") if asks else a + b
        phase = ("warmup", case.kind, "rewarm", "throughput")[turn - 1]
        label = f"throughput_{case.kind}" if last else case.kind
        return self._ask(
            at_s,
            case.session,
            turn,
            prompt,
            Length(self._new_tokens if last else 1),
            "warmup" if case.warmup_only else phase,
            continues=False,
            label="" if case.warmup_only else label,
            iteration=case.round,
            stream=case.stream,
            history=None if turn == 1 else History(len(known) if asks else len(a) + len(b)),
        )


def _lengths(blocks: str) -> tuple[int, int]:
    parts = blocks.split("/")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f'workload.blocks={blocks!r} is not two lengths in tokens; write "512/256".')
    return int(parts[0]), int(parts[1])
