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

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import lt

from pensieve.core.cache.base import NO_LOWER_TIER, Broken, CacheCounters, LowerTier
from pensieve.core.cache.loops import Victim, session_and_chunk
from pensieve.core.cache.pool import BlockPool
from pensieve.core.cache.victims import VictimIndex
from pensieve.core.facts import SILENT, Facts, Found
from pensieve.core.plan import CPU, GPU, Move, Moved, Tier
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.request import TokenArray
from pensieve.core.session import NO_BLOCK, ChunkRun, Run, Session, View, chunks_of, merged, repeated, runs_of

_Place = tuple[bool, int]  # on GPU?, block


class Tiers:
    """Both pools, the copies between them, and an index of victims for each view.

    It moves chunks as it is told; which chunk has to go, the cache decides.
    """

    def __init__(
        self, policy: EvictionPolicy, chunk_tokens: int, gpu_blocks: int, cpu_blocks: int, counters: CacheCounters
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.counters = counters
        self.facts: Facts = SILENT
        self.gpu = BlockPool(gpu_blocks)
        self.cpu = BlockPool(cpu_blocks, "cpu")
        self.copies = OpenCopies(self.gpu, self.cpu)
        self.dirty = VictimIndex(policy, View.DIRTY)
        self.clean = VictimIndex(policy, View.CLEAN)
        self.cpu_only = VictimIndex(policy, View.CPU_ONLY)
        self.duplicates: dict[tuple[int, int], Session] = {}  # by session number and chunk index
        self.below: LowerTier = NO_LOWER_TIER
        """Is offered each run of chunks that is about to give up its last blocks to others."""
        self.planned: list[Move] = []
        """Decided, and in no plan yet."""
        self._index = {View.DIRTY: self.dirty, View.CLEAN: self.clean, View.CPU_ONLY: self.cpu_only}

    def report_to(self, facts: Facts) -> None:
        self.facts = self.gpu.facts = self.cpu.facts = facts

    # -- a session runs, or stops ---------------------------------------------------------------------------------------

    def pin(self, session: Session) -> None:
        """Protect the chunks of a session that starts to run: they leave the victim indices."""
        for view, victims in self._index.items():
            if view in session.chunks.view:
                victims.remove_session(session)
        self.copies.pin(session)
        session.chunks.view = bytearray(len(session.chunks))

    def unpin(self, session: Session) -> None:
        """Release the chunks of a session that has stopped: blocks without KV are freed, and the other chunks may be
        evicted."""
        chunks = session.chunks
        self.copies.unpin(session)
        lacks = 0 in chunks.gpu_len or any(map(lt, chunks.gpu_len, chunks.cpu_len))
        columns = zip(chunks.gpu, chunks.gpu_len, chunks.cpu_len, strict=True) if lacks else ()
        for index, (block, there, copied) in enumerate(columns):
            if (not there or there < copied) and block != NO_BLOCK:
                # Reserved, lost by a failed copy, or computed again but not as far as the copy on CPU.
                self.copies.abandon(session, index, index + 1)
                self.free_gpu(session, index, index + 1, discarded=True)
        for index in self.on_cpu(session):
            self.duplicates.pop((session.number, index), None)
        unused = len(chunks)
        while unused and chunks.gpu[unused - 1] == NO_BLOCK and chunks.cpu[unused - 1] == NO_BLOCK:
            if (unused - 1) * self.chunk_tokens < session.computed:
                break  # dropped, not unused: the record of a missing chunk stays
            unused -= 1
        self.copies.gone(session, unused)
        self._cut(session, unused)
        self.update(session, 0, unused)

    def reorder(self, session: Session) -> None:
        """Sort a session's chunks in anew: what the policy's order depends on has changed."""
        for view, victims in self._index.items():
            if view in session.chunks.view:
                victims.refresh(session)

    # -- chunks change their state ------------------------------------------------------------------------------------

    def update(self, session: Session, start: int, stop: int) -> None:
        """Derive the chunks' views from their records, and enter them into the victim indices accordingly."""
        if session.running:
            self.update_duplicates(session, range(start, stop))
            return
        chunks = session.chunks
        self._set_views(
            session, start, _views(chunks.gpu_len[start:stop], chunks.cpu_len[start:stop], chunks.copying[start:stop])
        )

    def update_duplicates(self, session: Session, indices: Iterable[int]) -> None:
        """Register a running session's copies on CPU as duplicates where the GPU has as much of the chunk; take the others
        of these chunks off the register."""
        chunks, number = session.chunks, session.number
        for index in indices:
            on_cpu = chunks.cpu[index] != NO_BLOCK and not chunks.copying[index]
            if on_cpu and chunks.gpu_len[index] >= chunks.cpu_len[index]:
                self.duplicates[number, index] = session
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
                session = self.duplicates.pop((number, stop))
                stop, place = stop + 1, place + 1
            self.free_cpu(session, start, stop)

    def free_copy(self, session: Session, index: int) -> None:
        """Free the CPU block of a clean chunk, whose KV stays on GPU."""
        self.free_cpu(session, index, index + 1)
        self.update(session, index, index + 1)

    def reclaim(self, session: Session, start: int, stop: int) -> None:
        """Free the GPU blocks of clean chunks, whose KV stays on CPU."""
        self.free_gpu(session, start, stop)
        self.counters.evicted_chunks += stop - start
        self._set_views(session, start, bytes((View.CPU_ONLY,)) * (stop - start))

    def drop_gpu(self, session: Session, start: int, stop: int) -> None:
        """Free the GPU blocks of chunks that are not on CPU: their KV is lost, or on disk."""
        self._store(session, start, stop, GPU)
        self.free_gpu(session, start, stop)
        self.counters.evicted_chunks += stop - start
        self._lose(session, start, stop)

    def drop_cpu(self, session: Session, start: int, stop: int) -> None:
        """Free the CPU blocks of chunks that are not on GPU: their KV is lost, or on disk."""
        self._store(session, start, stop, CPU)
        self.free_cpu(session, start, stop)
        self._lose(session, start, stop)

    def _store(self, session: Session, start: int, stop: int, source: Tier) -> None:
        move = self.below.store(session, start, stop, source, self.copies.ticket())
        if move is not None:
            self.planned.append(move)

    def invalidate(self, session: Session, start: int, stop: int) -> None:
        """Mark what the GPU blocks of a running session's chunks hold as not valid; the chunks keep the blocks."""
        for index in range(start, stop):
            session.chunks.gpu_len[index] = 0
            self.duplicates.pop((session.number, index), None)
        self.facts.not_lost(session, start, stop)  # nobody took it: its step failed

    def cut(self, session: Session, length: int) -> None:
        """Give up the KV beyond the session's first `length` tokens."""
        size, chunks = self.chunk_tokens, session.chunks
        self.discard(session, chunks_of(length, size))
        if chunks and length % size:
            index = len(chunks) - 1
            left = length - index * size
            chunks.gpu_len[index] = min(chunks.gpu_len[index], left)
            chunks.cpu_len[index] = min(chunks.cpu_len[index], left)
            self.copies.shorten(session, index, left)
            self.update(session, index, index + 1)

    def discard(self, session: Session, first: int) -> None:
        """Delete the chunks from `first` on. A block that a copy or a launched plan still uses waits in quarantine."""
        stop = len(session.chunks)
        if stop <= first:
            return
        self.copies.abandon(session, first, stop)
        self.free_gpu(session, first, stop, discarded=True)
        self.free_cpu(session, first, stop, discarded=True)
        self._set_views(session, first, bytes(stop - first))
        for index in range(first, stop) if session.running else ():
            self.duplicates.pop((session.number, index), None)
        self.copies.gone(session, first)
        self._cut(session, first)

    def free_gpu(self, session: Session, start: int, stop: int, discarded: bool = False) -> None:
        """Free the GPU blocks of these chunks. discarded: a launched plan may still write to them."""
        self._free(True, session, start, stop, discarded)

    def free_cpu(self, session: Session, start: int, stop: int, discarded: bool = False) -> None:
        self._free(False, session, start, stop, discarded)

    def _free(self, on_gpu: bool, session: Session, start: int, stop: int, discarded: bool) -> None:
        chunks = session.chunks
        column, lengths = (chunks.gpu, chunks.gpu_len) if on_gpu else (chunks.cpu, chunks.cpu_len)
        blocks = column[start:stop]
        self.copies.retire(on_gpu, session, start, blocks, discarded)
        column[start:stop] = repeated(NO_BLOCK, len(blocks))
        lengths[start:stop] = repeated(0, len(blocks))

    def move(self, source: Session, target: Session, count: int) -> None:
        """Move the first `count` chunks of an idle session to a new one, except those that a copy reads or writes."""
        old, new = source.chunks, target.chunks
        assert not new
        count = min(count, len(old))
        new.add(count)
        for index in range(count):
            if old.copying[index]:
                continue
            new.take(index, old)
            self.facts.moved(source, target, index)
            self._set_views(source, index, bytes(1))
        for pool, blocks in ((self.gpu, new.gpu), (self.cpu, new.cpu)):
            self.facts.passed_on(pool.tier, [block for block in blocks if block != NO_BLOCK], target.number)
        self.update(target, 0, count)

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy_out(self, chosen: list[Victim], sessions: Mapping[int, Session], waiting: Session | None) -> None:
        """Start the copies of dirty chunks to their CPU blocks, under one ticket; they leave their index. waiting: who needs
        their GPU blocks."""
        moves = []
        for number, start, stop in self.dirty.spans(chosen):
            chunks = sessions[number].chunks
            columns = chunks.gpu[start:stop], chunks.cpu[start:stop], chunks.gpu_len[start:stop]
            self._set_views(sessions[number], start, bytes(stop - start))
            # A block that held an older, shorter copy is overwritten with the same values, so that copy stays valid.
            moves.append(CopyRun(sessions[number], start, True, *columns))
        if not moves:
            return
        gpu, cpu = chain.from_iterable(m.gpu for m in moves), chain.from_iterable(m.cpu for m in moves)
        ticket = self.copies.open(moves, chosen)
        move = Move(ticket, GPU, CPU, tuple(gpu), tuple(cpu), urgent=waiting is not None)
        self.counters.swapped_out_blocks += len(move.src)
        self._plan(move, waiting)

    def copy_in(self, session: Session, runs: Iterable[ChunkRun]) -> int:
        """Start to load these chunks into the GPU blocks that they have; returns how many they are. Their KV counts as there
        at once; plans wait for it."""
        chunks, moves = session.chunks, []
        for start, stop in runs:
            self._set_views(session, start, bytes(stop - start))
            lengths = chunks.cpu_len[start:stop]
            moves.append(CopyRun(session, start, False, chunks.gpu[start:stop], chunks.cpu[start:stop], lengths))
            chunks.gpu_len[start:stop] = lengths
        if not moves:
            return 0
        gpu, cpu = chain.from_iterable(m.gpu for m in moves), chain.from_iterable(m.cpu for m in moves)
        move = Move(self.copies.open(moves), CPU, GPU, tuple(cpu), tuple(gpu), urgent=True)
        self.counters.swapped_in_blocks += len(move.src)
        self._plan(move, session)
        return len(move.src)

    def _plan(self, move: Move, waiting: Session | None) -> None:
        self.planned.append(move)
        if waiting is not None:
            self.facts.awaited(move.ticket, waiting)

    def read_in(self, session: Session, runs: Sequence[ChunkRun]) -> int:
        """Start to read full chunks without KV from the tier below into the GPU blocks that they have; returns the ticket.
        As with copy_in, their KV counts as there at once."""
        chunks, moves = session.chunks, []
        for start, stop in runs:
            full, nowhere = repeated(self.chunk_tokens, stop - start), repeated(NO_BLOCK, stop - start)
            moves.append(CopyRun(session, start, False, chunks.gpu[start:stop], nowhere, full, from_below=True))
            chunks.gpu_len[start:stop] = full
        ticket = self.copies.open(moves)
        self.planned.append(self.below.read(session, runs, ticket))
        return ticket

    def finish(self, over: Sequence[Moved]) -> Broken:
        """End these moves. What a tier below was given changes no chunk."""
        self.below.finish(over)
        copied: dict[int, Session] = {}
        read: dict[int, Session] = {}
        for ticket, ok, _ in over:
            moves, order = self.copies.close(ticket)
            running: dict[int, Session] = {}
            for moved in moves:
                if self._record_end(moved, ok) and moved.session.running:
                    (read if moved.from_below else copied)[moved.session.number] = moved.session
                if moved.session.running:
                    running[moved.session.number] = moved.session
                else:
                    for start, stop in moved.existing():
                        self.update(moved.session, start, stop)
            if running:
                self._update_duplicates(running, moves, order)
        return Broken(tuple(copied.values()), tuple(read.values()))

    def _record_end(self, moved: CopyRun, valid: bool) -> bool:
        """Update the records of the chunks of a copy that is over; returns whether KV on GPU was lost."""
        session, chunks = moved.session, moved.session.chunks
        lost = False
        for start, stop in moved.alive():
            if moved.outward and valid:
                chunks.cpu_len[start:stop] = moved.lengths[start - moved.first : stop - moved.first]
            elif not moved.outward and not valid:
                lost = True
                chunks.gpu_len[start:stop] = repeated(0, stop - start)
                if not session.running:
                    self.free_gpu(session, start, stop, discarded=True)
        for start, stop in moved.existing():
            for index in range(start, stop) if 0 in chunks.cpu_len[start:stop] else ():
                if not chunks.cpu_len[index] and not chunks.copying[index] and chunks.cpu[index] != NO_BLOCK:
                    self.free_cpu(session, index, index + 1)  # its copy failed
        return lost

    def _update_duplicates(self, running: dict[int, Session], moves: list[CopyRun], order: Sequence[Victim]) -> None:
        """Register duplicates in the order in which the chunks were chosen, since the oldest one is given up first."""
        existing = {
            (moved.session.number, index): moved.session
            for moved in moves
            if moved.session.number in running
            for start, stop in moved.existing()
            for index in range(start, stop)
        }
        if len(running) == 1:
            (session,) = running.values()
            self.update_duplicates(session, [index for _, index in existing])
            return
        for key in map(session_and_chunk, order):
            if key in existing:
                self.update_duplicates(existing[key], key[1:])

    # -- how --------------------------------------------------------------------------------------------------------

    def on_cpu(self, session: Session) -> list[int]:
        """Indices of the chunks that have a CPU block."""
        blocks = session.chunks.cpu
        if blocks.count(NO_BLOCK) == len(blocks):
            return []
        return [index for index, block in enumerate(blocks) if block != NO_BLOCK]

    def _lose(self, session: Session, start: int, stop: int) -> None:
        self.facts.lost(session, start, stop)
        self.counters.dropped_chunks += stop - start
        self.update(session, start, stop)

    def _cut(self, session: Session, first: int) -> None:
        """Delete the records from chunk `first` on."""
        chunks = session.chunks
        if first < len(chunks):
            self.facts.not_lost(session, first, len(chunks))
            chunks.cut(first)

    def _set_views(self, session: Session, start: int, views: bytes) -> None:
        column = session.chunks.view
        before = column[start : start + len(views)]
        if before == views:
            return
        column[start : start + len(views)] = views
        for view, victims in self._index.items():
            now, was = views.count(view), before.count(view)
            if now or was:
                victims.changed(session, now - was)


_, _DIRTY, _CLEAN, _CPU_ONLY = map(int, View)


def _views(gpu_len: TokenArray[int], cpu_len: TokenArray[int], copying: bytearray) -> bytes:
    """Views of chunks whose session does not run. The first two cases, which most turns and copies leave, need no loop."""
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


@dataclass(slots=True)
class CopyRun:
    """The copies of a run of chunks, from `first` on. outward: to CPU. from_below: to GPU, and there are no CPU blocks.
    lengths: by chunk, the leading offsets that are valid at the destination when it is done.

    fates: by chunk, whether it still has these blocks (_ALIVE), has given one of them up, which is in quarantine
    (_ABANDONED), or has ceased to exist (_GONE).
    """

    session: Session
    first: int
    outward: bool
    gpu: TokenArray[int]
    cpu: TokenArray[int]
    lengths: TokenArray[int]
    from_below: bool = False
    fates: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.fates = bytearray((_ALIVE,)) * len(self.gpu)

    @property
    def stop(self) -> int:
        return self.first + len(self.gpu)

    @property
    def outgoing(self) -> int:
        """Chunks that will be clean and evictable when it is done."""
        return self.fates.count(_ALIVE) if self.outward and not self.session.running else 0

    @property
    def incoming(self) -> int:
        """Chunks that keep the link from the CPU busy."""
        return 0 if self.outward or self.from_below else len(self.gpu)

    def alive(self) -> list[ChunkRun]:
        return self._runs((_ALIVE,))

    def existing(self) -> list[ChunkRun]:
        return self._runs((_ALIVE, _ABANDONED))

    def _runs(self, wanted: tuple[int, ...]) -> list[ChunkRun]:
        fates, first = self.fates, self.first
        if fates.count(fates[0]) == len(fates):
            return [(first, first + len(fates))] if fates[0] in wanted else []
        return runs_of([index for index, fate in enumerate(fates, first) if fate in wanted])


_ALIVE, _ABANDONED, _GONE = range(3)
_ONE_MORE = bytes((*range(1, 256), 0))
_ONE_LESS = bytes((255, *range(255)))


class OpenCopies:
    """Tickets, and quarantine: a block given up while a copy or a launched plan still uses it waits until both are done.

    Each call costs what it opens, closes or releases, however much else is under way.
    """

    def __init__(self, gpu: BlockPool, cpu: BlockPool) -> None:
        self._gpu, self._cpu = gpu, cpu
        self._open: dict[int, tuple[list[CopyRun], Sequence[Victim]]] = {}
        self._of: dict[int, list[CopyRun]] = {}  # those that are open, by session number
        # Quarantine: what each block waits for, the copies that use it and the plan, and which plan that is, ascending.
        self._holds: dict[_Place, int] = {}
        self._after_plan: deque[tuple[int, _Place]] = deque()
        self._last_ticket = 0
        self.outgoing = 0
        """Chunks that will be clean and evictable when their copy is done."""
        self.incoming = 0
        """Chunks that are being copied from the CPU to the GPU."""
        self._oldest = self._following = 0  # plans in flight: [oldest, following)

    def open(self, moves: list[CopyRun], order: Sequence[Victim] = ()) -> int:
        """Issue a ticket for these copies, and mark their chunks as copying until it is closed. order: in which they were
        chosen."""
        ticket = self.ticket()
        self._open[ticket] = moves, order
        for moved in moves:
            self._count_copies(moved, 1)
            self._of.setdefault(moved.session.number, []).append(moved)
            self.incoming += moved.incoming
            self.outgoing += moved.outgoing
        return ticket

    def ticket(self) -> int:
        self._last_ticket += 1
        return self._last_ticket

    def close(self, ticket: int) -> tuple[list[CopyRun], Sequence[Victim]]:
        """Close the ticket of copies that are done or failed; returns these, and the order in which their chunks were
        chosen. Nothing where it is not open: of a move to a tier below."""
        moves, order = self._open.pop(ticket, ([], ()))
        for moved in moves:
            own = self._of[moved.session.number]
            own.remove(moved)
            if not own:
                del self._of[moved.session.number]
            self.outgoing -= moved.outgoing
            self.incoming -= moved.incoming
            self._count_copies(moved, -1)
            if moved.fates.count(_ALIVE) < len(moved.fates):
                for fate, gpu, cpu in zip(moved.fates, moved.gpu, moved.cpu, strict=True):
                    if fate != _ALIVE:
                        self._let_go((True, gpu))
                        self._let_go((False, cpu))
        return moves, order

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    def any_of(self, session: Session) -> bool:
        """Whether an open copy reads or writes blocks that the session has or had."""
        return session.number in self._of

    def under_way(self) -> Iterator[CopyRun]:
        """Yield all open copies; for check()."""
        for moves, _ in self._open.values():
            yield from moves

    def pin(self, session: Session) -> None:
        """Stop counting a session's copies as outgoing: it runs, so their end makes no chunk evictable."""
        self.outgoing -= self._outward_of(session)

    def unpin(self, session: Session) -> None:
        """Count a session's copies as outgoing again: it has stopped."""
        self.outgoing += self._outward_of(session)

    def shorten(self, session: Session, index: int, length: int) -> None:
        """Limit what the open copies of a chunk make valid to its first `length` offsets, to which it was truncated."""
        for moved in self._of.get(session.number, ()):
            place = index - moved.first
            if 0 <= place < len(moved.fates) and moved.fates[place] == _ALIVE:
                moved.lengths[place] = min(moved.lengths[place], length)

    def abandon(self, session: Session, start: int, stop: int) -> None:
        """Mark the chunks' open copies as useless: the chunks give up their blocks, which wait in quarantine for these
        copies."""
        for moved in self._of.get(session.number, ()):
            first, last = max(start, moved.first) - moved.first, min(stop, moved.stop) - moved.first
            if first < last:
                self.outgoing -= moved.outgoing
                for place in range(first, last):
                    if moved.fates[place] == _ALIVE:
                        moved.fates[place] = _ABANDONED
                self.outgoing += moved.outgoing

    def gone(self, session: Session, first: int) -> None:
        """Mark the chunks from `first` on as deleted in open copies; those under way were abandoned before."""
        for moved in self._of.get(session.number, ()):
            place = max(first - moved.first, 0)
            assert _ALIVE not in moved.fates[place:]
            moved.fates[place:] = bytes([_GONE]) * len(moved.fates[place:])

    @property
    def in_flight(self) -> bool:
        """A plan is launched and not collected."""
        return self._following > self._oldest

    def plans(self, oldest: int, following: int) -> None:
        """Record which plans are in flight, and release the blocks that waited for earlier ones."""
        self._oldest, self._following = oldest, following
        while self._after_plan and self._after_plan[0][0] < oldest:
            self._let_go(self._after_plan.popleft()[1])

    def retire(self, on_gpu: bool, session: Session, first: int, blocks: TokenArray[int], discarded: bool) -> None:
        """Return these blocks (NO_BLOCK: none) of the chunks from `first` on to their pool, as soon as nothing uses them.

        No launched plan uses an evicted block, since its session does not run; one that was discarded may still be written
        by a plan under way.
        """
        pool = self._gpu if on_gpu else self._cpu
        waits = discarded and self.in_flight
        if not waits and not any(session.chunks.copying[first : first + len(blocks)]):
            pool.release(blocks if NO_BLOCK not in blocks else (block for block in blocks if block != NO_BLOCK))
            return
        for index, block in enumerate(blocks, first):
            if block == NO_BLOCK:
                continue
            holds = waits + (self._copies_with(on_gpu, session, index, block) if session.chunks.copying[index] else 0)
            if not holds:
                pool.release((block,))
                continue
            self._holds[on_gpu, block] = holds
            if waits:
                self._after_plan.append((self._following - 1, (on_gpu, block)))

    def quarantined(self, on_gpu: bool) -> list[int]:
        return [block for tier, block in self._holds if tier is on_gpu]

    def check(self) -> None:
        """Assert that the counts kept from call to call equal a recount."""
        moves = list(self.under_way())
        assert self.outgoing == sum(moved.outgoing for moved in moves)
        assert self.incoming == sum(moved.incoming for moved in moves)
        assert sorted(map(id, moves)) == sorted(id(moved) for own in self._of.values() for moved in own)
        holds = Counter(place for _, place in self._after_plan)
        for moved in moves:
            for block_of_tier in (((True, gpu), (False, cpu)) for gpu, cpu in zip(moved.gpu, moved.cpu, strict=True)):
                holds.update(place for place in block_of_tier if place in self._holds)
        assert holds == self._holds, "a block waits for what is over"
        plans = [plan for plan, _ in self._after_plan]
        assert plans == sorted(plans)
        assert all(plan >= self._oldest for plan in plans), "a block waits for a plan that is over"

    def _count_copies(self, moved: CopyRun, more: int) -> None:
        copying = moved.session.chunks.copying
        for start, stop in moved.existing():
            copying[start:stop] = copying[start:stop].translate(_ONE_MORE if more > 0 else _ONE_LESS)

    def _outward_of(self, session: Session) -> int:
        return sum(moved.fates.count(_ALIVE) for moved in self._of.get(session.number, ()) if moved.outward)

    def _copies_with(self, on_gpu: bool, session: Session, index: int, block: int) -> int:
        """Count the open copies that read or write this block of a chunk."""
        count = 0
        for moved in self._of.get(session.number, ()):
            blocks, place = moved.gpu if on_gpu else moved.cpu, index - moved.first
            count += 0 <= place < len(blocks) and moved.fates[place] != _GONE and blocks[place] == block
        return count

    def _let_go(self, place: _Place) -> None:
        """Record that one copy or plan is over that the block may have waited for."""
        holds = self._holds.get(place)
        if holds is None:
            return  # the chunk has it still
        if holds > 1:
            self._holds[place] = holds - 1
            return
        del self._holds[place]
        on_gpu, block = place
        (self._gpu if on_gpu else self._cpu).release((block,))


def found_in(session: Session, length: int, chunk_tokens: int, early: Collection[int] = ()) -> Found:
    """Where its first `length` positions have KV. early: chunks that were loaded for this very prompt, and so count as on
    CPU."""
    chunks = session.chunks
    gpu: list[Run] = []
    cpu: list[Run] = []
    first = min(length // chunk_tokens, len(chunks))
    if (
        first and not early and chunks.gpu_len[:first] == repeated(chunk_tokens, first)
    ):  # as most turns find their history
        gpu.append((0, first * chunk_tokens))
    else:
        first = 0
    for index in range(first, min(chunks_of(length, chunk_tokens), len(chunks))):
        start = index * chunk_tokens
        wanted = min(length - start, chunk_tokens)
        on_gpu, on_cpu = min(chunks.gpu_len[index], wanted), min(chunks.cpu_len[index], wanted)
        if index in early:
            on_gpu, on_cpu = 0, max(on_gpu, on_cpu)
        if on_gpu:
            gpu.append((start, start + on_gpu))
        if on_cpu > on_gpu:
            cpu.append((start + on_gpu, start + on_cpu))
    return Found(merged(gpu), merged(cpu))


def missing_runs(session: Session, length: int, chunk_tokens: int, cpu_too: bool = False) -> tuple[Run, ...]:
    """Maximal intervals of [0, length) without KV on GPU (swap-ins of the plan being made count as there); with cpu_too,
    without KV in either tier."""
    chunks = session.chunks
    there: Iterable[int] = map(max, chunks.gpu_len, chunks.cpu_len) if cpu_too else chunks.gpu_len
    runs: list[Run] = []
    begun, start = None, 0
    for resident in there:
        if start >= length:
            break
        if resident < chunk_tokens and start + resident < length:
            if begun is not None and resident:
                runs.append((begun, start))
                begun = None
            if begun is None:
                begun = start + resident
        elif begun is not None:
            runs.append((begun, start))
            begun = None
        start += chunk_tokens
    if begun is None and start < length:
        begun = start
    if begun is not None:
        runs.append((begun, length))
    return tuple(runs)
