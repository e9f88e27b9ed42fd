"""Where the KV of every chunk is, and the ways from one place to another.

The record of one chunk (Chunk in session.py) has a block and a length in each tier. Both lengths count from the chunk's
first position, so what is missing is always a suffix:

    offset      0             cpu_len        gpu_len       chunk_tokens
    block gpu   |################################|..............|
    block cpu   |################|..............................|

An offset is on GPU if it is below gpu_len, else on CPU if it is below cpu_len, else missing. While a chunk is computed again
its gpu_len grows, and above it the copy on CPU still counts.

Session.computed counts positions of the conversation, not offsets. What is missing below it was dropped or evicted and is
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

While its session runs, a chunk cannot be evicted. Its copy on CPU is then a duplicate as soon as the GPU has as much of it:
the CPU block is the first that is given up when others need one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pensieve.cache.base import CacheCounters, Residency, Run
from pensieve.cache.pool import BlockPool
from pensieve.cache.transfers import Transfer, Transfers
from pensieve.cache.victims import VictimIndex
from pensieve.eviction.base import EvictionPolicy
from pensieve.ledger import Loss, Missed, joined
from pensieve.plan import Copy
from pensieve.session import Chunk, Session, View
from pensieve.units import ceil_div


class Tiers:
    """Both pools, the copies between them, and an index of victims a view.

    It changes where a chunk is when it is told to; which chunk it is that must go, the cache decides.
    """

    def __init__(
        self, policy: EvictionPolicy, chunk_tokens: int, gpu_blocks: int, cpu_blocks: int, counters: CacheCounters
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.counters = counters
        self.taker = Loss("", 0.0)  # as CacheManager's
        self.gpu = BlockPool(gpu_blocks)
        self.cpu = BlockPool(cpu_blocks)
        self.transfers = Transfers(self.gpu, self.cpu)
        self.dirty = VictimIndex(policy, View.DIRTY)
        self.clean = VictimIndex(policy, View.CLEAN)
        self.cpu_only = VictimIndex(policy, View.CPU_ONLY)
        self.duplicates: dict[tuple[int, int], tuple[Session, Chunk]] = {}  # by session number and chunk index
        self._index = {View.DIRTY: self.dirty, View.CLEAN: self.clean, View.CPU_ONLY: self.cpu_only}

    # -- a session runs, or stops ---------------------------------------------------------------------------------------

    def pin(self, session: Session) -> None:
        """It starts to run: its chunks leave the indices."""
        for victims in self._index.values():
            victims.remove_session(session)
        for chunk in session.chunks:
            self.transfers.pin(chunk)
            chunk.view = View.NONE

    def unpin(self, session: Session) -> None:
        """It runs no longer: blocks without KV come back, and the other chunks may be evicted."""
        for index, chunk in enumerate(session.chunks):
            self.transfers.unpin(chunk)
            if chunk.gpu is not None and (chunk.gpu_len == 0 or chunk.gpu_len < chunk.cpu_len):
                # Reserved, lost by a failed copy, or computed again but not as far as the copy on CPU.
                self.transfers.abandon(chunk)
                self.free_gpu(chunk, discarded=True)
            self.duplicates.pop((session.number, index), None)
        while session.chunks and session.chunks[-1].gpu is None and session.chunks[-1].cpu is None:
            if (len(session.chunks) - 1) * self.chunk_tokens < session.computed:
                break  # dropped, not unused: the record of a missing chunk stays
            session.chunks.pop()
        for index in range(len(session.chunks)):
            self.update(session, index)

    def reorder(self, session: Session) -> None:
        """What its place in the order of eviction depends on has changed."""
        for victims in self._index.values():
            victims.refresh(session)

    # -- a chunk changes its state --------------------------------------------------------------------------------------

    def update(self, session: Session, index: int) -> None:
        """Bring the chunk into the index that its record says."""
        chunk = session.chunks[index]
        if chunk.cpu is not None and not chunk.cpu_len and not chunk.copying:
            self.free_cpu(chunk)  # its copy failed
        if session.running:
            self.update_duplicate(session, index)
            return
        if chunk.copying:
            view = View.NONE
        elif chunk.gpu_len:
            view = View.CLEAN if chunk.cpu_len == chunk.gpu_len else View.DIRTY
        else:
            view = View.CPU_ONLY if chunk.cpu_len else View.NONE
        if view is not chunk.view:
            self._leave_index(session, index)
            chunk.view = view
            if view is not View.NONE:
                self._index[view].add(session, index)

    def update_duplicate(self, session: Session, index: int) -> None:
        """Of a running session: whether the chunk's copy on CPU is one that the GPU has as much of."""
        chunk = session.chunks[index]
        if chunk.cpu is not None and not chunk.copying and chunk.gpu_len >= chunk.cpu_len:
            self.duplicates[session.number, index] = (session, chunk)
        else:
            self.duplicates.pop((session.number, index), None)

    def free_duplicate(self) -> None:
        """Give up the CPU block of one of them; no KV is lost by it."""
        _, chunk = self.duplicates.pop(next(iter(self.duplicates)))
        self.free_cpu(chunk)

    def reclaim(self, session: Session, index: int) -> None:
        """Take the GPU block of a clean chunk, whose KV stays on CPU."""
        self.free_gpu(session.chunks[index])
        self.counters.evicted_chunks += 1
        self.update(session, index)

    def drop_gpu(self, session: Session, index: int) -> None:
        """Take the GPU block of a chunk that is not on CPU: its KV is lost."""
        self.free_gpu(session.chunks[index])
        session.chunks[index].lost = self.taker
        self.counters.evicted_chunks += 1
        self.counters.dropped_chunks += 1
        self.update(session, index)

    def drop_cpu(self, session: Session, index: int) -> None:
        """Take the CPU block of a chunk that is not on GPU: its KV is lost."""
        self.free_cpu(session.chunks[index])
        session.chunks[index].lost = self.taker
        self.counters.dropped_chunks += 1
        self.update(session, index)

    def invalidate(self, session: Session, index: int) -> None:
        """Of a running session: what the chunk's GPU block holds is not valid."""
        session.chunks[index].gpu_len = 0
        session.chunks[index].lost = None  # nobody took it: its step failed
        self.duplicates.pop((session.number, index), None)

    def cut(self, session: Session, length: int) -> None:
        """The conversation has only the first `length` tokens now: KV of the others is given up."""
        size = self.chunk_tokens
        self.discard(session, ceil_div(length, size))
        if session.chunks and length % size:
            index = len(session.chunks) - 1
            chunk, left = session.chunks[index], length - index * size
            chunk.gpu_len, chunk.cpu_len = min(chunk.gpu_len, left), min(chunk.cpu_len, left)
            self.transfers.shorten(chunk, left)
            self.update(session, index)

    def discard(self, session: Session, first: int) -> None:
        """Chunks from `first` on cease to exist; a block that a copy or a launched plan still uses waits in quarantine."""
        while len(session.chunks) > first:
            chunk = session.chunks[-1]
            self.transfers.abandon(chunk)
            if chunk.gpu is not None:
                self.free_gpu(chunk, discarded=True)
            if chunk.cpu is not None:
                self.free_cpu(chunk, discarded=True)
            self.update(session, len(session.chunks) - 1)
            session.chunks.pop()

    def free_gpu(self, chunk: Chunk, discarded: bool = False) -> None:
        """discarded: a launched plan may still write to the block."""
        assert chunk.gpu is not None
        block, chunk.gpu, chunk.gpu_len = chunk.gpu, None, 0
        self.transfers.retire(True, block, discarded)

    def free_cpu(self, chunk: Chunk, discarded: bool = False) -> None:
        assert chunk.cpu is not None
        block, chunk.cpu, chunk.cpu_len = chunk.cpu, None, 0
        self.transfers.retire(False, block, discarded)

    def move(self, source: Session, target: Session, count: int) -> None:
        """The first `count` chunks of an idle conversation to a new one, but for those that a copy reads or writes."""
        assert not target.chunks
        for index, chunk in enumerate(source.chunks[:count]):
            if chunk.copying:
                target.chunks.append(Chunk())
                continue
            self._leave_index(source, index)
            source.chunks[index] = Chunk(lost=self.taker)
            target.chunks.append(chunk)
            self.update(target, index)

    # -- copies -----------------------------------------------------------------------------------------------------

    def outward(self, session: Session, index: int) -> Transfer:
        """The copy of a dirty chunk to its CPU block, not started; the chunk leaves its index."""
        chunk = session.chunks[index]
        assert chunk.gpu is not None and chunk.cpu is not None
        self._leave_index(session, index)
        # A block that held an older, shorter copy is overwritten with the same values, so that copy stays valid.
        return Transfer(session, chunk, index, True, chunk.gpu, chunk.cpu, chunk.gpu_len)

    def copy_out(self, moves: list[Transfer], urgent: bool) -> tuple[Copy, ...]:
        if not moves:
            return ()
        self.counters.swapped_out_blocks += len(moves)
        ticket = self.transfers.open(moves)
        return (Copy(ticket, tuple(m.gpu for m in moves), tuple(m.cpu for m in moves), urgent=urgent),)

    def copy_in(self, session: Session, indices: Iterable[int]) -> tuple[Copy, ...]:
        """Of a running session, to GPU blocks that it has; their KV counts as there at once, and plans wait for it."""
        moves = []
        for index in indices:
            chunk = session.chunks[index]
            assert chunk.gpu is not None and chunk.cpu is not None
            moves.append(Transfer(session, chunk, index, False, chunk.gpu, chunk.cpu, chunk.cpu_len))
            chunk.gpu_len = chunk.cpu_len
        if not moves:
            return ()
        self.counters.swapped_in_blocks += len(moves)
        ticket = self.transfers.open(moves)
        return (Copy(ticket, tuple(m.cpu for m in moves), tuple(m.gpu for m in moves), urgent=True),)

    def finish(self, tickets: Sequence[int], valid: bool) -> list[Session]:
        """These copies are over; not valid: what they wrote is nothing. Returns the running sessions that lost KV by it."""
        lost: dict[str, Session] = {}
        for moved in self.transfers.close(tickets):
            session, chunk = moved.session, moved.chunk
            if moved.alive and moved.outward and valid:
                chunk.cpu_len = moved.length
            elif moved.alive and not moved.outward and not valid:
                chunk.gpu_len = 0
                if session.running:
                    lost[session.name] = session
                else:
                    self.free_gpu(chunk, discarded=True)
            if moved.index < len(session.chunks) and session.chunks[moved.index] is chunk:
                self.update(session, moved.index)
        return list(lost.values())

    def _leave_index(self, session: Session, index: int) -> None:
        chunk = session.chunks[index]
        before, chunk.view = chunk.view, View.NONE
        if before is not View.NONE:
            self._index[before].remove(session, index)


