"""Which chunk is evicted next, found without a scan."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from itertools import count

from pensieve.eviction.base import EvictionPolicy, refuse_key
from pensieve.session import Session, View

_Key = tuple[int, Hashable, int]  # level, policy bucket, how many of the policy's ages have passed
_Entry = tuple[float, float, int, int, int]  # policy order, last active, session number, chunk, stamp
_Head = tuple[int, float, float, int, int, int, _Key]  # level, score, last active, session number, chunk, stamp, key
_COMPACT_BELOW = 64
_INFINITE = float("inf")
_NOT_ENTERED = -1  # the stamp of a lead that no heap has an entry of


class _Lead:
    """What an index holds of one conversation: how many chunks, and which is the first."""

    __slots__ = ("chunk", "count", "key", "passed", "session", "since_s", "stamp")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.count = 0
        self.chunk = 0
        self.stamp = _NOT_ENTERED
        self.key: _Key = (0, None, 0)
        self.since_s: float | None = None  # last active, as of the ages that have passed
        self.passed = 0


class VictimIndex:
    """The chunks of one View, ready to be taken in the policy's order.

    There is a heap for each policy bucket and level (1: conversations with a waiting request, taken only after those that
    have none), with the first chunk of each of its conversations. A choice compares the heads of the heaps. For retention
    value a bucket is the index of that chunk: the chunks of a bucket cost the same to recompute, so their order by last
    active never changes. One heap over all would be wrong, because the order of two conversations of different cost changes
    with time; a scan would grow with the number of idle conversations. Outdated entries stay in a heap until they reach its
    top or outnumber the valid ones.

    Where a policy has ages, a conversation moves to the next heap of its bucket as it passes one: a choice begins with those
    that have passed one since the last choice.
    """

    def __init__(self, policy: EvictionPolicy, view: View) -> None:
        self._policy = policy
        self._view = view
        self._leads: dict[int, _Lead] = {}
        self._heaps: dict[_Key, list[_Entry]] = {}
        self._valid: dict[_Key, int] = {}
        self._touched: list[_Key] | None = None  # buckets changed while a choice is under way
        self._stamp = 0
        self._whole = policy.whole_conversations
        self._version = policy.version
        self._ages = policy.ages
        self._aging: list[
            tuple[float, int, _Lead, float]
        ] = []  # when it passes its next age, a tie-break, since when idle
        self._order_of_aging = count()
        self.chunks = 0

    def add(self, session: Session, chunk: int) -> None:
        lead = self._leads.get(session.number)
        if lead is None:
            lead = self._leads[session.number] = _Lead(session)
        lead.count += 1
        self.chunks += 1
        if lead.count == 1 or chunk < lead.chunk:
            self._enter(lead, chunk)

    def remove(self, session: Session, chunk: int) -> None:
        """The caller has already changed the chunk's view, so that the search for the next first chunk skips it."""
        lead = self._leads[session.number]
        lead.count -= 1
        self.chunks -= 1
        if lead.count == 0:
            self._valid[lead.key] -= 1
            self._touch(lead.key)
            del self._leads[session.number]
        elif chunk == lead.chunk:
            chunks, view, following = session.chunks, self._view, chunk + 1
            while chunks[following].view is not view:
                following += 1
            self._enter(lead, following)

    def remove_session(self, session: Session) -> None:
        """All chunks of a conversation leave at once, since it starts to run; the caller resets their views."""
        lead = self._leads.pop(session.number, None)
        if lead is not None:
            self.chunks -= lead.count
            self._valid[lead.key] -= 1
            self._touch(lead.key)

    def count_of(self, session: Session) -> int:
        lead = self._leads.get(session.number)
        return lead.count if lead else 0

    def enough(self, session: Session, taken: int, wanted: int | None) -> bool:
        """Whether a choice that took `taken` chunks, the last one of this conversation, may stop."""
        return (
            taken == wanted
            if not self._whole
            else wanted is not None and taken >= wanted and not self.count_of(session)
        )

    def refresh(self, session: Session) -> None:
        """Its last active, next use or level changed."""
        lead = self._leads.get(session.number)
        if lead is not None:
            self._enter(lead, lead.chunk)

    def victims(self, now_s: float) -> Iterator[tuple[Session, int]]:
        """Chunks in the order of eviction. After each one the caller must have removed it from this index (or stop)."""
        if self._policy.version != self._version:
            self._reorder()
        self._grow_older(now_s)
        heads = [head for key in list(self._heaps) if (head := self._head(key, now_s)) is not None]
        heapq.heapify(heads)
        touched = self._touched = []
        try:
            while heads:
                head = heapq.heappop(heads)
                lead = self._leads.get(head[3])
                if lead is None or lead.stamp != head[5]:
                    continue
                yield lead.session, head[4]
                for key in touched:
                    fresh = self._head(key, now_s)
                    if fresh is not None:
                        heapq.heappush(heads, fresh)
                touched.clear()
        finally:
            self._touched = None

    def rank(self, session: Session, chunk: int, now_s: float) -> tuple[int, float, float, int, int]:
        """Where a chunk stands in the order of eviction, lowest first, also one that is in no index."""
        key, order = self._policy.bucket(session, chunk), self._policy.order(session, chunk)
        score = self._policy.score(key, order, now_s)
        return (1 if session.waiting else 0, score, session.last_active_s, session.number, chunk)

    def leads(self) -> dict[int, tuple[int, int]]:
        """For check(): session number -> (leading chunk, count)."""
        return {number: (lead.chunk, lead.count) for number, lead in self._leads.items()}

    def _enter(self, lead: _Lead, chunk: int) -> None:
        session = lead.session
        if self._ages and lead.since_s != session.last_active_s:
            lead.since_s, lead.passed = session.last_active_s, 0
            self._await_age(lead)
        key = (1 if session.waiting else 0, self._policy.bucket(session, chunk), lead.passed)
        if lead.stamp != _NOT_ENTERED:
            self._valid[lead.key] -= 1
            if lead.key != key:
                self._touch(lead.key)
        self._stamp += 1
        lead.chunk, lead.stamp, lead.key = chunk, self._stamp, key
        order = self._policy.order(session, chunk)
        if not _is_key(order):
            refuse_key(self._policy, "order", order, session.name)
        entry = (order, session.last_active_s, session.number, chunk, self._stamp)
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
        self._touch(key)

    def _grow_older(self, now_s: float) -> None:
        """Conversations that have passed an age since the last choice go to where they belong now."""
        aging, moved = self._aging, []
        while aging and aging[0][0] <= now_s:
            _, _, lead, since_s = heapq.heappop(aging)
            if self._ages_still(lead, since_s):
                lead.passed = bisect_right(self._ages, now_s - since_s)
                self._enter(lead, lead.chunk)
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
            aging[:] = [entry for entry in aging if self._ages_still(entry[2], entry[3])]
            heapq.heapify(aging)

    def _ages_still(self, lead: _Lead, since_s: float) -> bool:
        return self._leads.get(lead.session.number) is lead and lead.since_s == since_s

    def _reorder(self) -> None:
        self._version = self._policy.version
        self._heaps.clear()
        self._valid.clear()
        for lead in self._leads.values():
            lead.stamp = _NOT_ENTERED
            self._enter(lead, lead.chunk)

    def _touch(self, key: _Key) -> None:
        if self._touched is not None:
            self._touched.append(key)

    def _is_valid(self, entry: _Entry) -> bool:
        lead = self._leads.get(entry[2])
        return lead is not None and lead.stamp == entry[4]

    def _head(self, key: _Key, now_s: float) -> _Head | None:
        heap = self._heaps.get(key)
        while heap:
            entry = heap[0]
            if self._is_valid(entry):
                order, last_active, conversation, chunk, stamp = entry
                score = self._policy.score(key[1], order, now_s)
                if not _is_key(score):
                    refuse_key(self._policy, "score", score, self._leads[conversation].session.name)
                return (key[0], score, last_active, conversation, chunk, stamp, key)
            heapq.heappop(heap)
        if heap is not None:
            del self._heaps[key], self._valid[key]
        return None


def _is_key(value: object) -> bool:
    """Whether it is a number that has a place among the others: NaN has none, and would leave a heap in any order."""
    try:
        return value <= _INFINITE  # type: ignore[operator]
    except TypeError:
        return False
