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

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pensieve.cache.base import CacheCounters, Residency, Run
from pensieve.cache.pool import BlockPool
from pensieve.cache.victims import VictimIndex
from pensieve.eviction.base import EvictionPolicy
from pensieve.ledger import Loss, Missed, joined
from pensieve.plan import Copy
from pensieve.session import Chunk, Session, View, chunks_of

_Place = tuple[bool, int]  # on GPU?, block
_BEFORE_THE_FIRST = -1  # the number of no plan


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

    def free_copy(self, session: Session, index: int) -> None:
        """Give up the CPU block of a clean chunk: its KV stays on GPU."""
        self.free_cpu(session.chunks[index])
        self.update(session, index)

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
        self.discard(session, chunks_of(length, size))
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
        """To GPU blocks that the chunks have; their KV counts as there at once, and plans wait for it."""
        moves = []
        for index in indices:
            chunk = session.chunks[index]
            assert chunk.gpu is not None and chunk.cpu is not None
            self._leave_index(session, index)
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


@dataclass(slots=True)
class Transfer:
    """The copy of one chunk. outward: to CPU. length: the leading offsets that are valid at the destination when it is done.

    alive: the chunk still has these blocks; if not, they are in quarantine.
    """

    session: Session
    chunk: Chunk
    index: int
    outward: bool
    gpu: int
    cpu: int
    length: int
    alive: bool = True

    @property
    def places(self) -> tuple[_Place, _Place]:
        return (True, self.gpu), (False, self.cpu)


class Transfers:
    """Tickets, and quarantine: a block given up while a copy or a launched plan still uses it waits until both are done.

    Each call costs what it opens, closes or releases, however much else is under way.
    """

    def __init__(self, gpu: BlockPool, cpu: BlockPool) -> None:
        self._gpu, self._cpu = gpu, cpu
        self._moves: dict[int, list[Transfer]] = {}
        self._alive: dict[int, Transfer] = {}  # by id() of the chunk, which its transfer keeps in being
        self._users: Counter[_Place] = Counter()  # open transfers of a block
        # Quarantine: blocks with the last plan that may use them, ascending, and those that only copies still use.
        self._after_plan: deque[tuple[int, _Place]] = deque()
        self._after_copy: set[_Place] = set()
        self._last_ticket = 0
        self.outgoing = 0
        """Chunks that will be clean and evictable when their copy is done."""
        self.incoming = 0
        """Chunks that are being copied to the GPU."""
        self.launched = self._collected = _BEFORE_THE_FIRST

    def open(self, moves: list[Transfer]) -> int:
        """A new ticket for these chunks; each is marked as copying until it is closed."""
        self._last_ticket += 1
        self._moves[self._last_ticket] = moves
        for moved in moves:
            assert id(moved.chunk) not in self._alive, "a chunk under way is not copied a second time"
            self._alive[id(moved.chunk)] = moved
            moved.chunk.copying += 1
            self._users.update(moved.places)
            self.incoming += not moved.outward
            self.outgoing += _is_outgoing(moved)
        return self._last_ticket

    def close(self, tickets: Sequence[int]) -> Iterator[Transfer]:
        """These are over, done or failed."""
        for ticket in tickets:
            for moved in self._moves.pop(ticket):
                moved.chunk.copying -= 1
                self.incoming -= not moved.outward
                if moved.alive:
                    self.outgoing -= _is_outgoing(moved)
                    del self._alive[id(moved.chunk)]
                for place in moved.places:
                    self._leave(place)
                yield moved

    @property
    def any_open(self) -> bool:
        return bool(self._moves)

    def under_way(self) -> Iterator[Transfer]:
        """All that are open: for check()."""
        for moves in self._moves.values():
            yield from moves

    def pin(self, chunk: Chunk) -> None:
        """Its session starts to run: the end of a copy does not make it evictable."""
        moved = self._alive.get(id(chunk)) if chunk.copying else None
        self.outgoing -= moved is not None and moved.outward

    def unpin(self, chunk: Chunk) -> None:
        """Its session runs no longer."""
        moved = self._alive.get(id(chunk)) if chunk.copying else None
        self.outgoing += moved is not None and moved.outward

    def shorten(self, chunk: Chunk, length: int) -> None:
        """The chunk was truncated: what its copy brings is valid up to here at most."""
        moved = self._alive.get(id(chunk))
        if moved is not None:
            moved.length = min(moved.length, length)

    def abandon(self, chunk: Chunk) -> None:
        """The chunk gives its blocks up: they wait in quarantine for its copy, and what that brings is of no use."""
        moved = self._alive.pop(id(chunk), None)
        if moved is not None:
            self.outgoing -= _is_outgoing(moved)
            moved.alive = False

    @property
    def in_flight(self) -> bool:
        """A plan is launched and not collected."""
        return self.launched > self._collected

    def collected(self, step: int) -> None:
        """Plans up to this one are over."""
        self._collected = step
        while self._after_plan and self._after_plan[0][0] <= step:
            self._release(self._after_plan.popleft()[1])

    def retire(self, on_gpu: bool, block: int, discarded: bool) -> None:
        """Give a block back to its pool, as soon as nothing uses it.

        No launched plan uses an evicted block, since its session does not run; one that was discarded may still be written
        by a plan under way.
        """
        if discarded and self.in_flight:
            self._after_plan.append((self.launched, (on_gpu, block)))
        else:
            self._release((on_gpu, block))

    def quarantined(self, on_gpu: bool) -> list[int]:
        waiting = [*(place for _, place in self._after_plan), *self._after_copy]
        return [block for tier, block in waiting if tier is on_gpu]

    def check(self) -> None:
        """Assert that what is kept from call to call is what a recount finds."""
        moves = list(self.under_way())
        assert self.outgoing == sum(moved.alive and _is_outgoing(moved) for moved in moves)
        assert self.incoming == sum(not moved.outward for moved in moves)
        assert self._alive == {id(moved.chunk): moved for moved in moves if moved.alive}
        assert len(self._alive) == sum(moved.alive for moved in moves), "two copies of one chunk are alive"
        assert self._users == Counter(place for moved in moves for place in moved.places)
        assert all(self._users[place] for place in self._after_copy), "a block waits for a copy that is over"
        plans = [plan for plan, _ in self._after_plan]
        assert plans == sorted(plans)
        assert all(plan > self._collected for plan in plans), "a block waits for a plan that is over"

    def _leave(self, place: _Place) -> None:
        """A transfer that used the block is over."""
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            if place in self._after_copy:
                self._after_copy.remove(place)
                self._release(place)

    def _release(self, place: _Place) -> None:
        """No plan uses the block any more: free it, once no copy does."""
        if place in self._users:
            self._after_copy.add(place)
        else:
            on_gpu, block = place
            (self._gpu if on_gpu else self._cpu).release((block,))


