"""Where the KV of every chunk is, and the ways from one place to another.

The record of one chunk (a row of Chunks in session.py) has a block and a length in each tier. Both lengths count from the
chunk's first position, so what is missing is always a suffix:

    offset      0             cpu_len        gpu_len       chunk_tokens
    block gpu   |################################|..............|
    block cpu   |################|..............................|

An offset is on GPU if it is below gpu_len, else on CPU if it is below cpu_len, else missing. While a chunk is computed again
its gpu_len grows, and above it the copy on CPU still counts.

Session.computed counts positions of the session, not offsets. What is missing below it was dropped or evicted and is
computed again from its raw tokens; what is missing above it is computed for the first time:

    tokens      |------------------------------------------------|  len(tokens)
    computed    |------------------------------------------|
    chunks      |  CPU  |  CPU  | dropped |  GPU  |  GPU   | new |

A chunk of a session that is not running, and that no copy reads or writes, is in one of four states (View):

                 computed              copied out                 reclaim
      dropped ------------> GPU ------------------> GPU + clean copy ------> CPU
       (NONE)             (DIRTY)                      (CLEAN)            (CPU_ONLY)
         ^                   |                            ^                 |   |
         +----- drop --------+                            +--- copied in ---+   |
         +----------------------------- drop -----------------------------------+

With a disk tier (disk.py) a full chunk that is dropped is written to the file store, and read from there straight to a GPU
block when its session runs again: on disk is a fifth state, of which the record says nothing, as of dropped.

While its session runs, a chunk cannot be evicted. Its copy on CPU is then a duplicate as soon as the GPU has as much of it:
the CPU block is the first that is given up when others need one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter, lt

import numpy as np
from numpy.typing import NDArray

from pensieve.core.cache.base import NO_LOWER_TIER, Broken, CacheCounters, LowerTier
from pensieve.core.cache.blocks import ALIVE, BlockPool, CopyRun, OpenCopies
from pensieve.core.cache.heaps import HeapIndex
from pensieve.core.cache.victims import Choice, RunIndex, Span, VictimIndex, compared
from pensieve.core.facts import SILENT, Facts, Found
from pensieve.core.plan import CPU, GPU, Move, Moved, Tier
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.request import TokenArray
from pensieve.core.session import (
    NO_BLOCK,
    NO_BLOCKS,
    NOTHING,
    ChunkRun,
    Chunks,
    Node,
    Run,
    Session,
    Stem,
    View,
    chunks_of,
    merged,
)


class Tiers:
    """Both pools, the copies between them, and an index of victims for each view.

    It moves chunks as it is told; which chunk has to go, the cache decides.
    """

    from_tail = False
    """Victims are chosen from the tail, so that what is left of a conversation is a prefix."""

    def __init__(
        self,
        policy: EvictionPolicy,
        chunk_tokens: int,
        gpu_blocks: int,
        cpu_blocks: int,
        counters: CacheCounters,
    ) -> None:
        self.chunk_tokens, self.full = chunk_tokens, array("i", (chunk_tokens,))
        self.counters = counters
        self.facts: Facts = SILENT
        self.gpu, self.cpu = self._pool(gpu_blocks, GPU), self._pool(cpu_blocks, CPU)
        self.copies = OpenCopies(self.gpu, self.cpu)
        self.dirty = self._victims(policy, View.DIRTY)
        self.clean = self._victims(policy, View.CLEAN)
        self.cpu_only = self._victims(policy, View.CPU_ONLY)
        self.duplicates: dict[tuple[int, int], Node] = {}  # by node and chunk
        self.below: LowerTier = NO_LOWER_TIER
        """Is offered each run of chunks that is about to give up its last blocks to others."""
        self.shares = False
        """What is lost is told by content: several sessions may have it."""
        self.planned: list[Move] = []
        """Decided, and in no plan yet."""
        self._index = {View.DIRTY: self.dirty, View.CLEAN: self.clean, View.CPU_ONLY: self.cpu_only}

    def _pool(self, blocks: int, tier: Tier) -> BlockPool:
        return BlockPool(blocks, tier)

    def use(self, pool: Callable[[int, Tier], BlockPool]) -> None:
        """Make other pools of both tiers, before there is any session."""
        self.gpu, self.cpu = (pool(one.blocks, one.tier) for one in (self.gpu, self.cpu))
        self.copies = OpenCopies(self.gpu, self.cpu)

    def _victims(self, policy: EvictionPolicy, view: View) -> VictimIndex:
        at_once = policy.many is not None and not policy.whole_conversations
        return RunIndex(policy, view) if at_once else HeapIndex(policy, view)

    def report_to(self, facts: Facts) -> None:
        self.facts = self.gpu.facts = self.cpu.facts = facts

    # -- a session runs, or stops ---------------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Protect the chunks of a node of which a session starts to run: they leave the victim indices."""
        node.running += 1
        if node.running > 1:
            return
        for view, victims in self._index.items():
            if view in node.chunks.view:
                victims.remove(node)
        self.copies.pin(node, runs=True)
        node.chunks.view = bytearray(len(node.chunks.view))

    def unpin(self, node: Node) -> None:
        """Release the chunks of a node of which a session has stopped, unless another one runs: blocks without KV are freed,
        and the other chunks may be evicted."""
        node.running -= 1
        if node.running:
            return
        chunks = node.chunks
        self.copies.pin(node, runs=False)
        lacks = 0 in chunks.gpu_len or any(map(lt, chunks.gpu_len, chunks.cpu_len))
        columns = zip(chunks.gpu, chunks.gpu_len, chunks.cpu_len, strict=True) if lacks else ()
        for index, (block, there, copied) in enumerate(columns):
            if (not there or there < copied) and block != NO_BLOCK:
                # Reserved, lost by a failed copy, or computed again but not as far as the copy on CPU.
                self.copies.abandon(node, index, index + 1)
                self.free_gpu(node, index, index + 1, discarded=True)
        for index, block in enumerate(chunks.cpu):
            if block != NO_BLOCK:
                self.duplicates.pop((node.number, index), None)
        unused = len(chunks.view)
        while unused and chunks.gpu[unused - 1] == NO_BLOCK and chunks.cpu[unused - 1] == NO_BLOCK:
            if isinstance(node, Stem) or (node.start + unused - 1) * self.chunk_tokens < node.session.computed:
                break  # dropped, not unused: the record of a missing chunk stays
            unused -= 1
        self.copies.gone(node, unused)
        self._cut(node, unused)
        self.update(node, 0, unused)

    def reorder(self, node: Node) -> None:
        """Sort a node's chunks in anew: what the policy's order depends on has changed."""
        for view, victims in self._index.items():
            if view in node.chunks.view:
                victims.refresh(node)

    # -- chunks change their state ------------------------------------------------------------------------------------

    def update(self, node: Node, start: int, stop: int) -> None:
        """Derive the chunks' views from their records, and enter them into the victim indices accordingly."""
        if node.running:
            self.update_duplicates(node, range(start, stop))
            return
        chunks = node.chunks
        self._set_views(
            node, start, _views(chunks.gpu_len[start:stop], chunks.cpu_len[start:stop], chunks.copying[start:stop])
        )

    def update_duplicates(self, node: Node, indices: Iterable[int]) -> None:
        """Register a running node's copies on CPU as duplicates where the GPU has as much of the chunk; take the others
        of these chunks off the register."""
        chunks, number = node.chunks, node.number
        for index in indices:
            on_cpu = chunks.cpu[index] != NO_BLOCK and not chunks.copying[index]
            if on_cpu and chunks.gpu_len[index] >= chunks.cpu_len[index]:
                self.duplicates[number, index] = node
            else:
                self.duplicates.pop((number, index), None)

    def free_duplicates(self, count: int) -> None:
        """Free the CPU blocks of the oldest duplicates, `count` at most; no KV is lost."""
        oldest = list(islice(self.duplicates, count))
        place = 0
        while place < len(oldest):
            number, start = oldest[place]
            stop = start
            while place < len(oldest) and oldest[place] == (number, stop):
                node = self.duplicates.pop((number, stop))
                stop, place = stop + 1, place + 1
            self.free_cpu(node, start, stop)

    def reclaim(self, spans: Sequence[Span]) -> None:
        """Free the GPU blocks of clean chunks, whose KV stays on CPU."""
        self.counters.evicted_chunks += self._free_victims(True, spans)
        for node, start, stop in spans:
            self._set_views(node, start, bytes((View.CPU_ONLY,)) * (stop - start))

    def drop_gpu(self, spans: Sequence[Span]) -> None:
        """Free the GPU blocks of chunks that are not on CPU: their KV is lost, or on disk."""
        self._store(spans, GPU)
        self.counters.evicted_chunks += self._free_victims(True, spans)
        self._lose(spans)

    def drop_cpu(self, spans: Sequence[Span]) -> None:
        """Free the CPU blocks of chunks that are not on GPU: their KV is lost, or on disk."""
        self._store(spans, CPU)
        self._free_victims(False, spans)
        self._lose(spans)

    def _free_victims(self, on_gpu: bool, spans: Sequence[Span]) -> int:
        """Free the blocks of chunks that are in a view, which no copy or plan uses; returns how many there were."""
        blocks = array("i")
        for node, start, stop in spans:
            chunks = node.chunks
            column, lengths = (chunks.gpu, chunks.gpu_len) if on_gpu else (chunks.cpu, chunks.cpu_len)
            blocks += column[start:stop]
            column[start:stop] = NO_BLOCKS * (stop - start)
            lengths[start:stop] = NOTHING * (stop - start)
        (self.gpu if on_gpu else self.cpu).release(blocks)
        return len(blocks)

    def _store(self, spans: Iterable[Span], source: Tier) -> None:
        for node, start, stop in spans if self.below.blocks else ():
            move = self.below.store(node, start, stop, source, self.copies.ticket())
            if move is not None:
                self.planned.append(move)

    def invalidate(self, node: Node, start: int, stop: int) -> None:
        """Mark what the GPU blocks of a running node's chunks hold as not valid; the chunks keep the blocks."""
        for index in range(start, stop):
            node.chunks.gpu_len[index] = 0
            self.duplicates.pop((node.number, index), None)
        self._not_lost(node, start, stop)  # nobody took it: its step failed

    def strand(self, node: Node, start: int, stop: int) -> None:
        """Mark all KV of these chunks of a node that is about to run as not valid; they keep their GPU blocks."""
        self.copies.abandon(node, start, stop)
        self.free_cpu(node, start, stop)
        self.invalidate(node, start, stop)

    def cut(self, node: Node, length: int) -> None:
        """Give up the KV beyond the node's first `length` tokens."""
        size, chunks = self.chunk_tokens, node.chunks
        self.discard(node, chunks_of(length, size))
        if chunks and length % size:
            index = len(chunks) - 1
            left = length - index * size
            chunks.gpu_len[index] = min(chunks.gpu_len[index], left)
            chunks.cpu_len[index] = min(chunks.cpu_len[index], left)
            self.copies.shorten(node, index, left)
            self.update(node, index, index + 1)

    def discard(self, node: Node, first: int) -> None:
        """Delete the chunks from `first` on. A block that a copy or a launched plan still uses waits in quarantine."""
        stop = len(node.chunks)
        if stop <= first:
            return
        self.copies.abandon(node, first, stop)
        self.free_gpu(node, first, stop, discarded=True)
        self.free_cpu(node, first, stop, discarded=True)
        self._set_views(node, first, bytes(stop - first))
        for index in range(first, stop) if node.running else ():
            self.duplicates.pop((node.number, index), None)
        self.copies.gone(node, first)
        self._cut(node, first)

    def free_gpu(self, node: Node, start: int, stop: int, discarded: bool = False) -> None:
        """Free the GPU blocks of these chunks. discarded: a launched plan may still write to them."""
        self._free(True, node, start, stop, discarded)

    def free_cpu(self, node: Node, start: int, stop: int, discarded: bool = False) -> None:
        self._free(False, node, start, stop, discarded)

    def _free(self, on_gpu: bool, node: Node, start: int, stop: int, discarded: bool) -> None:
        chunks = node.chunks
        column, lengths = (chunks.gpu, chunks.gpu_len) if on_gpu else (chunks.cpu, chunks.cpu_len)
        blocks = column[start:stop]
        self.copies.retire(on_gpu, node, start, blocks, discarded)
        column[start:stop] = NO_BLOCKS * len(blocks)
        lengths[start:stop] = NOTHING * len(blocks)

    def move(self, source: Node, target: Node, count: int) -> None:
        """Move the first `count` chunks of an idle node to a new one, except those that a copy reads or writes."""
        old, new = source.chunks, target.chunks
        assert not new
        count = min(count, len(old))
        new.add(count)
        for index in range(count):
            if old.copying[index]:
                continue
            new.take(index, old)
            self.facts.moved(source.session, target.session, index)
            self._set_views(source, index, bytes(1))
        for pool, blocks in ((self.gpu, new.gpu), (self.cpu, new.cpu)):
            held = [block for block in blocks if block != NO_BLOCK]
            self.facts.passed_on(pool.tier, held, target.session.number)
        self.update(target, 0, count)

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy_out(self, chosen: Choice, waiting: Session | None) -> None:
        """Start the copies of dirty chunks to their CPU blocks, under one ticket; they leave their index. waiting: who needs
        their GPU blocks."""
        moves = []
        for node, start, stop in chosen.spans():
            chunks = node.chunks
            columns = chunks.gpu[start:stop], chunks.cpu[start:stop], chunks.gpu_len[start:stop]
            self._set_views(node, start, bytes(stop - start))
            # A block that held an older, shorter copy is overwritten with the same values, so that copy stays valid.
            moves.append(CopyRun(node, start, True, *columns))
        self.counters.swapped_out_blocks += self._copy(moves, GPU, CPU, waiting)

    def copy_in(self, session: Session, runs: Iterable[ChunkRun]) -> int:
        """Start to load these chunks of a session into the GPU blocks that they have; returns how many they are. Their KV
        counts as there at once; plans wait for it."""
        moves = []
        for node, start, stop in session.in_nodes(runs):
            chunks = node.chunks
            self._set_views(node, start, bytes(stop - start))
            lengths = chunks.cpu_len[start:stop]
            moves.append(CopyRun(node, start, False, chunks.gpu[start:stop], chunks.cpu[start:stop], lengths))
            chunks.gpu_len[start:stop] = lengths
        blocks = self._copy(moves, CPU, GPU, session)
        self.counters.swapped_in_blocks += blocks
        return blocks

    def _copy(self, moves: list[CopyRun], source: Tier, target: Tier, waiting: Session | None) -> int:
        """Plan these copies, all of one direction; returns how many blocks they are of."""
        if not moves:
            return 0
        src, dst = (
            chain.from_iterable(map(attrgetter(source), moves)),
            chain.from_iterable(map(attrgetter(target), moves)),
        )
        move = Move(self.copies.open(moves), source, target, tuple(src), tuple(dst), urgent=waiting is not None)
        self.planned.append(move)
        if waiting is not None:
            self.facts.awaited(move.ticket, waiting)
        return len(move.src)

    def read_in(self, session: Session, runs: Sequence[ChunkRun]) -> int:
        """Start to read full chunks without KV from the tier below into the GPU blocks that they have; returns the ticket.
        As with copy_in, their KV counts as there at once."""
        moves = []
        for node, start, stop in session.in_nodes(runs):
            full, nowhere = self.full * (stop - start), NO_BLOCKS * (stop - start)
            moves.append(CopyRun(node, start, False, node.chunks.gpu[start:stop], nowhere, full, from_below=True))
            node.chunks.gpu_len[start:stop] = full
        ticket = self.copies.open(moves)
        self.planned.append(self.below.read(session, runs, ticket))
        return ticket

    def finish(self, over: Sequence[Moved]) -> Broken:
        """End these moves. What a tier below was given changes no chunk."""
        if self.below.blocks:
            self.below.finish(over)
        copied: dict[int, Node] = {}
        read: dict[int, Node] = {}
        for ticket, ok, _ in over:
            for moved, existing in self.copies.close(ticket):
                if self._record_end(moved, existing, ok) and moved.node.running:
                    (read if moved.from_below else copied)[moved.node.number] = moved.node
                for start, stop in existing:
                    self.update(moved.node, start, stop)
        if not copied and not read:
            return Broken()
        return Broken(*(tuple(user for node in nodes.values() for user in node.users) for nodes in (copied, read)))

    def _record_end(self, moved: CopyRun, existing: Iterable[ChunkRun], valid: bool) -> bool:
        """Update the records of the existing chunks of a copy that is over; returns whether KV on GPU was lost."""
        node, chunks = moved.node, moved.node.chunks
        lost = False
        for start, stop in moved.runs(ALIVE):
            if moved.outward and valid:
                chunks.cpu_len[start:stop] = moved.lengths[start - moved.first : stop - moved.first]
            elif not moved.outward and not valid:
                lost = True
                chunks.gpu_len[start:stop] = NOTHING * (stop - start)
                if not node.running:
                    self.free_gpu(node, start, stop, discarded=True)
        for start, stop in existing:
            for index in range(start, stop) if 0 in chunks.cpu_len[start:stop] else ():
                if not chunks.cpu_len[index] and not chunks.copying[index] and chunks.cpu[index] != NO_BLOCK:
                    self.free_cpu(node, index, index + 1)  # its copy failed
        return lost

    def lost_for_want(self, lacking: Choice, now_s: float) -> tuple[list[int], Choice]:
        """Of those for which no CPU block is free, those that are lost, by row; and those on CPU that are lost in place of
        the others."""
        free = self.cpu.free
        there = self.cpu_only.choose(len(lacking) - free, now_s)
        ours, others = compared(lacking.some(slice(free, None)), there)
        lost, instead = [], 0
        for row, place in enumerate(ours, free):
            if instead == len(others) or place < others[instead]:
                lost.append(row)
            else:
                instead += 1
        return lost, there.some(slice(instead))

    # -- how --------------------------------------------------------------------------------------------------------

    def _lose(self, spans: Iterable[Span]) -> None:
        """The last copies of these chunks are gone."""
        for node, start, stop in spans:
            if self.shares:
                for name in node.named(stop, self.chunk_tokens)[start:]:
                    self.facts.lost_content(name)
            else:
                self.facts.lost(node.session, node.start + start, node.start + stop)
            self.counters.dropped_chunks += stop - start
            self.update(node, start, stop)

    def _cut(self, node: Node, first: int) -> None:
        """Delete the records from chunk `first` on."""
        chunks = node.chunks
        if first < len(chunks.view):
            self._not_lost(node, first, len(chunks.view))
            chunks.cut(first)

    def _not_lost(self, node: Node, start: int, stop: int) -> None:
        if not self.shares:
            self.facts.not_lost(node.session, node.start + start, node.start + stop)

    def _set_views(self, node: Node, start: int, views: bytes) -> None:
        column = node.chunks.view
        before = column[start : start + len(views)]
        if before == views:
            return
        column[start : start + len(views)] = views
        for view, victims in self._index.items():
            now, was = views.count(view), before.count(view)
            if now or was:
                victims.changed(node, now - was)


