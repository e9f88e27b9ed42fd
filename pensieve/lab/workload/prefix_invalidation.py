"""A prefix that changes: what a hit saves, and what a miss costs."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

from pensieve.core.request import History
from pensieve.errors import ConfigError
from pensieve.lab.workload.base import Count, NoneOrMore, NotNegative, Positive, WorkloadContext
from pensieve.lab.workload.chance import shuffled
from pensieve.lab.workload.playback import Dialogue, Playback, Users
from pensieve.lab.workload.prose import prose

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
        blocks: str = "512/256",
        query_tokens: Count = 20,
        new_tokens: Count = 50,
        rounds: Count = 10,
        stream: Literal["both", "yes", "no"] = "both",
        settle_s: NotNegative = 0.5,
        discard: NoneOrMore = 1,
        timeout_s: Positive | None = None,
    ) -> None:
        a_tokens, b_tokens = _lengths(blocks)
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

            turns = [
                (a + b, 1, "warmup", kind, 0),
                (asked, 1, kind, kind, len(known)),
                (a + b, 1, "rewarm", kind, len(a + b)),
                (asked, new_tokens, "throughput", f"throughput_{kind}", len(known)),
            ]

            def fields(phase: str, label: str, history: int) -> dict[str, Any]:
                shown = {"phase": "warmup"} if discarded else {"phase": phase, "label": label}
                return {
                    **shown,
                    "iteration": number,
                    "stream": stream,
                    "history": History(history) if history else None,
                }

            written = [(prompt, reply, fields(phase, label, history)) for prompt, reply, phase, label, history in turns]
            return Dialogue.written(session, "", written, whole=True)

        cases = [case(f"discarded-{index}", -1 - index, "hit", True, discarded=True) for index in range(discard)]
        kinds = list(product(STREAMS[stream], ("hit", "miss")))
        for number in range(rounds):
            for place in shuffled(len(kinds), context.seed, "order", number):
                streamed, kind = kinds[place]
                cases.append(case(f"{number}-{kind}{'' if streamed else '-whole'}", number, kind, streamed))
        facts = {
            "blocks": f"{a_tokens}/{b_tokens}",
            "query_tokens": query_tokens,
            "new_tokens": new_tokens,
            "streaming": stream,
            "settle_s": settle_s,
            "n_ctx": context.max_context,
            "requests_at_once": 1,
        }
        super().__init__(
            context, (), cases, Users([cases]), lambda _, turn: settle_s if turn else 0.0,
            timeout_s=timeout_s, facts=facts, cache_state="primed", working_set=longest - 1,
        )  # fmt: skip


def _lengths(blocks: str) -> tuple[int, int]:
    parts = blocks.split("/")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f'workload.blocks={blocks!r} is not two lengths in tokens; write "512/256".')
    return int(parts[0]), int(parts[1])
