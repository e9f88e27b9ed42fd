"""Which chunk is evicted next, found without a scan."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import count, islice
from typing import NamedTuple, TypeGuard

from pensieve.core.policies.base import EvictionPolicy, refuse_key
from pensieve.core.session import NO_BLOCK, Node, Stem, View, runs_of

_Place = tuple[int, float, float, float, int, int]  # level, score, order, last active, number of the node, chunk


class Victim(NamedTuple):
    """A chunk as it stands in the order of eviction, lowest first. number: of the node. place: of the chunk in it, ~chunk
    from the tail. The node itself decides nothing."""

    level: int
    score: float
    last_active_s: float
    number: int
    place: int
    node: Node


Span = tuple[Node, int, int]
"""A run of chunks of a node: first chunk, stop."""

_Key = tuple[int, Hashable, int]  # level, policy bucket, how many of the policy's ages have passed
_Entry = tuple[float, float, int, int, int]  # policy order, last active, node, place, stamp
_Head = tuple[
    int, float, float, float, int, int, int, _Key
]  # level, score, order, last active, node, place, stamp, key
_COMPACT_BELOW = 64
_STRETCH = 64  # chunks of a node whose scores are asked at once
_FIRST_STRETCH = 4  # fewer to begin with: of most nodes a choice takes one or two
_HOLDERS = 64  # sessions that say what a stem is worth: those before them add next to nothing
_INFINITE = float("inf")
_NOT_ENTERED = -1  # the stamp of a lead that no heap has an entry of


class _Lead:
    """The chunks of one node in an index: how many, and the first of them."""

    __slots__ = ("count", "key", "node", "passed", "place", "since_s", "stamp")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.count = 0
        self.place = 0  # of the first of them
        self.stamp = _NOT_ENTERED
        self.key: _Key = (0, None, 0)
        self.since_s: float | None = None  # last active, as of the ages that have passed
        self.passed = 0


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
        self._view, self._one = view, bytes((view,))
        self._leads: dict[int, _Lead] = {}
        self._heaps: dict[_Key, list[_Entry]] = {}
        self._valid: dict[_Key, int] = {}
        self._touched: set[_Key] = set()  # buckets that have changed since a choice began, or was looked at last
        self._stamp = 0
        self._whole = policy.whole_conversations
        self._together = policy.together
        self._version = policy.version
        self._ages = policy.ages
        # A heap: when a session passes its next age, a tie-break, the session, since when it was idle then.
        self._aging: list[tuple[float, int, _Lead, float]] = []
        self._order_of_aging = count()
        self.chunks = 0

    def changed(self, node: Node, more: int) -> None:
        """Add `more` of the node's chunks to this index (fewer than 0: take them out), and sort in the one that is now the
        first."""
        lead = self._leads.get(node.number)
        if lead is None:
            if not more:
                return
            lead = self._leads[node.number] = _Lead(node)
        lead.count += more
        self.chunks += more
        if not lead.count:
            self._leave(lead)
            del self._leads[node.number]
            return
        first = self._first(node)
        if first != lead.place or lead.stamp == _NOT_ENTERED:
            self._enter(lead, first)

    def remove(self, node: Node) -> None:
        """Remove all chunks of a node, of which a session starts to run; the caller resets their views."""
        lead = self._leads.pop(node.number, None)
        if lead is not None:
            self.chunks -= lead.count
            self._leave(lead)

    def refresh(self, node: Node) -> None:
        """Sort a node in anew: the last active, next use or level of its session has changed."""
        lead = self._leads.get(node.number)
        if lead is not None:
            self._enter(lead, lead.place)

    def choose(self, count: int, now_s: float, whole: bool = False) -> list[Victim]:
        """The first `count` chunks in the order of eviction, or as many as there are; none leaves the index yet. whole: where
        the policy evicts whole sessions, as many more as the last one has."""
        whole = whole and self._whole
        if self._policy.version != self._version:
            self._reorder()
        self._grow_older(now_s)
        if count == 1 and not whole:
            heads = self._heads(now_s)
            if not heads:
                return []
            level, score, _, last_active, number, place, _, _ = min(heads)
            node = self._leads[number].node
            if not self._of_several(node):
                return [Victim(level, score, last_active, number, place, node)]
        return self._merge(count, now_s, whole)

    def spans(self, victims: list[Victim]) -> list[Span]:
        """Return the chunks of a choice as runs, those of one node together."""
        chunks: dict[Node, list[int]] = defaultdict(list)
        for *_, chunk, node in victims:
            chunks[node].append(chunk)
        return [(node, start, stop) for node, own in chunks.items() for start, stop in runs_of(own)]

    def victims(self, now_s: float) -> Iterator[tuple[Node, int]]:
        """Chunks, by node and place, in the order of eviction. After each one the caller must have removed it from this index
        (or stop)."""
        if self._policy.version != self._version:
            self._reorder()
        self._grow_older(now_s)
        heads = self._heads(now_s)
        heapq.heapify(heads)
        touched = self._touched
        touched.clear()
        while heads:
            *_, number, place, stamp, _ = heapq.heappop(heads)
            lead = self._leads.get(number)
            if lead is None or lead.stamp != stamp:
                continue
            yield lead.node, place
            for key in touched:
                fresh = self._head(key, now_s)
                if fresh is not None:
                    heapq.heappush(heads, fresh)
            touched.clear()

    def _merge(self, count: int, now_s: float, whole: bool) -> list[Victim]:
        """The first entries of the buckets and, of each node that has given up a chunk, the next one compete. Nothing
        moves in the heaps of the buckets. The entry of a node may have a lower score than its first chunk, which counts."""
        heap = [(*head[:6], self._following(head[7], now_s)) for head in self._heads(now_s)]
        heapq.heapify(heap)
        chosen: list[Victim] = []
        begun: dict[int, Node] = {}  # nodes whose chunks compete in place of their entry
        exhausted = True
        while heap and (len(chosen) < count or (whole and not exhausted)):
            level, score, _, last_active, number, place, behind = heap[0]
            following = next(behind, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (*following, behind))
            if number in begun:
                chosen.append(Victim(level, score, last_active, number, place, begun[number]))
                exhausted = following is None
            else:
                node = begun[number] = self._leads[number].node
                own = self._chunks_from(node, place, now_s)
                heapq.heappush(heap, (*next(own), own))
        return chosen

    def _heads(self, now_s: float) -> list[_Head]:
        return [head for key in list(self._heaps) if (head := self._head(key, now_s)) is not None]

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
                order, last_active, number, place, _ = entry
                yield key[0], self._policy.score(key[1], order, now_s), order, last_active, number, place

    def as_victim(self, node: Node, place: int, now_s: float) -> Victim:
        """A chunk as it stands in the order of eviction now, also one that is in no index."""
        index = self._asked(node, place)
        (score,) = self._scores(node, index, index + 1, now_s)
        return Victim(self._level(node), score, node.session.last_active_s, node.number, place, node)

    def _of_several(self, node: Node) -> TypeGuard[Stem]:
        """Several sessions say what its chunks are worth: no less than its entry in a heap, which stands for the last one."""
        return self._together is not None and isinstance(node, Stem) and len(node.holders) > 1

    def _scores(self, node: Node, first: int, last: int, now_s: float) -> Sequence[float]:
        """Of its chunks that are [first, last) of their session."""
        if self._together is not None and self._of_several(node):
            return self._together(tuple(islice(reversed(node.holders.values()), _HOLDERS)), first, last, now_s)
        return self._policy.scores(node.session, first, last, now_s)

    def _chunks_from(self, node: Node, place: int, now_s: float) -> Iterator[_Place]:
        """The chunks of a node from this place on, in order."""
        most, number = _FIRST_STRETCH, node.number
        level, session = self._level(node), node.session
        while (stretch := self._stretch(node, place, most, now_s)) is not None:
            for place, score in enumerate(stretch[1], stretch[0]):
                if not _is_key(score):
                    refuse_key(self._policy, "score", score, session.name)
                order = self._policy.order(session, self._asked(node, place))
                yield level, score, order, session.last_active_s, number, place
            place, most = place + 1, _STRETCH

    # -- from the head; TailIndex has its own ---------------------------------------------------------------------------

    def _stretch(self, node: Node, place: int, most: int, now_s: float) -> tuple[int, Sequence[float]] | None:
        """The first run of its chunks from this place on, its first `most` if it is longer: where it begins, and the scores.
        None: there is none."""
        column = node.chunks.view
        start = column.find(self._view, place)
        if start < 0:
            return None
        run = column[start : start + most]
        first = node.start + start
        return start, self._scores(node, first, first + len(run) - len(run.lstrip(self._one)), now_s)

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
        return {number: (lead.place, lead.count) for number, lead in self._leads.items()}

    def _leave(self, lead: _Lead) -> None:
        """Make the node's entry in its heap invalid."""
        self._valid[lead.key] -= 1
        self._touched.add(lead.key)
        lead.stamp = _NOT_ENTERED

    def _enter(self, lead: _Lead, place: int) -> None:
        node, session = lead.node, lead.node.session
        index = self._asked(node, place)
        if self._ages and lead.since_s != session.last_active_s:
            lead.since_s, lead.passed = session.last_active_s, 0
            self._await_age(lead)
        key = (self._level(node), self._policy.bucket(session, index), lead.passed)
        if lead.stamp != _NOT_ENTERED:
            self._valid[lead.key] -= 1
            self._touched.add(lead.key)
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
        self._heaps.clear()
        self._valid.clear()
        for lead in self._leads.values():
            lead.stamp = _NOT_ENTERED
            self._enter(lead, lead.place)

    def _is_valid(self, entry: _Entry) -> bool:
        _, _, number, _, stamp = entry
        lead = self._leads.get(number)
        return lead is not None and lead.stamp == stamp

    def _head(self, key: _Key, now_s: float) -> _Head | None:
        heap = self._heaps.get(key)
        while heap:
            entry = heap[0]
            if self._is_valid(entry):
                order, last_active, number, place, stamp = entry
                score = self._policy.score(key[1], order, now_s)
                if not _is_key(score):
                    refuse_key(self._policy, "score", score, self._leads[number].node.session.name)
                return (key[0], score, order, last_active, number, place, stamp, key)
            heapq.heappop(heap)
        if heap is not None:
            del self._heaps[key], self._valid[key]
        return None


