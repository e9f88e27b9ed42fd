"""The disk tier: which full chunks are in the file store, what they are called there, and which are worth reading.

A chunk goes there when it would be lost: its CPU block is wanted (or its GPU block, where it was not on CPU), and the copy on
disk is what stays. It comes back straight to a GPU block. The store knows chunks by content (block_hash.py): the name of a
chunk is a digest of its tenant and of all tokens up to its end, so a session can only find KV of its very tokens,
also after a restart, and whatever became of the file meanwhile.

This module decides; it reads and writes nothing. A worker does that in a thread, so that each read finds what the writes
decided before it have left: a block may be given to another chunk while it is still to be read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from pensieve.core.block_hash import BlockHash
from pensieve.core.cache.base import LowerTier
from pensieve.core.cache.tiers import missing_runs
from pensieve.core.cost import CostModel, predicted_s
from pensieve.core.facts import SILENT, Facts
from pensieve.core.plan import DiskLoad, DiskStore
from pensieve.core.session import ChunkRun, Session, runs_of, without


class DiskTier(LowerTier):
    """An index of the file store, least recently written or read first: that is who gives up a block.

    Full chunks only: the last one of a session, partly filled, is computed again with the next message. counts: what it
    has done, by metric name.
    """

    def __init__(
        self,
        blocks: int,
        chunk_tokens: int,
        load_s: float,
        layers: int,
        cost: CostModel,
        kept: Mapping[BlockHash, int],
        counts: dict[str, float],
    ) -> None:
        """load_s: seconds to read a chunk. kept: blocks that an earlier engine has filled, oldest first."""
        self.blocks, self.counts = blocks, counts
        counts.update(disk_stored_chunks=0, disk_loaded_chunks=0, disk_declined_chunks=0)
        self._size, self._load_s, self._layers, self._cost = chunk_tokens, load_s, layers, cost
        self._block_of: OrderedDict[BlockHash, int] = OrderedDict(kept)
        taken = set(kept.values())
        self._free = [block for block in reversed(range(blocks)) if block not in taken]
        self._work: list[DiskStore | DiskLoad] = []
        self._reading: dict[int, int] = {}  # chunks by ticket
        self._facts: Facts = SILENT

    # -- query --------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        return len(self._block_of)

    @property
    def has_work(self) -> bool:
        return bool(self._work)

    def holds(self, session: Session, index: int) -> bool:
        return session.name_known(index) in self._block_of

    def worth_reading(self, session: Session) -> list[ChunkRun]:
        """Reads under way come first. The last token is computed in any case."""
        size, layers = self._size, self._layers
        names = session.named(min(session.computed, len(session.tokens) - 1), size)
        there = map(max, session.chunks.gpu_len, session.chunks.cpu_len)
        wanted = [
            index
            for index, (resident, name) in enumerate(zip(there, names, strict=False))
            if not resident and name in self._block_of
        ]
        if not wanted:
            return []
        chosen: list[ChunkRun] = []
        work = list(missing_runs(session, len(session.tokens), size))
        waiting = sum(self._reading.values())
        for first, stop in runs_of(wanted):
            rest = list(without(work, ((first * size, stop * size),)))
            computes_s, rest_s = predicted_s(self._cost, work, size), predicted_s(self._cost, rest, size)
            first_layer_s = (waiting + (stop - first) / layers) * self._load_s
            reads_s = (waiting + stop - first) * self._load_s
            if max(first_layer_s + rest_s, reads_s + rest_s / layers) < computes_s:
                chosen.append((first, stop))
                work, waiting = rest, waiting + stop - first
            else:
                self.counts["disk_declined_chunks"] += stop - first
        return chosen

    # -- what is to be done -------------------------------------------------------------------------------------------

    def store(self, session: Session, start: int, stop: int, on_gpu: bool) -> None:
        chunks, size = session.chunks, self._size
        blocks, lengths = (chunks.gpu, chunks.gpu_len) if on_gpu else (chunks.cpu, chunks.cpu_len)
        names = session.named(min(stop * size, session.computed), size)
        for index in range(start, stop):
            # The last token's KV may be there, of a turn that was undone, and not count: its chunk has no name.
            if index < len(names) and lengths[index] == size:
                self._store_chunk(names[index], on_gpu, blocks[index], session.number)

    def _store_chunk(self, name: BlockHash, on_gpu: bool, src: int, holder: int) -> None:
        if name in self._block_of:
            self._block_of.move_to_end(name)
            self._facts.passed_on("disk", (self._block_of[name],), holder)
            return
        if self._free:
            dst = self._free.pop()
            self._facts.held("disk", dst, 1, holder)
        else:
            dst = self._block_of.popitem(last=False)[1]
            self._facts.passed_on("disk", (dst,), holder)
        self._block_of[name] = dst
        self._work.append(DiskStore(name, on_gpu, src, dst))
        self.counts["disk_stored_chunks"] += 1

    def read(self, session: Session, runs: Iterable[ChunkRun], ticket: int) -> None:
        names = session.named(session.computed, self._size)
        indices = [index for start, stop in runs for index in range(start, stop)]
        chosen = [names[index] for index in indices]
        gpu = tuple(session.chunks.gpu[index] for index in indices)
        for name in chosen:
            self._block_of.move_to_end(name)
        blocks = tuple(self._block_of[name] for name in chosen)
        self._facts.passed_on("disk", blocks, session.number)
        self._work.append(DiskLoad(ticket, tuple(chosen), blocks, gpu))
        self._reading[ticket] = len(chosen)
        self.counts["disk_loaded_chunks"] += len(chosen)

    def take_work(self) -> tuple[DiskStore | DiskLoad, ...]:
        work, self._work = tuple(self._work), []
        return work

    # -- what became of it --------------------------------------------------------------------------------------------

    def finished(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self._reading.pop(ticket, None)

    def remove(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            block = self._block_of.pop(name, None)
            if block is not None:
                self._free.append(block)
                self._facts.freed("disk", block, 1)

    # -- sessions -----------------------------------------------------------------------------------------------------

    def forget(self, session: Session) -> None:
        self.remove(session.named(session.computed, self._size))

    def report_to(self, facts: Facts) -> None:
        self._facts = facts
        facts.tier("disk", self.blocks, self._block_of.values())

    def check(self) -> None:
        assert sorted([*self._free, *self._block_of.values()]) == list(range(self.blocks))
