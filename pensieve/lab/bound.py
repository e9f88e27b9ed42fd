"""The offline bound of a trial: what no cache manager and no eviction policy could have done better with its capacity.

Direction. The bound of the hit tokens is an upper one and that of the seconds of recomputation a lower one, for every
manager, whatever its tiers and its policy: never more hits, never fewer seconds. A policy that knows the future
(core/policies/belady.py) is not it, since a policy decides by whole chunks, shares its tiers with the requests that run, and
copies between them.

What is bounded is a relaxation of what managers do. Whoever had known the realised accesses in advance could have kept or
dropped each single token of KV at no cost, in one tier as large as all of them together, and wholly for idle conversations.
A real manager can do none of this, and nothing that this could not.

Hit tokens. A token of a turn's history that no other conversation has had hits only if it was kept from the end of the
conversation's turn before to the admission of this one: nothing computes it in between. Which of these intervals to keep is
the question of how to pack most of them under the capacity, and Belady's answer is the best one: whenever too much is kept,
give up what is needed last (Belady 1966; with bypass, since what would be given up at once need not be kept at all). Where
conversations share blocks, or one begins with the KV of another, a token that another one has had may be found in its
blocks at any moment: it counts as a hit that takes no room. That keeps the bound of prefix_cache and llama_slots true and
makes it loose. The same holds for what was said before and is no history (a turn that was undone), in the bound of whole
prompts.

Seconds. A token saves what its position takes to compute, and positions differ. The most that can be kept by worth is a
minimum-cost flow; this is a relaxation of it in n log n. A token worth w is worth 1 at each level of worth below w, so no
choice saves more than the sum, over the levels, of the most tokens worth more than the level that can be kept. Worths are
rounded up to LEVELS steps, which only adds to what could be saved. Where all positions cost the same it is exact.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from pensieve.core.request import TokenArray
from pensieve.lab.metrics import MetricValue
from pensieve.serve.books.books import PositionPrices
from pensieve.serve.record import TurnRecord, is_measured

LEVELS = 16
_WIDTH = 9


class Prices(PositionPrices):
    """What positions take, and the levels of worth that the relaxation counts in."""

    def levels(self, longest: int) -> list[tuple[int, float]]:
        """(position, seconds): from this position on each token is worth so much more. Summed, never less than the price of a
        position below `longest`."""
        self._price(longest)
        roofs = list(
            accumulate(self._chunks[: -(-longest // self._size)], max)
        )  # so that a level is a suffix of positions
        if not roofs:
            return []
        low, high = roofs[0], roofs[-1]
        found: list[tuple[int, float]] = []
        start, charged = 0, 0.0
        for level in range(1, LEVELS + 1):
            stop = len(roofs) if level == LEVELS else bisect_right(roofs, low + (high - low) * level / LEVELS)
            if stop > start:
                found.append((start * self._size, (roofs[stop - 1] - charged) / self._size))
                start, charged = stop, roofs[stop - 1]
        return found


@dataclass(frozen=True, slots=True)
class Idle:
    """`tokens` of a conversation from position `first` on, of use again at `end_s` if kept from `start_s` on."""

    start_s: float
    end_s: float
    tokens: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Bound:
    """Of the measured turns: the most tokens that could have hit of their history, and of their prompts; the least seconds of
    recomputation of their history, and what all of it takes. Seconds are None where nothing prices a position."""

    hit_tokens: int
    prompt_hit_tokens: int
    history_tokens: int
    prompt_tokens: int
    recompute_s: float | None = None
    history_s: float | None = None


@dataclass(slots=True)
class _Uses:
    """What the measured turns could have used. found: leading tokens of each one's history that take no room. beyond: tokens
    of prompts that are no history. histories: the length of each."""

    idle: list[Idle] = field(default_factory=list)
    found: TokenArray[int] = field(default_factory=lambda: array("q"))
    beyond: int = 0
    histories: TokenArray[int] = field(default_factory=lambda: array("q"))
    prompt_tokens: int = 0


def offline_bound(turns: Iterable[TurnRecord], capacity_tokens: int, prices: Prices | None = None) -> Bound | None:
    """The bound for all tiers together, `capacity_tokens` in all.

    None where nobody knows what a prompt could be found in: a system that does not say whether its conversations share.
    """
    uses = _uses_of(turns)
    if uses is None:
        return None
    uses.idle.sort(key=lambda one: one.start_s)
    hits = sum(uses.found) + most_kept(uses.idle, [one.tokens for one in uses.idle], capacity_tokens)
    recompute_s = history_s = None
    if prices is not None:
        history_s = sum(prices.seconds(0, length) for length in uses.histories)
        free_s = sum(prices.seconds(0, length) for length in uses.found)
        recompute_s = max(0.0, history_s - free_s - most_saved(uses.idle, capacity_tokens, prices))
    return Bound(hits, hits + uses.beyond, sum(uses.histories), uses.prompt_tokens, recompute_s, history_s)


def _uses_of(turns: Iterable[TurnRecord]) -> _Uses | None:
    numbers: dict[str, int] = {}
    rows = array("d")  # _WIDTH numbers a turn, whole ones among them, which floats hold exactly
    for turn in turns:
        if turn.history_tokens is None:
            continue  # never admitted
        if turn.admitted_s is None or turn.elsewhere_tokens is None or turn.anywhere_tokens is None:
            return None
        assert turn.prompt_tokens is not None
        rows.extend(
            (
                numbers.setdefault(turn.session, len(numbers)),
                turn.admitted_s,
                turn.admitted_s if turn.finished_s is None else turn.finished_s,
                turn.history_tokens,
                min(turn.elsewhere_tokens, turn.history_tokens),
                turn.anywhere_tokens,
                turn.prompt_tokens,
                turn.output_tokens,
                is_measured(turn.phase),
            )
        )
    table = np.frombuffer(rows).reshape(-1, _WIDTH)
    uses = _Uses()
    conversation, known, since_s = None, 0, 0.0
    for row in np.lexsort(
        (table[:, 1], table[:, 0])
    ):  # by conversation and admission, as they came where both are equal
        number, admitted_s, finished_s, *counts, measured = table[row].tolist()
        history, shared, anywhere, prompt, output = map(int, counts)
        if number != conversation:
            conversation, known, since_s = number, 0, 0.0
        if measured:
            uses.histories.append(history)
            uses.found.append(shared)
            uses.prompt_tokens += prompt
            uses.beyond += max(0, anywhere - history)
            own = min(history, known) - shared
            if own > 0:
                uses.idle.append(Idle(min(since_s, admitted_s), admitted_s, own, shared))
        known = max(known, prompt + output)
        since_s = finished_s
    return uses


def most_saved(idle: Sequence[Idle], capacity_tokens: int, prices: Prices) -> float:
    """Seconds that no choice of what to keep saves more of. idle: in order of start_s."""
    seconds = 0.0
    longest = max((one.first + one.tokens for one in idle), default=0)
    for first, step_s in prices.levels(longest):
        above = [one for one in idle if one.first + one.tokens > first] if first else idle
        tokens = [min(one.tokens, one.first + one.tokens - first) for one in above]
        seconds += step_s * most_kept(above, tokens, capacity_tokens)
    return min(seconds, sum(prices.seconds(one.first, one.first + one.tokens) for one in idle))


def most_kept(intervals: Sequence[Idle], tokens: Sequence[int], capacity_tokens: int) -> int:
    """The most tokens that can be kept to their ends with at most `capacity_tokens` of them at any time. intervals: in order
    of their start. tokens: of each."""
    kept: list[int] = [0] * len(intervals)
    ending: list[tuple[float, int]] = []  # of what is kept: the next end first
    latest: list[tuple[float, int]] = []  # the last end first
    used = hits = 0
    for index, one in enumerate(intervals):
        now_s, end_s, wanted = one.start_s, one.end_s, tokens[index]
        if end_s <= now_s:  # no time to keep it for
            hits += wanted
            continue
        while ending and ending[0][0] <= now_s:
            done = heapq.heappop(ending)[1]
            hits += kept[done]
            used -= kept[done]
            kept[done] = 0
        kept[index] = wanted
        used += wanted
        heapq.heappush(ending, (end_s, index))
        heapq.heappush(latest, (-end_s, index))
        while used > capacity_tokens:
            last = latest[0][1]
            given_up = min(kept[last], used - capacity_tokens)
            kept[last] -= given_up
            used -= given_up
            if not kept[last]:  # wholly given up, or ended before
                heapq.heappop(latest)
    return hits + sum(kept)


def bound_metrics(turns: Iterable[TurnRecord], capacity_tokens: int, prices: Prices | None = None) -> list[MetricValue]:
    """bound_hit_rate and bound_prompt_hit_rate of the turns whose rates they bound, and bound_recomputed_s; no value where
    there is no bound."""
    bound = offline_bound(turns, capacity_tokens, prices)
    if bound is None:
        return [MetricValue(name, None) for name in ("bound_hit_rate", "bound_prompt_hit_rate", "bound_recomputed_s")]
    return [
        *(
            MetricValue(name, hits / whole if whole else None, n=whole, n_unit="tokens")
            for name, hits, whole in (
                ("bound_hit_rate", bound.hit_tokens, bound.history_tokens),
                ("bound_prompt_hit_rate", bound.prompt_hit_tokens, bound.prompt_tokens),
            )
        ),
        MetricValue("bound_recomputed_s", bound.recompute_s, n=bound.history_tokens, n_unit="tokens"),
    ]
