"""Which chunk of a CPU tier of content goes first: vLLM's two policies, and any eviction policy, from the tail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from pensieve.core.block_hash import BlockHash
from pensieve.core.cache.victims import TailIndex
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.session import Node, Session, View

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


class FromTail(CpuOrder):
    """An eviction policy over chunks that are of use only behind all those before them: the candidate of a session is the
    last chunk that it has, or where that is in use the last one that is not. A chunk is the session's that stored or found
    it last. Core's index from the tail, over nodes of its own: a row a block, and of what is not evictable in another view.

    blocks_per_chunk: a policy's chunk is a block, and it is asked for the last one of each.
    """

    def __init__(self, policy: EvictionPolicy, blocks_per_chunk: int = 1) -> None:
        self._per = blocks_per_chunk
        self._index = TailIndex(policy, View.CPU_ONLY)
        self._where: dict[BlockHash, tuple[Node, int]] = {}
        self._nodes: dict[int, Node] = {}  # by session number
        self._keys: dict[
            tuple[int, int], list[BlockHash]
        ] = {}  # by session number and row, the one that came first in front

    def insert(self, key: BlockHash, session: Session, index: int) -> None:
        node = self._nodes.get(session.number)
        if node is None:
            node = self._nodes[session.number] = Node(session.number, session)
        row = (index + 1) * self._per - 1
        node.chunks.add(max(0, row + 1 - len(node.chunks)))
        self._where[key] = node, row
        self._keys.setdefault((node.number, row), []).append(key)
        self._see(node, row, View.CPU_ONLY)

    def remove(self, key: BlockHash) -> None:
        node, row = self._where.pop(key)
        keys = self._keys[node.number, row]
        keys.remove(key)
        self._see(node, row, View.CPU_ONLY if keys else View.NONE)
        if not keys:
            del self._keys[node.number, row]
            if not any(node.chunks.view):
                del self._nodes[node.number]

    def used(self, session: Session, use: Use) -> None:
        for key, index in use.offered.items():
            known = self._where.get(key)
            if known is not None and known[0].session is not session:
                self.remove(key)
                self.insert(key, session, index)

    def changed(self, session: Session) -> None:
        if session.number in self._nodes:
            self._index.refresh(self._nodes[session.number])

    def choose(self, chunks: int, evictable: Evictable, now_s: float) -> list[BlockHash] | None:
        chosen: list[tuple[BlockHash, Session, int]] = []
        passed: list[tuple[Node, int]] = []  # nothing there is evictable now
        for node, place in self._index.victims(now_s) if chunks else ():
            key = next(filter(evictable, self._keys[node.number, ~place]), None)
            if key is None:
                passed.append((node, ~place))
                self._see(node, ~place, View.DIRTY)
            else:
                self.remove(key)
                chosen.append((key, node.session, ~place // self._per))
            if len(chosen) == chunks:
                break
        for node, row in passed:
            self._see(node, row, View.CPU_ONLY)
        if len(chosen) < chunks:
            for key, session, index in reversed(chosen):
                self.insert(key, session, index)
            return None
        return [key for key, _, _ in chosen]

    def keys(self) -> Collection[BlockHash]:
        assert sorted(key for own in self._keys.values() for key in own) == sorted(self._where)
        return self._where.keys()

    def _see(self, node: Node, row: int, view: View) -> None:
        column = node.chunks.view
        more = (view is View.CPU_ONLY) - (column[row] == View.CPU_ONLY)
        column[row] = view
        self._index.changed(node, more)
        self._index.refresh(node)