class CpuRoom:
    """CPU blocks for the chunks of one round of copies: free ones, then those of duplicates, then of the policy's victims."""

    def __init__(self, tiers: Tiers, now_s: float) -> None:
        self._tiers = tiers
        self._now_s = now_s
        self._victims = tiers.cpu_only.victims(now_s)
        self._victim: tuple[Session, int] | None = None

    def give(self, session: Session, index: int) -> bool:
        """See that this chunk, which leaves the GPU, has a CPU block. False where every CPU block holds what the policy would
        keep longer than this chunk: then it is this chunk that should be lost."""
        tiers, chunk = self._tiers, session.chunks[index]
        if chunk.cpu is not None:
            return True
        if not tiers.cpu.free and tiers.duplicates:
            tiers.free_duplicate()
        if not tiers.cpu.free:
            self._victim = self._victim or next(self._victims, None)
            if self._victim is None:
                return False
            rank = tiers.cpu_only.rank
            if rank(session, index, self._now_s) < rank(*self._victim, self._now_s):
                return False
            tiers.drop_cpu(*self._victim)
            self._victim = None
        if not tiers.cpu.free:
            return False  # the block is read by a copy, and waits for that
        chunk.cpu = tiers.cpu.allocate_after(session.chunks[index - 1].cpu if index else None)
        return True


