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
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike

from pensieve.lab.metrics import MetricValue
from pensieve.lab.statistics import numbered
from pensieve.lab.turns import Floats, Mask, Places, Turns
from pensieve.serve.books.books import PositionPrices
from pensieve.serve.record import is_measured

LEVELS = 16


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
    """Arrays [intervals], in order of start_s: `tokens` of a conversation from position `first` on, of use again at `end_s`
    if kept from `start_s` on."""

    start_s: Floats
    end_s: Floats
    tokens: Places
    first: Places

    @classmethod
    def of(cls, rows: ArrayLike) -> Idle:
        """From rows of these four, in any order."""
        table = np.asarray(rows, np.float64).reshape(-1, 4)
        start_s, end_s, *counts = table[np.argsort(table[:, 0], kind="stable")].T
        return cls(start_s, end_s, *(column.astype(np.int64) for column in counts))

    @property
    def ends(self) -> Places:
        """The positions behind the last ones."""
        return self.first + self.tokens

    def where(self, wanted: Mask) -> Idle:
        return Idle(self.start_s[wanted], self.end_s[wanted], self.tokens[wanted], self.first[wanted])


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


def offline_bound(turns: Turns, capacity_tokens: int, prices: Prices | None = None) -> Bound | None:
    """The bound for all tiers together, `capacity_tokens` in all.

    None where nobody knows what a prompt could be found in: a system that does not say whether its conversations share.
    """
    admitted = turns.where(~np.isnan(turns["history_tokens"]))
    admitted_s = admitted["admitted_s"]
    if np.isnan(admitted_s + admitted["elsewhere_tokens"] + admitted["anywhere_tokens"]).any():
        return None
    conversations = numbered(admitted.codes("session"))
    order = np.lexsort((admitted_s, conversations))  # as they came where both are equal
    conversations, admitted_s = conversations[order], admitted_s[order]
    history, anywhere, prompts = (
        admitted[name][order].astype(np.int64) for name in ("history_tokens", "anywhere_tokens", "prompt_tokens")
    )
    found = np.minimum(admitted["elsewhere_tokens"][order].astype(np.int64), history)  # these take no room
    finished_s = np.where(np.isnan(admitted["finished_s"][order]), admitted_s, admitted["finished_s"][order])
    known, since_s = _before(conversations, prompts + admitted["output_tokens"][order].astype(np.int64), finished_s)

    measured = admitted.that("phase", is_measured)[order]
    own = np.minimum(history, known) - found
    kept = measured & (own > 0)
    idle = Idle.of(np.column_stack([np.minimum(since_s, admitted_s), admitted_s, own, found])[kept])
    history, found = history[measured], found[measured]
    hits = int(found.sum()) + most_kept(idle, idle.tokens, capacity_tokens)
    beyond = int(np.maximum(0, anywhere[measured] - history).sum())  # in prompts, and no history
    recompute_s = history_s = None
    if prices is not None:
        history_s = prices.of((0, length) for length in history.tolist())
        free_s = prices.of((0, length) for length in found.tolist())
        recompute_s = max(0.0, history_s - free_s - most_saved(idle, capacity_tokens, prices))
    return Bound(hits, hits + beyond, int(history.sum()), int(prompts[measured].sum()), recompute_s, history_s)


def _before(conversations: Places, tokens: Places, finished_s: Floats) -> tuple[Places, Floats]:
    """Of each turn, in order of conversations: the most tokens of the turns before it in its conversation, and when the last
    of them ended; 0 of a first one."""
    if not len(tokens):
        return tokens, finished_s
    above = int(tokens.max()) + 1  # so that no conversation reaches into the next
    most = np.maximum.accumulate(tokens + conversations * above) - conversations * above
    first = np.diff(conversations, prepend=-1) > 0
    return np.where(first, 0, np.roll(most, 1)), np.where(first, 0.0, np.roll(finished_s, 1))


def most_saved(idle: Idle, capacity_tokens: int, prices: Prices) -> float:
    """Seconds that no choice of what to keep saves more of."""
    seconds = 0.0
    for first, step_s in prices.levels(int(idle.ends.max(initial=0))):
        above = idle.where(idle.ends > first)
        seconds += step_s * most_kept(above, np.minimum(above.tokens, above.ends - first), capacity_tokens)
    return min(seconds, prices.of(zip(idle.first.tolist(), idle.ends.tolist(), strict=True)))


def most_kept(idle: Idle, tokens: Places, capacity_tokens: int) -> int:
    """The most tokens that can be kept to the ends of their intervals with at most `capacity_tokens` of them at any time.
    tokens: of each."""
    lasts = idle.end_s > idle.start_s  # what takes no time takes no room
    starts, ends, wanted = idle.start_s[lasts], idle.end_s[lasts], tokens[lasts]
    gone = np.concatenate([[0], np.cumsum(wanted[np.argsort(ends)])])[np.searchsorted(np.sort(ends), starts, "right")]
    if (np.cumsum(wanted) - gone).max(initial=0) <= capacity_tokens:
        return int(tokens.sum())
    return int(tokens[~lasts].sum()) + _packed(starts.tolist(), ends.tolist(), wanted.tolist(), capacity_tokens)


def _packed(starts_s: list[float], ends_s: list[float], tokens: list[int], capacity_tokens: int) -> int:
    kept = [0] * len(tokens)
    ending: list[tuple[float, int]] = []  # of what is kept: the next end first
    latest: list[tuple[float, int]] = []  # the last end first
    used = hits = 0
    for index, (now_s, end_s, wanted) in enumerate(zip(starts_s, ends_s, tokens, strict=True)):
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


def bound_metrics(turns: Turns, capacity_tokens: int, prices: Prices | None = None) -> list[MetricValue]:
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
