"""Which chunk is evicted next, found without a scan."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, islice, repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from pensieve.core.policies.base import EvictionPolicy, Scores, refuse_key
from pensieve.core.session import Node, Stem, View

Victim = tuple[int, float, float, int, int]
"""A chunk as it stands in the order of eviction, lowest first: level, score, last active, number of its node, and its place
there (~chunk from the tail)."""

Span = tuple[Node, int, int]
"""A run of chunks of a node: first chunk, stop."""

_Key = tuple[int, Hashable, int]  # level, policy bucket, how many of the policy's ages have passed
_Entry = tuple[float, float, int, int, int]  # policy order, last active, node, place, stamp
_Place = tuple[int, float, float, float, int, int, int]  # level, score, and the entry
_Head = tuple[int, float, float, float, int, int, int, _Key]
_COMPACT_BELOW = 64
_HOLDERS = 64  # sessions that say what a stem is worth: those before them add next to nothing
_INFINITE = float("inf")
_NOT_ENTERED = -1  # the stamp of a lead that no heap has an entry of


@dataclass(slots=True, eq=False)
class _Lead:
    """The chunks of one node in an index: how many, and the place of the first of them, as it was entered last. since_s: last
    active, as of the ages that have passed."""

    node: Node
    count: int = 0
    place: int = 0
    stamp: int = _NOT_ENTERED
    key: _Key = (0, None, 0)
    since_s: float | None = None
    passed: int = 0


class _Candidates(NamedTuple):
    """The chunks of one node that a choice looks at, in their order. level, last active and number are the node's; so is
    `order`, unless `orders` has one of each chunk."""

    level: int
    order: float
    last_active_s: float
    number: int
    node: Node
    places: NDArray[np.int64]
    scores: NDArray[np.float64]
    orders: NDArray[np.float64] | None = None


class Choice:
    """Chunks in the order of eviction. A choice is of thousands of chunks of a few nodes, the first of each: they are chosen,
    compared and grouped together, and their order is worked out only where somebody asks for it.

    own: the nodes, each with what is chosen of it. A row is a chunk, in order; `some` chooses rows.
    """

    __slots__ = ("_rows", "_spans", "own")

    def __init__(self, own: Sequence[_Candidates], rows: NDArray[np.int64] | None = None) -> None:
        """rows: the chunks in order, as places in those of all nodes, one after the other; None: all, by level and score."""
        self.own = own
        self._rows = rows
        self._spans: list[Span] | None = None

    def __len__(self) -> int:
        return sum([len(one.places) for one in self.own]) if self._rows is None else len(self._rows)

    @property
    def rows(self) -> NDArray[np.int64]:
        if self._rows is None:
            scores = self._joined([one.scores for one in self.own])
            levels = {one.level for one in self.own}
            by_level = [self._of_each([one.level for one in self.own])] if len(levels) > 1 else []
            self._rows = np.lexsort([scores, *by_level])
        return self._rows

    @property
    def of(self) -> NDArray[np.int64]:
        """Whose each is, by place in `own`."""
        return self._of_each(np.arange(len(self.own)))[self.rows]

    @property
    def places(self) -> NDArray[np.int64]:
        """See Victim."""
        return self._joined([one.places for one in self.own])[self.rows]

    @property
    def scores(self) -> NDArray[np.float64]:
        return self._joined([one.scores for one in self.own])[self.rows]

    def some(self, which: slice | NDArray[Any]) -> Choice:
        """Those in these rows."""
        return Choice(self.own, self.rows[which])

    def keys(self) -> list[NDArray[Any]]:
        """The columns of a Victim, a row each."""
        if not self.own:
            return [_NONE] * 5
        rows, own = self.rows, self.own
        of_node = [one.level for one in own], [one.last_active_s for one in own], [one.number for one in own]
        levels, last_active, numbers = (self._of_each(each)[rows] for each in of_node)
        return [levels, self.scores, last_active, numbers, self.places]

    def victims(self) -> list[Victim]:
        return list(zip(*[column.tolist() for column in self.keys()], strict=True))

    def column(self, name: str) -> NDArray[Any]:
        """What this column of Chunks says of each."""
        columns = [(np.asarray(getattr(one.node.chunks, name)), one.places) for one in self.own]
        return self._joined([column[np.maximum(places, ~places)] for column, places in columns])[self.rows]

    def spans(self) -> list[Span]:
        """As runs of chunks, those of one node together, in the order of the nodes' first ones."""
        if self._spans is None:
            if self._rows is None:
                own = self.own if len(self.own) == 1 else sorted(self.own, key=lambda one: (one.level, one.scores[0]))
                self._spans = [span for one in own for span in _runs(one.node, one.places)]
            else:
                self._spans = self._spans_of_rows()
        return self._spans

    def _spans_of_rows(self) -> list[Span]:
        if not len(self.rows):
            return []
        of, places = self.of, self.places
        nodes, firsts = np.unique(of, return_index=True)
        order = np.argsort(of, kind="stable")
        parts = dict(zip(nodes.tolist(), np.split(places[order], np.searchsorted(of[order], nodes[1:])), strict=True))
        in_order = nodes[np.argsort(firsts)].tolist()
        return [span for place in in_order for span in _runs(self.own[place].node, parts[place])]

    def _of_each(self, of_nodes: Any) -> NDArray[Any]:
        """What is of each node, for each of its chunks."""
        return np.repeat(of_nodes, [len(one.places) for one in self.own])

    @staticmethod
    def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else _NONE


