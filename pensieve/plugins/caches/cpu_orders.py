"""Which chunk of a CPU tier of content goes first: vLLM's two policies, and any eviction policy, from the tail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from pensieve.core.block_hash import BlockHash
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.session import Session

Evictable = Callable[[BlockHash], bool]


@dataclass(slots=True)
class Use:
    """What a request has done with the tier so far.

    offered: chunks that it wanted to store or has loaded, with their indices. found: those of them that were there; stored:
    those that it stored itself. missed: those that it wanted to store and that were not there. prompt: its length in tokens.
    following: the first chunk that was not offered. refused: there was no room for the last ones, which are offered again.
    """

    prompt: int
    offered: dict[BlockHash, int] = field(default_factory=dict)
    found: set[BlockHash] = field(default_factory=set)
    stored: set[BlockHash] = field(default_factory=set)
    missed: set[BlockHash] = field(default_factory=set)
    following: int = 0
    refused: bool = False

    def from_tail(self) -> list[BlockHash]:
        return sorted(self.offered, key=self.offered.__getitem__, reverse=True)


class CpuOrder(ABC):
    """Chunks by name. It hears of a request's chunks once, when the request has ended; keys come from the head of the
    prompt on."""

    @abstractmethod
    def insert(self, key: BlockHash, session: Session, index: int) -> None:
        """A chunk is about to be stored. session: whose `index`-th chunk it is."""

    @abstractmethod
    def remove(self, key: BlockHash) -> None:
        """Its store failed, or its session was forgotten."""

    def missed(self, keys: Sequence[BlockHash]) -> None:
        """These are about to be stored, for the first time in a request: each was not there."""
        return None

    @abstractmethod
    def used(self, session: Session, use: Use) -> None:
        """A request of the session has ended that used these."""

    @abstractmethod
    def choose(self, chunks: int, evictable: Evictable, now_s: float) -> list[BlockHash] | None:
        """Remove exactly so many of the evictable ones and return them; None, and nothing is changed, where there are too
        few."""

    def changed(self, session: Session) -> None:
        """What an eviction policy reads of the session has changed."""
        return None

    @abstractmethod
    def keys(self) -> Collection[BlockHash]:
        """All that are there; for check()."""


class Lru(CpuOrder):
    """vLLM 0.32, v1/kv_offload/cpu/policies/lru.py: used at the insertion, and at the end of each request that found it; of
    one request the last chunk goes first."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[BlockHash, None] = OrderedDict()

    def insert(self, key: BlockHash, session: Session, index: int) -> None:
        self._chunks[key] = None

    def remove(self, key: BlockHash) -> None:
        del self._chunks[key]

    def used(self, session: Session, use: Use) -> None:
        for key in use.from_tail():
            if key in self._chunks:
                self._chunks.move_to_end(key)

    def choose(self, chunks: int, evictable: Evictable, now_s: float) -> list[BlockHash] | None:
        chosen: list[BlockHash] = []
        for key in self._chunks:
            if len(chosen) == chunks:
                break
            if evictable(key):
                chosen.append(key)
        if len(chosen) < chunks:
            return None
        for key in chosen:
            del self._chunks[key]
        return chosen

    def keys(self) -> Collection[BlockHash]:
        return self._chunks.keys()


