"""Pensieve's cache: KV on GPU, then on CPU, then as raw tokens (paper sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pensieve.cache.base import Admission, CacheCounters, Demand, EvictionPolicy, Residency, Run
from pensieve.cache.chunk import Chunk, View
from pensieve.cache.cpu_room import CpuRoom
from pensieve.cache.invariants import check_two_tier
from pensieve.cache.pool import BlockPool
from pensieve.cache.residency import demand_of, residency_of
from pensieve.cache.restore import RestoreMode, Restorer
from pensieve.cache.session import Session, Sessions, missing_runs
from pensieve.cache.shadows import Shadows
from pensieve.cache.transfers import Transfer, Transfers
from pensieve.cache.victims import VictimIndex
from pensieve.cost.base import CostModel
from pensieve.plan import Copy
from pensieve.request import TokenArray
from pensieve.units import ceil_div


class TwoTierCache:
    """Every KV position of a conversation is on GPU, on CPU, or missing (its raw token is kept, so it can be recomputed).

    With cpu_blocks = 0 it is the GPU-only baseline: evicting a chunk drops it, and every idle chunk counts as available.
    Pinning forbids eviction only. A block whose chunk was truncated or forgotten while a copy or a launched plan still
    uses it waits in quarantine. The states of a chunk are in chunk.py, the ways to `restore` those on CPU in restore.py.
    """

    grows = True
    shares = False

    def __init__(
        self,
        *,
        policy: EvictionPolicy,
        chunk_tokens: int,
        gpu_blocks: int,
        cpu_blocks: int,
        restore: RestoreMode = "load",
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.gpu_blocks = self.request_blocks = gpu_blocks
        self.cpu_blocks = cpu_blocks
        self.counters = CacheCounters()
        self.sessions = Sessions()
        self.gpu = BlockPool(gpu_blocks)
        self.cpu = BlockPool(cpu_blocks)
        self.dirty = VictimIndex(policy, View.DIRTY)
        self.clean = VictimIndex(policy, View.CLEAN)
        self.cpu_only = VictimIndex(policy, View.CPU_ONLY)
        self._index = {View.DIRTY: self.dirty, View.CLEAN: self.clean, View.CPU_ONLY: self.cpu_only}
        self.shadows = Shadows()
        self.transfers = Transfers(self.gpu, self.cpu)
        self.restorer = Restorer(restore, chunk_tokens, self.counters)
        self._running = 0
        self._observe: Callable[[Session, float], None] | None = getattr(policy, "observe", None)

    def weigh(self, cost: CostModel, layers: int, batch_tokens: int) -> None:
        """What a hybrid restore is decided by: until it is known, everything on CPU is loaded."""
        self.restorer.weigh(cost, layers, batch_tokens)

    # -- predicates ---------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        idle = self.clean.chunks if self.cpu_blocks else self.clean.chunks + self.dirty.chunks
        return self.gpu.free + idle

    @property
    def outgoing(self) -> int:
        return self.transfers.outgoing

    def find(self, name: str) -> Session | None:
        return self.sessions.get(name)

    def names(self) -> list[str]:
        return list(self.sessions)

    def demand(self, session: Session, keep: int, length: int) -> Demand:
        return demand_of(session, keep, length, self.chunk_tokens, self.cpu_blocks > 0, self.transfers.in_flight)

    # -- sessions -----------------------------------------------------------------------------------------------------

    def open(self, name: str, now_s: float) -> Session:
        return self.sessions.open(name, now_s)

    def expect(self, session: Session, next_use_s: float | None) -> None:
        session.next_use_s = next_use_s
        self._refresh(session)

    def hold(self, session: Session, now_s: float) -> None:
        session.waiting += 1
        self._refresh(session)

    def unhold(self, session: Session, now_s: float) -> None:
        session.waiting -= 1
        assert session.waiting >= 0
        self._refresh(session)

    def truncate(self, session: Session, length: int) -> None:
        assert not session.running
        del session.tokens[length:]
        session.computed = min(session.computed, length)
        size = self.chunk_tokens
        while len(session.chunks) > ceil_div(length, size):
            self._discard(session, len(session.chunks) - 1)
            session.chunks.pop()
        if session.chunks and length % size:
            index = len(session.chunks) - 1
            chunk, left = session.chunks[index], length - index * size
            chunk.gpu_len, chunk.cpu_len = min(chunk.gpu_len, left), min(chunk.cpu_len, left)
            self.transfers.shorten(chunk, left)
            self._file(session, index)

    def forget(self, session: Session) -> None:
        self.truncate(session, 0)
        self.sessions.pop(session.name, None)

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self, session: Session, keep: int, suffix: TokenArray[int], known: int | None, now_s: float) -> Admission:
        residency = residency_of(session, keep, keep + len(suffix), known, self.chunk_tokens)
        if keep < len(session.tokens):
            self.truncate(session, keep)
        session.tokens.extend(suffix)
        if self._observe is not None:
            self._observe(session, now_s)
        return self._pin(session, residency, now_s)

    def resume(self, session: Session, now_s: float) -> Admission:
        length = len(session.tokens)
        return self._pin(session, Residency(length, length - 1, 0, 0), now_s)

    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        first = len(session.chunks)
        count = ceil_div(length, self.chunk_tokens) - first
        if count <= 0:
            return first, ()
        if count > self.available:
            return None
        blocks = self._take_gpu(count, now_s, behind=session.chunks[-1].gpu if count == 1 and first else None)
        session.chunks.extend(Chunk(gpu=block, pins=1) for block in blocks)
        return first, blocks

    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        size = self.chunk_tokens
        for start, stop in runs:
            for index in range(start // size, ceil_div(stop, size)):
                chunk = session.chunks[index]
                assert chunk.gpu is not None
                assert chunk.gpu_len == max(start - index * size, 0), "KV is computed in ascending order"
                chunk.gpu_len = min(stop - index * size, size)
                if chunk.cpu is not None:
                    self.shadows.file(session, index, chunk)
            session.computed = max(session.computed, stop)

    def release(self, session: Session, now_s: float) -> None:
        self._unpin(session, now_s)

    def suspend(self, session: Session, now_s: float) -> tuple[Copy, ...]:
        self._unpin(session, now_s)
        chosen = [(session, index) for index, chunk in enumerate(session.chunks) if chunk.view is View.DIRTY]
        return self._copy_out(chosen, now_s, urgent=True) if self.cpu_blocks else ()

    def end_suspended(self, session: Session, now_s: float) -> None:
        return None  # its KV is idle like that of any turn that ended

    # -- eviction -----------------------------------------------------------------------------------------------------

    def swap_out(self, blocks: int, now_s: float, urgent: bool) -> tuple[Copy, ...]:
        if not self.cpu_blocks or blocks <= 0:
            return ()
        return self._copy_out(self.dirty.victims(now_s), now_s, urgent, blocks)

    def drop(self, blocks: int, now_s: float) -> int:
        dropped = 0
        if blocks > 0:
            for session, index in self.dirty.victims(now_s):
                self._drop_gpu(session, index)
                dropped += 1
                if self.dirty.enough(session, dropped, blocks):
                    break
        return dropped

    def reclaim(self, blocks: int, now_s: float) -> int:
        """Free GPU blocks of clean chunks, whose KV stays on CPU; returns how many there were."""
        taken = 0
        if blocks > 0:
            for session, index in self.clean.victims(now_s):
                self._free_gpu(session.chunks[index])
                self.counters.evicted_chunks += 1
                self._file(session, index)
                taken += 1
                if self.clean.enough(session, taken, blocks):
                    break
        return taken

    def complete(self, tickets: Sequence[int]) -> None:
        self._settle(tickets, valid=True)

    def void(self, tickets: Sequence[int]) -> list[Session]:
        return self._settle(tickets, valid=False)

    def fail(self, session: Session, written: Iterable[Run]) -> None:
        size = self.chunk_tokens
        for start, stop in written:
            for index in range(start // size, ceil_div(stop, size)):
                session.chunks[index].gpu_len = 0
                self.shadows.remove(session, index)

    def launched(self, step: int) -> None:
        self.transfers.launched = step

    def collected(self, step: int) -> None:
        self.transfers.collected(step)

    def check(self) -> None:
        check_two_tier(self)

    # -- how --------------------------------------------------------------------------------------------------------

    def _pin(self, session: Session, residency: Residency, now_s: float) -> Admission:
        size, length = self.chunk_tokens, len(session.tokens)
        for victims in self._index.values():
            victims.remove_session(session)
        session.running = True
        self._running += 1
        session.last_active_s = now_s
        total = ceil_div(length + 1, size)
        session.chunks.extend(Chunk() for _ in range(total - len(session.chunks)))
        for chunk in session.chunks:
            self.transfers.pin(chunk)
            chunk.view = View.NONE
        lacking = [chunk for chunk in session.chunks if chunk.gpu is None]
        for chunk, block in zip(lacking, self._take_gpu(len(lacking), now_s), strict=True):
            chunk.gpu = block
        restore = self.restorer.choose(session, self.transfers.incoming, alone=self._running == 1)
        swap_in = self._copy_in(session, restore.load)
        for index, chunk in enumerate(session.chunks):
            self.shadows.file(session, index, chunk)
        work = missing_runs(session, length, size)
        again = sum(max(0, min(stop, session.computed) - start) for start, stop in work)
        table = tuple(chunk.gpu for chunk in session.chunks if chunk.gpu is not None)
        return Admission(residency, work, table, swap_in, restore.loaded_tokens, again, restore.recomputed_tokens)

    def _unpin(self, session: Session, now_s: float) -> None:
        session.running = False
        self._running -= 1
        session.last_active_s = now_s
        session.computed = min(session.computed, max(len(session.tokens) - 1, 0))
        for index, chunk in enumerate(session.chunks):
            self.transfers.unpin(chunk)
            if chunk.gpu is not None and (chunk.gpu_len == 0 or chunk.gpu_len < chunk.cpu_len):
                # Reserved, voided, or computed again but not as far as the copy on CPU.
                self.transfers.abandon(chunk)
                self._free_gpu(chunk, discarded=True)
            self.shadows.remove(session, index)
        while session.chunks and session.chunks[-1].gpu is None and session.chunks[-1].cpu is None:
            if (len(session.chunks) - 1) * self.chunk_tokens < session.computed:
                break  # dropped, not unused: the record of a missing chunk stays
            session.chunks.pop()
        for index in range(len(session.chunks)):
            self._file(session, index)

    def _copy_in(self, session: Session, chunks: list[int]) -> tuple[Copy, ...]:
        if not chunks:
            return ()
        moves = []
        for index in chunks:
            chunk = session.chunks[index]
            assert chunk.gpu is not None and chunk.cpu is not None
            moves.append(Transfer(session, chunk, index, False, chunk.gpu, chunk.cpu, chunk.cpu_len))
            chunk.gpu_len = chunk.cpu_len
        self.counters.swapped_in_blocks += len(moves)
        ticket = self.transfers.open(moves)
        return (Copy(ticket, tuple(m.cpu for m in moves), tuple(m.gpu for m in moves), urgent=True),)

    def _copy_out(
        self, chosen: Iterable[tuple[Session, int]], now_s: float, urgent: bool, most: int | None = None
    ) -> tuple[Copy, ...]:
        moves = []
        room = CpuRoom(self, now_s)
        started = 0
        for session, index in chosen:
            chunk = session.chunks[index]
            if chunk.cpu is None:
                chunk.cpu = room.block(session, index)
            if chunk.cpu is None:
                self._drop_gpu(session, index)
            else:
                assert chunk.gpu is not None
                # A block that held an older, shorter copy is overwritten with the same values, so that copy stays valid.
                moves.append(Transfer(session, chunk, index, True, chunk.gpu, chunk.cpu, chunk.gpu_len))
                self._leave_view(session, index)
            started += 1
            if self.dirty.enough(session, started, most):
                break
        if not moves:
            return ()
        self.counters.swapped_out_blocks += len(moves)
        ticket = self.transfers.open(moves)
        return (Copy(ticket, tuple(m.gpu for m in moves), tuple(m.cpu for m in moves), urgent=urgent),)

    def _take_gpu(self, count: int, now_s: float, behind: int | None = None) -> tuple[int, ...]:
        """Free blocks, reclaimed from clean chunks (or, without a CPU tier, dropped) as far as they are lacking."""
        lacking = count - self.gpu.free
        taken = self.reclaim(lacking, now_s)
        if taken < lacking:
            assert not self.cpu_blocks, "admission took more blocks than are available"
            self.drop(lacking - taken, now_s)
        return self.gpu.allocate(count) if behind is None else (self.gpu.allocate_after(behind),)

    def _drop_gpu(self, session: Session, index: int) -> None:
        chunk = session.chunks[index]
        self._free_gpu(chunk)
        self.counters.evicted_chunks += 1
        self.counters.dropped_chunks += 1
        self._file(session, index)

    def drop_cpu(self, session: Session, index: int) -> None:
        chunk = session.chunks[index]
        self.free_cpu(chunk)
        self.counters.dropped_chunks += 1
        self._file(session, index)

    def _discard(self, session: Session, index: int) -> None:
        """The chunk ceases to exist (truncated or forgotten); blocks under way go to quarantine."""
        chunk = session.chunks[index]
        self.transfers.abandon(chunk)
        if chunk.gpu is not None:
            self._free_gpu(chunk, discarded=True)
        if chunk.cpu is not None:
            self.free_cpu(chunk, discarded=True)
        self._file(session, index)

    def _file(self, session: Session, index: int) -> None:
        """Bring the chunk into the index its record says."""
        chunk = session.chunks[index]
        if chunk.cpu is not None and not chunk.cpu_len and not chunk.copying:
            self.free_cpu(chunk)  # its copy was voided
        if chunk.pins:
            self.shadows.file(session, index, chunk)
            return
        if chunk.copying:
            view = View.NONE
        elif chunk.gpu_len:
            view = View.CLEAN if chunk.cpu_len == chunk.gpu_len else View.DIRTY
        else:
            view = View.CPU_ONLY if chunk.cpu_len else View.NONE
        if view is not chunk.view:
            self._leave_view(session, index)
            chunk.view = view
            if view is not View.NONE:
                self._index[view].add(session, index)

    def _leave_view(self, session: Session, index: int) -> None:
        chunk = session.chunks[index]
        before, chunk.view = chunk.view, View.NONE
        if before is not View.NONE:
            self._index[before].remove(session, index)

    def _refresh(self, session: Session) -> None:
        for victims in self._index.values():
            victims.refresh(session)

    def _settle(self, tickets: Sequence[int], valid: bool) -> list[Session]:
        """Returns the running conversations that lost KV by it."""
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
                    self._free_gpu(chunk, discarded=True)
            if moved.index < len(session.chunks) and session.chunks[moved.index] is chunk:
                self._file(session, moved.index)
        return list(lost.values())

    def _free_gpu(self, chunk: Chunk, discarded: bool = False) -> None:
        assert chunk.gpu is not None
        block, chunk.gpu, chunk.gpu_len = chunk.gpu, None, 0
        self.transfers.retire(True, block, discarded)

    def free_cpu(self, chunk: Chunk, discarded: bool = False) -> None:
        assert chunk.cpu is not None
        block, chunk.cpu, chunk.cpu_len = chunk.cpu, None, 0
        self.transfers.retire(False, block, discarded)
