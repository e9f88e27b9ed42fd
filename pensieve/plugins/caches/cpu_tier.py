"""A CPU tier of content in chunks of several blocks, as vLLM's OffloadingConnector keeps it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pensieve.core.block_hash import BlockHash
from pensieve.core.facts import Facts
from pensieve.core.plan import CPU
from pensieve.core.session import Session
from pensieve.plugins.caches.cpu_orders import CpuOrder, Use

STORING = -1


@dataclass(slots=True)
class CpuChunk:
    """slot: its place in the tier. names: of its blocks; the last one is the chunk's own. users: loads that read it; STORING
    until its store is done. gone: it is not to be found any more, and its slot is free when nobody reads or writes it."""

    slot: int
    names: Sequence[BlockHash]
    users: int = STORING
    gone: bool = False

    @property
    def key(self) -> BlockHash:
        return self.names[-1]


class CpuTier:
    """The rules of vLLM 0.32's CPUOffloadingManager (v1/kv_offload/cpu/manager.py): what is offered and not there is stored
    as a whole or not at all; what is being stored, read or offered is not evicted."""

    def __init__(self, slots: int, blocks_per_chunk: int, order: CpuOrder) -> None:
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
        missed = [own[-1] for _, own in new if own[-1] not in use.missed]
        if missed:
            self.order.missed(missed)
            use.missed.update(missed)
        wanted = {own[-1] for _, own in new}
        for index, key in enumerate(keys, use.following):
            if key in found or key in wanted:
                use.offered.setdefault(key, index)
        use.found |= found - use.stored
        evicted = self._make_room(len(new), set(keys), now_s)
        if evicted is None:
            return None
        storing = []
        for index, own in new:
            chunk = CpuChunk(self._free.pop(), own)
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
        lacking = chunks - len(self._free)
        if lacking <= 0:
            return []
        if lacking > self._evictable:
            return None
        victims = self.order.choose(lacking, lambda key: not self._chunks[key].users and key not in offered, now_s)
        if victims is None:
            return None
        return [self._forget(key) for key in victims]

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