def residency_of(session: Session, keep: int, prompt: int, known: int | None, chunk_tokens: int) -> Residency:
    """Where the history is of a prompt of `prompt` tokens whose first `keep` are the conversation's own; known overrides how
    long the history is."""
    history = min(keep, session.computed, prompt - 1) if known is None else min(known, prompt - 1)
    gpu_hit = cpu_hit = 0
    found = min(history, keep)
    missed = []
    for index in range(min(len(session.chunks), ceil_div(found, chunk_tokens))):
        chunk, left = session.chunks[index], found - index * chunk_tokens
        on_gpu = min(chunk.gpu_len, left)
        gpu_hit += on_gpu
        cpu_hit += max(0, min(chunk.cpu_len, left) - on_gpu)
        if chunk.resident_len < min(left, chunk_tokens):
            start, stop = index * chunk_tokens + chunk.resident_len, index * chunk_tokens + min(left, chunk_tokens)
            missed.append(Missed(start, stop, "evicted" if chunk.lost else "never_stored", chunk.lost))
    missed.append(Missed(min(len(session.chunks) * chunk_tokens, found), found, "never_stored"))
    missed.append(Missed(found, history, "edited"))  # known to the workload, at another place
    return Residency(prompt, history, gpu_hit, cpu_hit, elsewhere=0, anywhere=history, missed=joined(missed))


def missing_runs(session: Session, length: int, chunk_tokens: int, cpu_too: bool = False) -> tuple[Run, ...]:
    """Maximal intervals of [0, length) without KV on GPU (swap-ins of the plan being made count as there); with cpu_too,
    without KV in either tier."""
    runs: list[list[int]] = []
    for index in range(ceil_div(length, chunk_tokens)):
        start = index * chunk_tokens
        stop = min(start + chunk_tokens, length)
        missing = start
        if index < len(session.chunks):
            chunk = session.chunks[index]
            missing += chunk.resident_len if cpu_too else chunk.gpu_len
        if missing >= stop:
            continue
        if runs and runs[-1][1] == missing:
            runs[-1][1] = stop
        else:
            runs.append([missing, stop])
    return tuple((start, stop) for start, stop in runs)