class Arc(CpuOrder):
    """vLLM 0.32, v1/kv_offload/cpu/policies/arc.py: chunks stored once (T1) and found again (T2), least recently used first.

    T1 gives up while it has `target` chunks or more. A chunk that T1 gave up and that is stored again raises the target, one
    that T2 gave up lowers it; as many names of each are remembered as there are chunks. What is stored again begins in T1.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.target = 0.0
        self.once: OrderedDict[BlockHash, None] = OrderedDict()
        self.again: OrderedDict[BlockHash, None] = OrderedDict()
        self.gone_once: OrderedDict[BlockHash, None] = OrderedDict()
        self.gone_again: OrderedDict[BlockHash, None] = OrderedDict()

    def insert(self, key: BlockHash, session: Session, index: int) -> None:
        self.once[key] = None
        self.gone_once.pop(key, None)
        self.gone_again.pop(key, None)

    def remove(self, key: BlockHash) -> None:
        del (self.once if key in self.once else self.again)[key]

    def missed(self, keys: Sequence[BlockHash]) -> None:
        once, again = self.gone_once, self.gone_again
        for key in reversed(keys):
            if key in once:
                self.target = min(self.target + max(1, len(again) / len(once)), self._capacity)
                once.move_to_end(key)
            elif key in again:
                self.target = max(self.target - max(1, len(once) / len(again)), 0)
                again.move_to_end(key)

    def used(self, session: Session, use: Use) -> None:
        for key in use.from_tail():
            if key in self.once and key in use.found:
                del self.once[key]
                self.again[key] = None
            elif key in use.found or key in use.stored:
                part = self.once if key in self.once else self.again
                if key in part:
                    part.move_to_end(key)

    def choose(self, chunks: int, evictable: Evictable, now_s: float) -> list[BlockHash] | None:
        once, again = (filter(evictable, part) for part in (self.once, self.again))
        left = len(self.once)
        chosen: list[tuple[BlockHash, bool]] = []
        for _ in range(chunks):
            key, of_once = (next(once, None), True) if left >= int(self.target) else (None, False)
            if key is None:
                key, of_once = next(again, None), False
            if key is None:
                key, of_once = next(once, None), True
            if key is None:
                return None
            left -= of_once
            chosen.append((key, of_once))
        for key, of_once in chosen:
            source, gone = (self.once, self.gone_once) if of_once else (self.again, self.gone_again)
            del source[key]
            gone[key] = None
        for gone in (self.gone_once, self.gone_again):
            while len(gone) > self._capacity:
                gone.popitem(last=False)
        return [key for key, _ in chosen]

    def keys(self) -> Collection[BlockHash]:
        return self.once.keys() | self.again.keys()


_ROUNDING_S = 1e-6
"""So much earlier an age is asked for, since the sum of two times is rounded."""
_Bucket = tuple[Hashable, int]
"""The policy's, and how many of its ages the session has passed."""


class _Held(NamedTuple):
    """A chunk of a session. Of two with one index, the one that came first stands behind: the tail is the last."""

    place: int
    age: int
    key: BlockHash


class _Head(NamedTuple):
    """The candidate of a session, by the policy's order; valid while `stamp` is the session's last."""

    order: float
    last_active_s: float
    number: int
    stamp: int


