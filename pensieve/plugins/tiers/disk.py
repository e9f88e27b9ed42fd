"""The disk tier: which full chunks are in the file store, what they are called there, and which are worth reading.

A chunk goes there when it would be lost: its CPU block is wanted (or its GPU block, where it was not on CPU), and the copy on
disk is what stays. It comes back straight to a GPU block. The store knows chunks by content (HashChain): the name of a
chunk is a digest of its tenant and of all tokens up to its end, so a session can only find KV of its very tokens,
also after a restart, and whatever became of the file meanwhile.

This module decides; it reads and writes nothing. A worker does that in a thread, so that each read finds what the writes
decided before it have left: a block may be given to another chunk while it is still to be read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pensieve.core.cache.base import LowerTier
from pensieve.core.cache.tiers import missing_runs
from pensieve.core.facts import SILENT, Facts
from pensieve.core.machine import CostModel
from pensieve.core.plan import GPU, Move, Moved, StartReport, Tier
from pensieve.core.session import BlockHash, ChunkRun, Node, Session, runs_of
from pensieve.serve.books.books import predicted_s, without

if TYPE_CHECKING:
    from pensieve.plugins.tiers.disk_transfer import DiskTransfer


class DiskTier(LowerTier):
    """An index of the file store, least recently written or read first: that is who gives up a block.

    Full chunks only: the last one of a session, partly filled, is computed again with the next message.
    """

    name = "disk"

    def __init__(
        self, blocks: int, bandwidth: float = 0.0, transfer: Callable[..., DiskTransfer] | None = None
    ) -> None:
        self.blocks, self.bandwidth, self.transfer = blocks, bandwidth, transfer
        self._block_of: OrderedDict[BlockHash, int] = OrderedDict()
        self._reading: dict[int, int] = {}  # chunks by ticket
        self._facts: Facts = SILENT

    def begin(
        self, report: StartReport, chunk_tokens: int, layers: int, cost: CostModel, counts: dict[str, float]
    ) -> None:
        self.counts = counts
        counts.update(disk_stored_chunks=0, disk_loaded_chunks=0, disk_declined_chunks=0)
        self._size, self._load_s, self._layers, self._cost = chunk_tokens, report.below_load_s, layers, cost
        self._block_of.update(report.below_kept)
        taken = set(report.below_kept.values())
        self._free = [block for block in reversed(range(self.blocks)) if block not in taken]

    # -- query --------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        return len(self._block_of)

    def holds(self, session: Session, index: int) -> bool:
        return session.name_known(index) in self._block_of

    def worth_reading(self, session: Session, length: int) -> list[ChunkRun]:
        """Reads under way come first."""
        size, layers = self._size, self._layers
        there = map(max, session.chunks.gpu_len, session.chunks.cpu_len)
        known = enumerate(zip(there, session.named(length, size), strict=False))
        wanted = [index for index, (resident, name) in known if not resident and name in self._block_of]
        if not wanted:
            return []
        chosen: list[ChunkRun] = []
        work = list(missing_runs(session.chunks, len(session.tokens), size))
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

    def store(self, node: Node, start: int, stop: int, source: Tier, ticket: int) -> Move | None:
        chunks, size = node.chunks, self._size
        blocks, lengths = (chunks.gpu, chunks.gpu_len) if source == GPU else (chunks.cpu, chunks.cpu_len)
        names = node.named(stop, size)
        leaving = [
            (names[index], blocks[index], target)
            # The last token's KV may be there and does not count (Session.stop): its chunk has no name.
            for index in range(start, min(stop, len(names)))
            if lengths[index] == size and (target := self._place(names[index], node.session.number)) is not None
        ]
        if not leaving:
            return None
        self.counts["disk_stored_chunks"] += len(leaving)
        keys, src, dst = zip(*leaving, strict=True)
        return Move(ticket, source, self.name, src, dst, keys)

    def _place(self, name: BlockHash, holder: int) -> int | None:
        """A block for a chunk, which is that of the chunk written or read longest ago where none is free; None where the
        chunk is there already."""
        if name in self._block_of:
            self._block_of.move_to_end(name)
            self._facts.passed_on(self.name, (self._block_of[name],), holder)
            return None
        if self._free:
            target = self._free.pop()
            self._facts.held(self.name, (target,), holder)
        else:
            target = self._block_of.popitem(last=False)[1]
            self._facts.passed_on(self.name, (target,), holder)
        self._block_of[name] = target
        return target

    def read(self, session: Session, runs: Iterable[ChunkRun], ticket: int) -> Move:
        indices = [index for start, stop in runs for index in range(start, stop)]
        names = session.named((max(indices) + 1) * self._size, self._size)
        chosen = [names[index] for index in indices]
        gpu = tuple(session.chunks.gpu[index] for index in indices)
        for name in chosen:
            self._block_of.move_to_end(name)
        blocks = tuple(self._block_of[name] for name in chosen)
        self._facts.passed_on(self.name, blocks, session.number)
        self._reading[ticket] = len(chosen)
        self.counts["disk_loaded_chunks"] += len(chosen)
        return Move(ticket, self.name, GPU, blocks, gpu, tuple(chosen), urgent=True)

    # -- what became of it --------------------------------------------------------------------------------------------

    def finish(self, moved: Iterable[Moved]) -> None:
        for one in moved:
            self._reading.pop(one.ticket, None)
            self._remove(one.gone)

    def _remove(self, names: Iterable[BlockHash]) -> None:
        blocks = [self._block_of.pop(name) for name in names if name in self._block_of]
        self._free += blocks
        self._facts.freed(self.name, blocks)

    # -- sessions -----------------------------------------------------------------------------------------------------

    def forget(self, session: Session) -> None:
        self._remove(session.named(session.computed, self._size))

    def report_to(self, facts: Facts) -> None:
        self._facts = facts
        facts.tier(self.name, self.blocks, self._block_of.values())

    def check(self) -> None:
        assert sorted([*self._free, *self._block_of.values()]) == list(range(self.blocks))
