"""The next victim of any policy, from a heap for each of its buckets."""

import heapq
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Any

import numpy as np

from pensieve.core.cache.victims import NOT_ENTERED, NOTHING, Candidates, Choice, Lead, VictimIndex, is_key
from pensieve.core.policies.base import EvictionPolicy, refuse_key
from pensieve.core.session import Node, View

_Key = tuple[int, Hashable, int]  # level, policy bucket, how many of the policy's ages have passed
_Entry = tuple[float, float, int, int, int]  # policy order, last active, node, place, stamp
_Place = tuple[int, float, float, float, int, int, int]  # level, score, and the entry
_Head = tuple[int, float, float, float, int, int, int, _Key]
_COMPACT_BELOW = 64


class HeapIndex(VictimIndex):
    """For any policy.

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
        super().__init__(policy, view)
        self._heaps: dict[_Key, list[_Entry]] = {}
        self._valid: dict[_Key, int] = {}
        self._touched: set[_Key] = set()  # buckets that have changed since somebody looked at their first entries
        self._firsts: dict[_Key, _Entry] = {}  # those of the others
        self._stamp = 0
        self.whole = policy.whole_conversations
        self._version = policy.version
        self._ages = policy.ages
        # A heap: when a session passes its next age, a tie-break, the session, since when it was idle then.
        self._aging: list[tuple[float, int, Lead, float]] = []
        self._order_of_aging = count()

    def choose(self, count: int, now_s: float, whole: bool = False) -> Choice:
        """The first `count` chunks in the order of eviction, or as many as there are; none leaves the index yet. whole: where
        the policy evicts whole sessions, as many more as the last one has.

        Nodes compete by their entries, the lowest first. Of those that were looked at, chunks before the next entry are
        surely chosen; an entry may have a lower score than its first chunk, which counts.
        """
        whole = whole and self.whole
        self._settle(now_s)
        heads = self._heads(now_s)
        if count == 1 and heads and not whole:
            level, score, *_, number, place, _, _ = min(heads)
            if self._decides(node := self._leads[number].node):
                return Choice([node], [level], [1], np.array([place]), np.array([score]))
        heap: list[tuple[int, float, float, float, int, int, int, Any]] = [*heads]
        heapq.heapify(heap)
        looked_at: list[Candidates] = []
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
                    self._looked_at = len(chosen.nodes)
                    return chosen
                enough = len(looked_at) + 1 + len(looked_at) // 2
        return (self._first_of(looked_at, count, whole, None) if looked_at else None) or NOTHING

    def victims(self, now_s: float) -> Iterator[tuple[Node, int]]:
        """Chunks, by node and place, in the order of eviction. After each one the caller must have removed it from this index
        (or stop)."""
        while True:
            self._settle(now_s)
            heads = self._heads(now_s)
            if not heads:
                return
            number, place = min(heads)[4:6]
            yield self._leads[number].node, place

    def _heads(self, now_s: float) -> list[_Head]:
        """The first entry of each bucket."""
        for key in self._touched:  # find out anew which entry is the first
            heap = self._heaps.get(key)
            while heap and not self._is_valid(heap[0]):
                heapq.heappop(heap)
            if heap:
                self._firsts[key] = heap[0]
            elif heap is not None:
                del self._heaps[key], self._valid[key]
                self._firsts.pop(key, None)
        self._touched.clear()
        heads = [
            (key[0], self._policy.score(key[1], first[0], now_s), *first, key) for key, first in self._firsts.items()
        ]
        for head in heads:
            if not is_key(head[1]):
                refuse_key(self._policy, "score", head[1], self._leads[head[4]].node.session.name)
        return heads

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

    def _decides(self, node: Node) -> bool:
        """Its entry says what its first chunk is worth."""
        return True

    def _take_off(self, lead: Lead) -> None:
        """Make the node's entry in its heap, if it has one, invalid."""
        if lead.stamp != NOT_ENTERED:
            self._valid[lead.key] -= 1
            self._touched.add(lead.key)
            lead.stamp = NOT_ENTERED

    def _settle(self, now_s: float) -> None:
        """Sort in what has changed since the last choice."""
        if self._policy.version != self._version:
            self._reorder()
        for lead in self._unsettled.values():
            first = self._first(lead.node)
            if first != lead.place or lead.stamp == NOT_ENTERED:
                self._enter(lead, first)
        self._unsettled.clear()
        self._grow_older(now_s)

    def _enter(self, lead: Lead, place: int) -> None:
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
        if not is_key(order):
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

    def _await_age(self, lead: Lead) -> None:
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

    def _ages_still(self, lead: Lead, since_s: float) -> bool:
        return self._leads.get(lead.node.number) is lead and lead.since_s == since_s

    def _reorder(self) -> None:
        self._version = self._policy.version
        for by_key in (self._heaps, self._valid, self._firsts):
            by_key.clear()
        self._touched.clear()
        for lead in self._leads.values():
            lead.stamp = NOT_ENTERED
        self._unsettled.update(self._leads)

    def _is_valid(self, entry: _Entry) -> bool:
        _, _, number, _, stamp = entry
        lead = self._leads.get(number)
        return lead is not None and lead.stamp == stamp