class FromTail(CpuOrder):
    """An eviction policy over chunks that are of use only behind all those before them: the candidate of a session is the
    last chunk that it has, or where that is in use the last one that is not. A chunk is the session's that stored or found
    it last.

    blocks_per_chunk: a policy's chunk is a block, and it is asked for the last one of each.

    A choice looks at one candidate a bucket (see EvictionPolicy). Sessions that have passed one of the policy's `ages` are
    sorted anew; where its version has changed, all are.
    """

    def __init__(self, policy: EvictionPolicy, blocks_per_chunk: int = 1) -> None:
        self._policy, self._per = policy, blocks_per_chunk
        self._version = policy.version
        self._where: dict[BlockHash, tuple[Session, _Held]] = {}
        self._chunks: dict[int, list[_Held]] = {}  # by session number, ascending
        self._sessions: dict[int, Session] = {}
        self._heads: dict[_Bucket, list[_Head]] = {}  # heaps
        self._entries = 0
        self._stamps: dict[int, int] = {}
        self._due: list[tuple[float, int, int]] = []  # a heap: when a session passes an age, its number, its stamp
        self._unsorted: dict[int, Session] = {}  # whose place among the candidates has changed since the last choice
        self._next = count()
        self._now_s = 0.0

    def insert(self, key: BlockHash, session: Session, index: int) -> None:
        held = _Held(index, -next(self._next), key)
        self._where[key] = session, held
        insort(self._chunks.setdefault(session.number, []), held)
        self.changed(session)

    def remove(self, key: BlockHash) -> None:
        self.changed(self._take(key))

    def used(self, session: Session, use: Use) -> None:
        for key, index in use.offered.items():
            known = self._where.get(key)
            if known is not None and known[0] is not session:
                self.remove(key)
                self.insert(key, session, index)

    def changed(self, session: Session) -> None:
        if session.number in self._chunks:
            self._unsorted[session.number] = session

    def choose(self, chunks: int, evictable: Evictable, now_s: float) -> list[BlockHash] | None:
        policy, self._now_s = self._policy, now_s
        if policy.version != self._version or self._entries > 64 + 4 * len(self._chunks):
            self._version, self._entries = policy.version, 0
            self._heads.clear()
            self._due.clear()
            self._unsorted |= self._sessions
        while self._due and self._due[0][0] <= now_s:
            _, number, stamp = heappop(self._due)
            if self._stamps.get(number) == stamp:
                self.changed(self._sessions[number])
        self._sort()
        chosen: list[tuple[BlockHash, Session, int]] = []
        passed: list[Session] = []  # nothing of theirs is evictable now
        heap: list[tuple[float, float, int, int, _Bucket]] = []

        def offer(bucket: _Bucket) -> None:
            """The first candidate of a bucket among those of all of them."""
            head = self._first(bucket)
            if head is not None:
                score = policy.score(bucket[0], head.order, now_s)
                heappush(heap, (score, head.last_active_s, head.number, head.stamp, bucket))

        for bucket in list(self._heads):
            offer(bucket)
        while heap and len(chosen) < chunks:
            _, _, number, stamp, bucket = heappop(heap)
            if self._stamps.get(number) != stamp:
                continue
            session = self._sessions[number]
            held = next((one for one in reversed(self._chunks[number]) if evictable(one.key)), None)
            if held is None:
                self._stamps[number] = next(self._next)
                passed.append(session)
            else:
                self._take(held.key)
                chosen.append((held.key, session, held.place))
                following = self._push(session)
                if following is not None and following != bucket:
                    offer(following)
            offer(bucket)
        for session in passed:
            self.changed(session)
        if len(chosen) < chunks:
            for key, session, index in reversed(chosen):
                self.insert(key, session, index)
            return None
        return [key for key, _, _ in chosen]

    def keys(self) -> Collection[BlockHash]:
        assert sorted(held.key for own in self._chunks.values() for held in own) == sorted(self._where)
        return self._where.keys()

    def _take(self, key: BlockHash) -> Session:
        """Remove a chunk; returns whose it was."""
        session, held = self._where.pop(key)
        own = self._chunks[session.number]
        del own[bisect_left(own, held)]
        return session

    def _push(self, session: Session) -> _Bucket | None:
        """Sort the session's last chunk among the candidates; returns its bucket, if there is one."""
        number = session.number
        own = self._chunks.get(number)
        if not own:
            for known in (self._chunks, self._sessions, self._stamps):
                known.pop(number, None)
            return None
        self._sessions[number] = session
        stamp = self._stamps[number] = next(self._next)
        tail = (own[-1].place + 1) * self._per - 1
        ages = self._policy.ages
        passed = bisect_right(ages, self._now_s - session.last_active_s)
        if passed < len(ages):
            heappush(self._due, (session.last_active_s + ages[passed] - _ROUNDING_S, number, stamp))
        bucket = self._policy.bucket(session, tail), passed
        head = _Head(self._policy.order(session, tail), session.last_active_s, number, stamp)
        heappush(self._heads.setdefault(bucket, []), head)
        self._entries += 1
        return bucket

    def _first(self, bucket: _Bucket) -> _Head | None:
        heap = self._heads.get(bucket, [])
        while heap and self._stamps.get(heap[0].number) != heap[0].stamp:
            heappop(heap)
            self._entries -= 1
        if heap:
            return heap[0]
        self._heads.pop(bucket, None)
        return None

    def _sort(self) -> None:
        for session in self._unsorted.values():
            self._push(session)
        self._unsorted.clear()
