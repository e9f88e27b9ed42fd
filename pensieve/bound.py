"""The offline bound of a trial: the hit rate that no eviction policy could have exceeded with its capacity.

What is bounded: whoever had known the realised accesses in advance, could have kept or dropped each single token of KV at
no cost, and had both tiers wholly for idle conversations. A real policy decides by chunks, and shares the tiers with the
requests that run; so the bound can be out of reach, and is never beaten.

A token of a turn's history that no other conversation has had hits only if it was kept from the end of the conversation's
turn before to the admission of this one: nothing computes it in between. Which of these intervals to keep is the question of
how to pack most of them under the capacity, and Belady's answer is the best one: whenever too much is kept, give up what is
needed last (Belady 1966; with bypass, since what would be given up at once need not be kept at all). Where conversations
share blocks, a token that another one has had may be found in its blocks at any moment: it counts as a hit that takes no
room. The same holds for what was said before and is no history (a turn that was undone), in the bound of whole prompts.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pensieve.metrics import Metric
from pensieve.record import TurnRecord
from pensieve.request import is_measured


@dataclass(frozen=True, slots=True)
class Idle:
    """`tokens` of a conversation, of use again at `end_s` if kept from `start_s` on."""

    start_s: float
    end_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Bound:
    """Tokens of the measured turns: the most that could have hit of their history, and of their prompts."""

    hit_tokens: int
    prompt_hit_tokens: int
    history_tokens: int
    prompt_tokens: int


def offline_bound(turns: Iterable[TurnRecord], capacity_tokens: int) -> Bound | None:
    """The bound for both tiers together, `capacity_tokens` in all.

    None where nobody knows what a prompt could be found in: a system that does not say whether its conversations share.
    """
    conversations: dict[str, list[TurnRecord]] = defaultdict(list)
    for turn in turns:
        if turn.history_tokens is None:
            continue  # never admitted
        if turn.admitted_s is None or turn.elsewhere_tokens is None or turn.anywhere_tokens is None:
            return None
        conversations[turn.session].append(turn)
    idle: list[Idle] = []
    free = beyond = history = prompts = 0
    for members in conversations.values():
        members.sort(key=lambda turn: turn.admitted_s or 0.0)
        known, since_s = 0, 0.0
        for turn in members:
            assert turn.history_tokens is not None and turn.admitted_s is not None and turn.prompt_tokens is not None
            assert turn.elsewhere_tokens is not None and turn.anywhere_tokens is not None
            if is_measured(turn.phase):
                history += turn.history_tokens
                prompts += turn.prompt_tokens
                shared = min(turn.elsewhere_tokens, turn.history_tokens)
                free += shared
                beyond += max(0, turn.anywhere_tokens - turn.history_tokens)
                own = min(turn.history_tokens, known) - shared
                if own > 0:
                    idle.append(Idle(min(since_s, turn.admitted_s), turn.admitted_s, own))
            known = max(known, turn.prompt_tokens + turn.output_tokens)
            since_s = turn.admitted_s if turn.finished_s is None else turn.finished_s
    hits = free + most_kept(idle, capacity_tokens)
    return Bound(hits, hits + beyond, history, prompts)


def most_kept(idle: Sequence[Idle], capacity_tokens: int) -> int:
    """The most tokens that can be kept to their ends with at most `capacity_tokens` of them at any time."""
    kept: list[int] = [0] * len(idle)
    ending: list[tuple[float, int]] = []  # of what is kept: the next end first
    latest: list[tuple[float, int]] = []  # the last end first
    used = hits = 0
    for index in sorted(range(len(idle)), key=lambda i: idle[i].start_s):
        now_s = idle[index].start_s
        if idle[index].end_s <= now_s:  # no time to keep it for
            hits += idle[index].tokens
            continue
        while ending and ending[0][0] <= now_s:
            done = heapq.heappop(ending)[1]
            hits += kept[done]
            used -= kept[done]
            kept[done] = 0
        kept[index] = idle[index].tokens
        used += kept[index]
        heapq.heappush(ending, (idle[index].end_s, index))
        heapq.heappush(latest, (-idle[index].end_s, index))
        while used > capacity_tokens:
            last = latest[0][1]
            given_up = min(kept[last], used - capacity_tokens)
            kept[last] -= given_up
            used -= given_up
            if not kept[last]:  # wholly given up, or ended before
                heapq.heappop(latest)
    return hits + sum(kept)


def bound_metrics(turns: Iterable[TurnRecord], capacity_tokens: int) -> list[Metric]:
    """bound_hit_rate and bound_prompt_hit_rate of the turns whose rates they bound; no value where there is no bound."""
    bound = offline_bound(turns, capacity_tokens)
    if bound is None:
        return [Metric(name, None, "share") for name in ("bound_hit_rate", "bound_prompt_hit_rate")]
    return [
        Metric(name, hits / whole if whole else None, "share", n=whole, n_unit="tokens")
        for name, hits, whole in (
            ("bound_hit_rate", bound.hit_tokens, bound.history_tokens),
            ("bound_prompt_hit_rate", bound.prompt_hit_tokens, bound.prompt_tokens),
        )
    ]