def _is_outgoing(moved: Transfer) -> bool:
    return moved.outward and not moved.session.running


class CpuRoom:
    """CPU blocks for the chunks of one round of copies: free ones, then those of duplicates, then of the policy's victims.

    giving: a waiting conversation, and clean chunks of it: their CPU blocks count as those of duplicates.
    """

    def __init__(self, tiers: Tiers, now_s: float, giving: tuple[Session, list[int]] | None = None) -> None:
        self._tiers = tiers
        self._giving = giving
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
        if not tiers.cpu.free and self._giving is not None and self._giving[1]:
            tiers.free_copy(self._giving[0], self._giving[1].pop())
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


def residency_of(
    session: Session, keep: int, prompt: int, known: int | None, chunk_tokens: int, early: Collection[int] = ()
) -> Residency:
    """Where the history is of a prompt of `prompt` tokens whose first `keep` are the conversation's own; known overrides how
    long the history is. early: chunks that were loaded for this very prompt, and so count as on CPU."""
    history = min(keep, session.computed, prompt - 1) if known is None else min(known, prompt - 1)
    gpu_hit = cpu_hit = 0
    found = min(history, keep)
    missed = []
    for index in range(min(len(session.chunks), chunks_of(found, chunk_tokens))):
        chunk, left = session.chunks[index], found - index * chunk_tokens
        on_gpu = 0 if index in early else min(chunk.gpu_len, left)
        gpu_hit += on_gpu
        cpu_hit += min(chunk.resident_len, left) - on_gpu
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
    for index in range(chunks_of(length, chunk_tokens)):
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
