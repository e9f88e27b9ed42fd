"""A CPU tier of content in chunks of several blocks, as vLLM's OffloadingConnector keeps it, and which chunk goes first: by
vLLM's two policies, or by any of ours, from the tail."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pensieve.core.facts import Facts
from pensieve.core.plan import CPU
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.session import BlockHash, Node, Session, View
from pensieve.plugins.caches.prefix_rule import TailIndex

Evictable = Callable[[BlockHash], bool]
STORING = -1


@dataclass(slots=True)
class CpuChunk:
    """slot: its place in the tier. names: of its blocks; the last one is the chunk's own. users: loads that read it; STORING
    until its store is done. gone: it is not to be found any more, and its slot is free when nobody reads or writes it.
    sessions: that stored or read it, by number, but for those forgotten."""

    slot: int
    names: Sequence[BlockHash]
    sessions: set[int]
    users: int = STORING
    gone: bool = False

    @property
    def key(self) -> BlockHash:
        return self.names[-1]


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


class Lru:
    """Chunks by name, of which one goes first. It hears of a request's chunks once, when that has ended; keys come from the
    head of the prompt on.

    vLLM 0.32, v1/kv_offload/cpu/policies/lru.py: used at the insertion, and at the end of each request that found it; of one
    request the last chunk goes first.
    """

    def __init__(self) -> None:
        self.once: OrderedDict[BlockHash, None] = OrderedDict()

    def insert(self, key: BlockHash, session: Session, index: int) -> None:
        """A chunk is about to be stored. session: whose `index`-th chunk it is."""
        self.once[key] = None

    def remove(self, key: BlockHash) -> None:
        """Its store failed, or its session was forgotten."""
        del self.once[key]

    def missed(self, keys: Sequence[BlockHash]) -> None:
        """These are about to be stored, for the first time in a request: each was not there."""

    def changed(self, session: Session) -> None:
        """What an eviction policy reads of the session has changed."""

    def used(self, session: Session, use: Use) -> None:
        """A request of the session has ended that used these."""
        for key in use.from_tail():
            if key in self.once:
                self.once.move_to_end(key)

    def choose(self, chunks: int, evictable: Evictable, now_s: float) -> list[BlockHash] | None:
        """Remove exactly so many of the evictable ones and return them; None, and nothing is changed, where there are too
        few."""
        chosen = list(islice(filter(evictable, self.once), chunks))
        if len(chosen) < chunks:
            return None
        for key in chosen:
            del self.once[key]
        return chosen

    def keys(self) -> Collection[BlockHash]:
        """All that are there; for check()."""
        return self.once.keys()


class Arc(Lru):
    """vLLM 0.32, v1/kv_offload/cpu/policies/arc.py: chunks stored once (T1) and found again (T2), least recently used first.

    T1 gives up while it has `target` chunks or more. A chunk that T1 gave up and that is stored again raises the target, one
    that T2 gave up lowers it; as many names of each are remembered as there are chunks. What is stored again begins in T1.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self.target = 0.0
        self.again: OrderedDict[BlockHash, None] = OrderedDict()
        self.gone_once: OrderedDict[BlockHash, None] = OrderedDict()
        self.gone_again: OrderedDict[BlockHash, None] = OrderedDict()

    def insert(self, key: BlockHash, session: Session, index: int) -> None:
        super().insert(key, session, index)
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


class FromTail(Lru):
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
        # By session number and row, the one that came first in front.
        self._keys: dict[tuple[int, int], list[BlockHash]] = {}

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