_, _DIRTY, _CLEAN, _CPU_ONLY = map(int, View)


def _views(gpu_len: TokenArray[int], cpu_len: TokenArray[int], copying: bytearray) -> bytes:
    """Views of chunks that no session runs on. The first two cases, which most turns and copies leave, need no loop."""
    count = len(gpu_len)
    if copying.count(0) == count:
        if gpu_len == cpu_len and 0 not in gpu_len:
            return bytes((View.CLEAN,)) * count
        if not any(cpu_len):
            return bytes(map(bool, gpu_len)).replace(b"\x01", bytes((View.DIRTY,)))
    columns = zip(gpu_len, cpu_len, copying, strict=True)
    return bytes(
        [0 if busy else (_CLEAN if gpu == cpu else _DIRTY) if gpu else cpu and _CPU_ONLY for gpu, cpu, busy in columns]
    )


def found_in(session: Session, length: int, chunk_tokens: int, early: Collection[int] = ()) -> Found:
    """Where its first `length` positions have KV. early: chunks that were loaded for this very prompt, and so count as on
    CPU."""
    chunks = session.chunks
    whole = length // chunk_tokens
    if early or not whole or chunks.gpu_len[:whole] != array("i", (chunk_tokens,)) * whole:
        whole = 0
    starts = np.arange(whole, min(chunks_of(length, chunk_tokens), len(chunks))) * chunk_tokens
    wanted, some = np.minimum(length - starts, chunk_tokens), slice(whole, whole + len(starts))
    on_gpu, on_cpu = np.minimum(chunks.gpu_len[some], wanted), np.minimum(chunks.cpu_len[some], wanted)
    for index in early:
        if index < len(starts):
            on_gpu[index], on_cpu[index] = 0, max(on_gpu[index], on_cpu[index])
    gpu = _intervals(starts, starts + on_gpu)
    if whole:  # as most turns find their history
        gpu = merged(((0, whole * chunk_tokens), *gpu))
    return Found(gpu, _intervals(starts + on_gpu, starts + on_cpu))


def _intervals(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[Run, ...]:
    """Ascending intervals without the empty ones, neighbours joined."""
    there = starts < stops
    starts, stops = starts[there], stops[there]
    if not len(starts):
        return ()
    apart = starts[1:] != stops[:-1]
    first, last = np.append(True, apart), np.append(apart, True)
    return tuple(zip(starts[first].tolist(), stops[last].tolist(), strict=True))


def missing_runs(chunks: Chunks, length: int, chunk_tokens: int, cpu_too: bool = False) -> tuple[Run, ...]:
    """Maximal intervals of [0, length) without KV on GPU (swap-ins of the plan being made count as there); with cpu_too,
    without KV in either tier."""
    there = np.array(chunks.gpu_len, np.int64)
    if cpu_too:
        there = np.maximum(there, chunks.cpu_len)
    ends = np.arange(1, len(there) + 2) * chunk_tokens
    ends[-1] = max(length, ends[-1])
    starts = np.append(ends[:-1] - chunk_tokens + there, ends[-1] - chunk_tokens)
    starts[-1] = len(there) * chunk_tokens
    return _intervals(starts, np.minimum(ends, length))