class TailIndex(VictimIndex):
    """From the tail: the last chunk of a node goes first, and what follows a node before it, so that what is left of a
    conversation is a prefix. The place of a chunk is ~chunk.

    The policy says which conversation: each of its chunks has the score of the last one that it still has in any view.
    """

    def spans(self, victims: list[Victim]) -> list[Span]:
        return [(node, -stop, -start) for node, start, stop in super().spans(sorted(victims))]

    def _stretch(self, node: Node, place: int, most: int, now_s: float) -> tuple[int, Sequence[float]] | None:
        column = node.chunks.view
        last = column.rfind(self._view, 0, -place)
        if last < 0:
            return None
        asked = self._asked(node, place)
        count = last + 1 - len(column[: last + 1].rstrip(self._one))
        return ~last, [*self._scores(node, asked, asked + 1, now_s)] * min(count, most)

    def _first(self, node: Node) -> int:
        return ~node.chunks.view.rfind(self._view)

    def _asked(self, node: Node, place: int) -> int:
        return node.start + max(len(node.chunks.view.rstrip(b"\0")) - 1, ~place)

    def _level(self, node: Node) -> int:
        return 2 * super()._level(node) + self._precedes(node)

    def _precedes(self, node: Node) -> bool:
        """A node that follows it has KV: on GPU, or where this index gives up what is on CPU, anywhere."""
        lower = self._view is View.CPU_ONLY
        following = reversed(node.children.values()) if isinstance(node, Stem) else ()
        return any(
            child.chunks.gpu[0] != NO_BLOCK or (lower and child.chunks.cpu[0] != NO_BLOCK)
            for child in following
            if len(child.chunks)
        )


def _is_key(value: object) -> bool:
    """Whether it is a number that has a place among the others: NaN has none, and would leave a heap in any order."""
    try:
        return value <= _INFINITE  # type: ignore[operator]
    except TypeError:
        return False