class CpuTier:
    """The rules of vLLM 0.32's CPUOffloadingManager (v1/kv_offload/cpu/manager.py): what is offered and not there is stored
    as a whole or not at all; what is being stored, read or offered is not evicted."""

    def __init__(self, slots: int, blocks_per_chunk: int, order: Lru) -> None:
        self.slots, self.blocks_per_chunk, self.order = slots, blocks_per_chunk, order
        self.facts = Facts()
        self._chunks: dict[BlockHash, CpuChunk] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._blocks: Counter[BlockHash] = Counter()  # chunks by block
        self._evictable = 0

    @property
    def used(self) -> int:
        return self.slots - len(self._free)

    def get(self, key: BlockHash) -> CpuChunk | None:
        """The chunk of this name, once it is stored."""
        chunk = self._chunks.get(key)
        return None if chunk is None or chunk.users == STORING else chunk

    def forget(self, key: BlockHash, session: Session) -> None:
        """The session is forgotten: what no other stored or read goes."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            chunk.sessions.discard(session.number)
            if not chunk.sessions:
                self.remove(key)

    def __contains__(self, key: BlockHash) -> bool:
        """Whether it is there, or is being stored."""
        return key in self._chunks

    def has_block(self, name: BlockHash) -> bool:
        """Whether a chunk that is there, or is being stored, has the block."""
        return name in self._blocks

    def blocks(self, chunk: CpuChunk) -> range:
        first = chunk.slot * self.blocks_per_chunk
        return range(first, first + self.blocks_per_chunk)

    def free_blocks(self) -> set[int]:
        per = self.blocks_per_chunk
        return {slot * per + block for slot in self._free for block in range(per)}

    def load(self, session: Session, use: Use, first: int, chunks: Sequence[CpuChunk]) -> None:
        """These chunks, from the session's `first` on, are about to be read."""
        for index, chunk in enumerate(chunks, first):
            self._evictable -= chunk.users == 0
            chunk.users += 1
            chunk.sessions.add(session.number)
            use.offered.setdefault(chunk.key, index)
            if chunk.key not in use.stored:
                use.found.add(chunk.key)
            self.facts.passed_on(CPU, self.blocks(chunk), session.number)

    def loaded(self, chunk: CpuChunk) -> None:
        """A load that read it is over."""
        chunk.users -= 1
        if not chunk.users:
            self._idle(chunk)

    def offer(
        self, session: Session, use: Use, names: Sequence[Sequence[BlockHash]], now_s: float
    ) -> tuple[list[tuple[int, CpuChunk]], list[CpuChunk]] | None:
        """Make room for those that are not there. names: of the blocks of each chunk from `use.following` on. Returns the
        chunks to be stored, with their indices, and those evicted for them; None where not all have room."""
        keys = [own[-1] for own in names]
        new = [(index, own) for index, own in enumerate(names, use.following) if own[-1] not in self._chunks]
        found = {key for key in keys if self.get(key) is not None}
        wanted = {own[-1]: index for index, own in new}
        if missed := [key for key in wanted if key not in use.missed]:
            self.order.missed(missed)
            use.missed.update(missed)
        for index, key in enumerate(keys, use.following):
            if key in found or key in wanted:
                use.offered.setdefault(key, index)
        use.found |= found - use.stored
        evicted = self._make_room(len(new), set(keys), now_s)
        if evicted is None:
            return None
        storing = []
        for index, own in new:
            chunk = CpuChunk(self._free.pop(), own, {session.number})
            self._chunks[chunk.key] = chunk
            self._blocks.update(own)
            self.order.insert(chunk.key, session, index)
            use.stored.add(chunk.key)
            self.facts.held(CPU, self.blocks(chunk), session.number)
            storing.append((index, chunk))
        return storing, evicted

    def stored(self, chunk: CpuChunk, ok: bool) -> None:
        """Its store is over."""
        assert chunk.users == STORING
        chunk.users = 0
        if ok or chunk.gone:
            self._idle(chunk)
        else:
            self._evictable += 1
            self.remove(chunk.key)

    def remove(self, key: BlockHash) -> None:
        """Nobody shall find it any more."""
        self.order.remove(key)
        self._forget(key)

    def check(self, storing: Collection[int], loading: dict[int, int]) -> None:
        """storing: slots that are written; loading: loads by slot."""
        chunks = list(self._chunks.values())
        assert set(self.order.keys()) == set(self._chunks)
        slots = [chunk.slot for chunk in chunks]
        dying = (set(storing) | set(loading)) - set(slots)
        assert sorted([*slots, *dying, *self._free]) == list(range(self.slots))
        assert self._blocks == Counter(name for chunk in chunks for name in chunk.names)
        assert self._evictable == sum(chunk.users == 0 for chunk in chunks)
        for key, chunk in self._chunks.items():
            assert key == chunk.key and not chunk.gone and len(chunk.names) == self.blocks_per_chunk
            assert chunk.users == (STORING if chunk.slot in storing else loading.get(chunk.slot, 0))

    def _make_room(self, chunks: int, offered: set[BlockHash], now_s: float) -> list[CpuChunk] | None:
        lacking = max(0, chunks - len(self._free))
        if lacking > self._evictable:
            return None
        victims = self.order.choose(lacking, lambda key: not self._chunks[key].users and key not in offered, now_s)
        return None if victims is None else [self._forget(key) for key in victims]

    def _forget(self, key: BlockHash) -> CpuChunk:
        chunk = self._chunks.pop(key)
        for name in chunk.names:
            self._blocks[name] -= 1
            if not self._blocks[name]:
                del self._blocks[name]
        chunk.gone = True
        if not chunk.users:
            self._evictable -= 1
            self._idle(chunk)
        return chunk

    def _idle(self, chunk: CpuChunk) -> None:
        """Nobody reads or writes it."""
        if not chunk.gone:
            self._evictable += 1
            return
        self._free.append(chunk.slot)
        self.facts.freed(CPU, self.blocks(chunk))