def compared(one: Choice, other: Choice) -> tuple[list[float], list[float]]:
    """Numbers that compare as the chunks of two choices do: where they stand in the order of eviction of both together, or
    just their scores, where these decide."""
    if not len(one) or not len(other):
        return [0.0] * len(one), [0.0] * len(other)
    scores, others = one.scores, other.scores
    if len({part.level for part in (*one.own, *other.own)}) == 1 and (others[1:] >= others[:-1]).all():
        at = np.minimum(np.searchsorted(others, scores), len(others) - 1)
        if not (others[at] == scores).any():
            return scores.tolist(), others.tolist()
    columns = [np.concatenate(pair) for pair in zip(one.keys(), other.keys(), strict=True)]
    stands = np.empty(len(columns[0]))
    stands[np.lexsort(columns[::-1])] = np.arange(len(stands))
    return stands[: len(one)].tolist(), stands[len(one) :].tolist()


def _runs(node: Node, places: NDArray[np.int64]) -> list[Span]:
    """Chunks of a node, in the order of eviction, as runs."""
    first, last = int(places[0]), int(places[-1])
    if last - first == len(places) - 1:
        return [(node, first, last + 1) if first >= 0 else (node, ~last, -first)]
    breaks = np.flatnonzero(places[1:] != places[:-1] + 1) + 1
    return [span for run in np.split(places, breaks) for span in _runs(node, run)]


class VictimIndex:
    """The chunks of one View, ready to be taken in the policy's order.

    There is a heap for each policy bucket and level (1: sessions with a waiting request, taken only after those that
    have none), with the first chunk of each of its nodes. A choice compares the heads of the heaps. For retention
    value a bucket is the index of that chunk: the chunks of a bucket cost the same to recompute, so their order by last
    active never changes. One heap over all would be wrong, because the order of two sessions of different cost changes
    with time; a scan would grow with the number of idle sessions. Outdated entries stay in a heap until they reach its
    top or outnumber the valid ones.

    Where a policy has ages, a session moves to the next heap of its bucket as it passes one: a choice begins with those
    that have passed one since the last choice.
    """

    def __init__(self, policy: EvictionPolicy, view: View) -> None:
        self._policy = policy
        self._view = int(view)
        self._leads: dict[int, _Lead] = {}
        self._unsettled: dict[int, _Lead] = {}  # those that have changed since the last choice
        self._heaps: dict[_Key, list[_Entry]] = {}
        self._valid: dict[_Key, int] = {}
        self._touched: set[_Key] = set()  # buckets that have changed since somebody looked at their first entries
        self._firsts: dict[_Key, _Entry] = {}  # those of the others
        self._stamp = 0
        self._looked_at = 1  # nodes that the last choice was of: the next one may be of as many
        self._whole = policy.whole_conversations
        self._together = policy.together
        self._one_order = (
            type(policy).scores is not EvictionPolicy.scores
        )  # a policy that tells scores at once has one a session
        self._version = policy.version
        self._ages = policy.ages
        # A heap: when a session passes its next age, a tie-break, the session, since when it was idle then.
        self._aging: list[tuple[float, int, _Lead, float]] = []
        self._order_of_aging = count()
        self.chunks = 0

    def changed(self, node: Node, more: int) -> None:
        """Add `more` of the node's chunks to this index (fewer than 0: take them out). The next choice sorts in the one
        that is the first then."""
        lead = self._leads.get(node.number)
        if lead is None:
            if not more:
                return
            lead = self._leads[node.number] = _Lead(node)
        lead.count += more
        self.chunks += more
        if lead.count:
            self._unsettled[node.number] = lead
        else:
            self._leave(lead)

    def remove(self, node: Node) -> None:
        """Remove all chunks of a node, of which a session starts to run; the caller resets their views."""
        lead = self._leads.get(node.number)
        if lead is not None:
            self.chunks -= lead.count
            self._leave(lead)

    def refresh(self, node: Node) -> None:
        """Sort a node in anew: the last active, next use or level of its session has changed."""
        lead = self._leads.get(node.number)
        if lead is not None:
            self._take_off(lead)
            self._unsettled[node.number] = lead

    def choose(self, count: int, now_s: float, whole: bool = False) -> Choice:
        """The first `count` chunks in the order of eviction, or as many as there are; none leaves the index yet. whole: where
        the policy evicts whole sessions, as many more as the last one has.

        Nodes compete by their entries, the lowest first. Of those that were looked at, chunks before the next entry are
        surely chosen; an entry may have a lower score than its first chunk, which counts.
        """
        whole = whole and self._whole
        self._settle(now_s)
        heads = self._heads(now_s)
        heap: list[tuple[int, float, float, float, int, int, int, Any]] = [*heads]
        heapq.heapify(heap)
        looked_at: list[_Candidates] = []
        have, enough = 0, self._looked_at
        while heap and count:
            *_, number, _, _, behind = heap[0]
            if isinstance(behind, tuple):
                behind = self._following(behind, now_s)
            following = next(behind, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (*following, behind))
            looked_at.append(self._candidates(self._leads[number].node, now_s, None if whole else count))
            have += len(looked_at[-1].places)
            if have >= count and len(looked_at) >= enough and heap:
                chosen = self._first_of(looked_at, count, whole, heap[0][:3])
                if chosen is not None:
                    self._looked_at = len(chosen.own)
                    return chosen
                enough = len(looked_at) + 1 + len(looked_at) // 2
        return (self._first_of(looked_at, count, whole, None) if looked_at else None) or NOTHING

    def first(self, now_s: float) -> Span | None:
        """The chunk that a choice of one gives, where its node's entry says what it is worth; None: `choose` has to tell."""
        self._settle(now_s)
        self._look_at_touched()
        score, least = self._policy.score, None
        for key, entry in self._firsts.items():
            value = score(key[1], entry[0], now_s)
            if least is None or key[0] < least[0] or (key[0] == least[0] and value <= least[1]):
                head = (key[0], value, *entry)
                least = head if least is None else min(least, head)
            elif not value <= _INFINITE:
                return None
        if least is None or self._whole or not _is_key(least[1]):
            return None
        node, place = self._leads[least[4]].node, least[5]
        if self._of_several(node):
            return None
        return (node, place, place + 1) if place >= 0 else (node, ~place, -place)

    def listed(self, nodes: Iterable[Node], now_s: float) -> Choice:
        """All chunks of these nodes in this view, in the order of eviction."""
        own = [self._candidates(node, now_s) for node in nodes if self._view in node.chunks.view]
        return (self._first_of(own, sum(len(one.places) for one in own), False, None) if own else None) or NOTHING

    def victims(self, now_s: float) -> Iterator[tuple[Node, int]]:
        """Chunks, by node and place, in the order of eviction. After each one the caller must have removed it from this index
        (or stop)."""
        self._settle(now_s)
        heads = self._heads(now_s)
        heapq.heapify(heads)
        while heads:
            *_, number, place, stamp, _ = heapq.heappop(heads)
            lead = self._leads.get(number)
            if lead is None or lead.stamp != stamp:
                continue
            yield lead.node, place
            self._settle(now_s)
            for head in self._heads(now_s, changed=True):
                heapq.heappush(heads, head)

    def _first_of(
        self, looked_at: list[_Candidates], count: int, whole: bool, before: tuple[int, float, float] | None
    ) -> Choice | None:
        """The first `count` chunks of these nodes, if all are before that level, score and order (None: whatever they are);
        whole: up to the last one of a node."""
        own = sorted(looked_at, key=_PRECEDENCE)
        lengths = [len(one.places) for one in own]
        scores = np.concatenate([one.scores for one in own]) if len(own) > 1 else own[0].scores
        if np.isnan(scores.max()):
            nobody = next(one for one in own if np.isnan(one.scores).any())
            refuse_key(self._policy, "score", float("nan"), nobody.node.session.name)
        starts = np.array([0, *accumulate(lengths[:-1])])
        orders = None if self._one_order else np.concatenate([one.orders for one in own if one.orders is not None])
        falls = scores[1:] < scores[:-1]
        if orders is not None:
            falls |= (scores[1:] == scores[:-1]) & (orders[1:] < orders[:-1])
        falls[starts[1:] - 1] = False
        if whole or orders is not None or falls.any():
            return self._sorted_of(own, scores, orders, bool(falls.any()), count, whole, before)
        if before is not None and own[-1].level >= before[0]:
            level, score, _ = before
            sure = np.add.reduceat(scores < score, starts, dtype=np.int64).tolist()
            known = zip(own, sure, lengths, strict=True)
            if sum([less if one.level == level else (one.level < level) * all_ for one, less, all_ in known]) < count:
                return None
        if count >= len(scores):
            return Choice(own)
        first, stop = 0, lengths[0]
        levels = [one.level for one in own]
        for place in range(1, len(own)):  # of the last level that is chosen from
            if levels[place] != levels[place - 1]:
                if stop >= count:
                    break
                first = stop
            stop += lengths[place]
        part = scores[first:stop]
        edge = np.partition(part, count - first - 1)[count - first - 1]
        chosen = np.zeros(len(scores), bool)
        chosen[:first] = True
        chosen[first:stop] = part < edge
        chosen[first + np.flatnonzero(part == edge)[: count - np.count_nonzero(chosen)]] = True
        taken = np.add.reduceat(chosen, starts, dtype=np.int64).tolist()
        return Choice(
            [
                one if number == length else one._replace(places=one.places[:number], scores=one.scores[:number])
                for one, number, length in zip(own, taken, lengths, strict=True)
                if number
            ]
        )

    @staticmethod
    def _sorted_of(
        own: Sequence[_Candidates],
        scores: NDArray[np.float64],
        orders: NDArray[np.float64] | None,
        falls: bool,
        count: int,
        whole: bool,
        before: tuple[int, float, float] | None,
    ) -> Choice | None:
        """The same, where more than the scores decides. falls: some chunk has less than the one before it of its node."""
        of = np.repeat(np.arange(len(own)), [len(one.places) for one in own])
        levels = None if own[0].level == own[-1].level else np.array([one.level for one in own])[of]
        if falls:  # a node's chunks go in their order: one that is less than the chunk before it goes next
            scores, orders = _reached(own)
        sure = len(scores)
        if before is not None and own[-1].level >= before[0]:
            level, score, order = before
            earlier = scores < score
            if orders is not None:
                earlier |= (scores == score) & (orders < order)
            if levels is not None:
                earlier = (levels < level) | ((levels == level) & earlier)
            sure = int(np.count_nonzero(earlier))
            if sure < count:
                return None
        rows = np.lexsort([keys for keys in (orders, scores, levels) if keys is not None])
        stop = count
        if whole and sure >= count:
            last = np.append(of[1:] != of[:-1], True)[rows[count - 1 : sure]]
            if not last.any() and before is not None:
                return None
            stop = count + int(last.argmax()) if last.any() else sure
        return Choice(own, rows[:stop])

    def _heads(self, now_s: float, changed: bool = False) -> list[_Head]:
        """The first entry of each bucket. changed: of those that have changed since they were looked at."""
        firsts, score = self._firsts, self._policy.score
        touched = self._look_at_touched()
        looked_at = [(key, firsts[key]) for key in touched if key in firsts] if changed else firsts.items()
        heads = [(key[0], score(key[1], first[0], now_s), *first, key) for key, first in looked_at]
        for head in heads:
            if not _is_key(head[1]):
                refuse_key(self._policy, "score", head[1], self._leads[head[4]].node.session.name)
        return heads

    def _look_at_touched(self) -> list[_Key]:
        """Find out anew which entry is the first, of each bucket that has changed since; returns these."""
        touched = [*self._touched]
        self._touched.clear()
        for key in touched:
            heap = self._heaps.get(key)
            while heap and not self._is_valid(heap[0]):
                heapq.heappop(heap)
            if heap:
                self._firsts[key] = heap[0]
            elif heap is not None:
                del self._heaps[key], self._valid[key]
                self._firsts.pop(key, None)
        return touched

    def _following(self, key: _Key, now_s: float) -> Iterator[_Place]:
        """Behind the first entry of a bucket, in order."""
        heap = self._heaps[key]
        nodes = [(entry, node) for node, entry in enumerate(heap[1:3], start=1)]
        heapq.heapify(nodes)
        while nodes:
            entry, node = heapq.heappop(nodes)
            for below in (2 * node + 1, 2 * node + 2):
                if below < len(heap):
                    heapq.heappush(nodes, (heap[below], below))
            if self._is_valid(entry):
                yield key[0], self._policy.score(key[1], entry[0], now_s), *entry

    def as_victim(self, node: Node, place: int, now_s: float) -> Victim:
        """A chunk as it stands in the order of eviction now, also one that is in no index."""
        index = self._asked(node, place)
        (score,) = self._scores(node, index, index + 1, now_s)
        return self._level(node), float(score), node.session.last_active_s, node.number, place

    def _of_several(self, node: Node) -> TypeGuard[Stem]:
        """Several sessions say what its chunks are worth: no less than its entry in a heap, which stands for the last one."""
        return self._together is not None and isinstance(node, Stem) and len(node.holders) > 1

    def _scores(self, node: Node, first: int, last: int, now_s: float) -> Scores:
        """Of its chunks that are [first, last) of their session."""
        if self._together is not None and self._of_several(node):
            return self._together(tuple(islice(reversed(node.holders.values()), _HOLDERS)), first, last, now_s)
        return self._policy.scores(node.session, first, last, now_s)

    def _candidates(self, node: Node, now_s: float, most: int | None = None) -> _Candidates:
        """The node's chunks in this view, the first `most` of them."""
        column = node.chunks.view
        low, high = column.find(self._view), column.rfind(self._view)
        if high - low + 1 == self._leads[node.number].count:
            places = np.arange(low, high + 1)
        else:
            places = np.flatnonzero(np.frombuffer(column, np.uint8) == self._view)
        places, told = self._valued(node, places, most, now_s)
        try:
            scores = np.asarray(told, np.float64)
        except (TypeError, ValueError):
            refuse_key(self._policy, "score", next(one for one in told if not _is_key(one)), node.session.name)
        order, session = self._policy.order, node.session
        first, orders = 0.0, None
        if self._one_order:
            first = order(session, self._asked(node, int(places[0])))
        else:
            orders = np.array([order(session, self._asked(node, place)) for place in places.tolist()], np.float64)
        own = self._level(node), first, session.last_active_s, node.number
        return _Candidates(*own, node, places, scores, orders)

    # -- from the head; TailIndex has its own ---------------------------------------------------------------------------

    def _valued(
        self, node: Node, indices: NDArray[np.int64], most: int | None, now_s: float
    ) -> tuple[NDArray[np.int64], Scores]:
        """The first places of these chunks, and their scores."""
        places = indices[:most]
        first, last = int(places[0]), int(places[-1])
        scores = self._scores(node, node.start + first, node.start + last + 1, now_s)
        if last - first >= len(places):
            scores = [scores[place - first] for place in places.tolist()]
        return places, scores

    def _first(self, node: Node) -> int:
        """The place of the node's chunk that goes first."""
        return node.chunks.view.find(self._view)

    def _asked(self, node: Node, place: int) -> int:
        """The chunk of its session by which the policy values it."""
        return node.start + place

    def _level(self, node: Node) -> int:
        return 1 if node.session.waiting or node.waiting else 0

    def leads(self) -> dict[int, tuple[int, int]]:
        """For check(): node number -> (place of the leading chunk, count)."""
        return {number: (self._first(lead.node), lead.count) for number, lead in self._leads.items()}

    def _leave(self, lead: _Lead) -> None:
        """A node has no chunk here any more."""
        self._take_off(lead)
        del self._leads[lead.node.number]
        self._unsettled.pop(lead.node.number, None)

    def _take_off(self, lead: _Lead) -> None:
        """Make the node's entry in its heap, if it has one, invalid."""
        if lead.stamp != _NOT_ENTERED:
            self._valid[lead.key] -= 1
            self._touched.add(lead.key)
            lead.stamp = _NOT_ENTERED

    def _settle(self, now_s: float) -> None:
        """Sort in what has changed since the last choice."""
        if self._policy.version != self._version:
            self._reorder()
        for lead in self._unsettled.values():
            first = self._first(lead.node)
            if first != lead.place or lead.stamp == _NOT_ENTERED:
                self._enter(lead, first)
        self._unsettled.clear()
        self._grow_older(now_s)

    def _enter(self, lead: _Lead, place: int) -> None:
        node, session = lead.node, lead.node.session
        index = self._asked(node, place)
        if self._ages and lead.since_s != session.last_active_s:
            lead.since_s, lead.passed = session.last_active_s, 0
            self._await_age(lead)
        key = (self._level(node), self._policy.bucket(session, index), lead.passed)
        self._take_off(lead)
        self._stamp += 1
        lead.place, lead.stamp, lead.key = place, self._stamp, key
        order = self._policy.order(session, index)
        if not _is_key(order):
            refuse_key(self._policy, "order", order, session.name)
        entry = (order, session.last_active_s, node.number, place, self._stamp)
        heap = self._heaps.get(key)
        if heap is None:
            self._heaps[key] = [entry]
            self._valid[key] = 1
        else:
            self._valid[key] += 1
            heapq.heappush(heap, entry)
            if len(heap) > _COMPACT_BELOW and len(heap) > 2 * self._valid[key]:
                heap[:] = [e for e in heap if self._is_valid(e)]
                heapq.heapify(heap)
        self._touched.add(key)

    def _grow_older(self, now_s: float) -> None:
        """Move the nodes that have passed an age since the last choice to the heap of that age."""
        aging, moved = self._aging, []
        while aging and aging[0][0] <= now_s:
            _, _, lead, since_s = heapq.heappop(aging)
            if self._ages_still(lead, since_s):
                lead.passed = bisect_right(self._ages, now_s - since_s)
                self._enter(lead, lead.place)
                moved.append(lead)
        for lead in moved:
            self._await_age(lead)

    def _await_age(self, lead: _Lead) -> None:
        if lead.passed == len(self._ages):
            return
        assert lead.since_s is not None
        aging = self._aging
        next_s = lead.since_s + self._ages[lead.passed]
        heapq.heappush(aging, (next_s, next(self._order_of_aging), lead, lead.since_s))
        if len(aging) > _COMPACT_BELOW and len(aging) > 2 * len(self._leads):  # nothing was chosen for long
            aging[:] = [
                (at_s, tie, lead, since_s) for at_s, tie, lead, since_s in aging if self._ages_still(lead, since_s)
            ]
            heapq.heapify(aging)

    def _ages_still(self, lead: _Lead, since_s: float) -> bool:
        return self._leads.get(lead.node.number) is lead and lead.since_s == since_s

    def _reorder(self) -> None:
        self._version = self._policy.version
        for by_key in (self._heaps, self._valid, self._firsts):
            by_key.clear()
        self._touched.clear()
        for lead in self._leads.values():
            lead.stamp = _NOT_ENTERED
        self._unsettled.update(self._leads)

    def _is_valid(self, entry: _Entry) -> bool:
        _, _, number, _, stamp = entry
        lead = self._leads.get(number)
        return lead is not None and lead.stamp == stamp


def _reached(own: Iterable[_Candidates]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The highest score and order of each chunk and those before it of the same node."""
    keys: list[tuple[float, float]] = []
    for one in own:
        orders = repeat(one.order) if one.orders is None else one.orders.tolist()
        keys += accumulate(zip(one.scores.tolist(), orders, strict=False), max)
    scores, orders = np.array(keys).T
    return scores, orders


_PRECEDENCE = itemgetter(0, 1, 2, 3)


_NONE = np.empty(0, np.int64)
NOTHING = Choice(())


def _is_key(value: object) -> bool:
    """Whether it is a number that has a place among the others: NaN has none, and would leave a heap in any order."""
    try:
        return value <= _INFINITE  # type: ignore[operator]
    except TypeError:
        return False
