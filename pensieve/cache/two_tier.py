"""Pensieve's cache: KV on GPU, then on CPU, then as raw tokens (paper sections 4.2 and 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from pensieve.cache.base import Admission, CacheManager, Demand, Residency, Run, edited_run
from pensieve.cache.invariants import check_tiers
from pensieve.cache.restore import RestoreMode, Restorer
from pensieve.cache.tiers import CpuRoom, Tiers, missing_runs, residency_of
from pensieve.cost.base import CostModel
from pensieve.eviction.base import EvictionPolicy, as_policy
from pensieve.plan import Copy
from pensieve.request import TokenArray
from pensieve.session import Chunk, Session, View, chunks_of
from pensieve.units import ceil_div

_STAGES = 8  # an exchange that has no GPU block to begin with makes room for so large a part of it


class TwoTierCache(CacheManager):
    """Decides what is copied, loaded, computed again and lost; tiers.py keeps where everything is.

    Every KV position of a conversation is on GPU, on CPU, or missing (its raw token is kept, so it can be recomputed). With
    cpu_blocks = 0 it is the GPU-only baseline: evicting a chunk drops it, and every idle chunk counts as available.
    """

    def __init__(
        self,
        *,
        policy: EvictionPolicy,
        chunk_tokens: int,
        gpu_blocks: int,
        cpu_blocks: int,
        restore: RestoreMode = "load",
    ) -> None:
        super().__init__(chunk_tokens, gpu_blocks, cpu_blocks)
        self.policy = as_policy(policy)
        self.tiers = Tiers(self.policy, chunk_tokens, gpu_blocks, cpu_blocks, self.counters)
        self.restorer = Restorer(restore, chunk_tokens, self.counters)
        self._running = 0
        self._early: dict[int, set[int]] = {}
        """By number of a waiting session: its chunks that were loaded from the CPU before its admission."""

    def set_cost_model(self, cost: CostModel, layers: int, batch_tokens: int) -> None:
        self.restorer.set_cost_model(cost, layers, batch_tokens)

    # -- query --------------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        tiers = self.tiers
        return tiers.gpu.free + tiers.clean.chunks + (0 if self.cpu_blocks else tiers.dirty.chunks)

    @property
    def outgoing(self) -> int:
        return self.tiers.transfers.outgoing

    @property
    def settled(self) -> bool:
        return not self.tiers.transfers.any_open

    @property
    def can_swap_out(self) -> bool:
        return bool(self.cpu_blocks and self.tiers.dirty.chunks)

    @property
    def gpu_blocks_used(self) -> int:
        return self.gpu_blocks - self.tiers.gpu.free

    @property
    def cpu_blocks_used(self) -> int:
        return self.cpu_blocks - self.tiers.cpu.free

    def free_blocks(self) -> tuple[set[int], set[int]]:
        return self.tiers.gpu.free_blocks(), self.tiers.cpu.free_blocks()

    def demand(self, session: Session, keep: int, length: int) -> Demand:
        total = chunks_of(
            length + 1, self.chunk_tokens
        )  # one more position: the first token decoded needs no new block
        kept = chunks_of(keep, self.chunk_tokens)
        own = own_available = 0
        # With a plan in flight, blocks of chunks that are not kept go to quarantine: they are not to be had either.
        for index, chunk in enumerate(session.chunks if self.tiers.transfers.in_flight else session.chunks[:kept]):
            own += index < kept and chunk.gpu is not None
            own_available += chunk.view is View.CLEAN or (not self.cpu_blocks and chunk.view is View.DIRTY)
        return Demand(blocks=total - own, own_available=own_available)

    def places(self, session: Session) -> str:
        letters = [_letter(chunk) for chunk in list(session.chunks)]
        return "".join(letters).ljust(chunks_of(len(session.tokens), self.chunk_tokens), "-")

    # -- admit --------------------------------------------------------------------------------------------------------

    def admit(self, session: Session, keep: int, suffix: TokenArray[int], known: int | None, now_s: float) -> Admission:
        early = self._early.get(session.number, ())
        residency = residency_of(session, keep, keep + len(suffix), known, self.chunk_tokens, early)
        edited = edited_run(session, keep, suffix, residency.history)
        if edited:
            residency = replace(residency, missed=residency.missed + edited)
        if keep < len(session.tokens):
            self.truncate(session, keep)
        session.extend(suffix)
        if self.policy.observe is not None:
            self.policy.observe(session, now_s)
        return self._start(session, residency, now_s)

    def resume(self, session: Session, now_s: float) -> Admission:
        length = len(session.tokens)
        return self._start(session, Residency(length, length - 1, 0, 0), now_s)

    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        first = len(session.chunks)
        count = chunks_of(length, self.chunk_tokens) - first
        if count <= 0:
            return first, ()
        if count > self.available:
            return None
        blocks = self._take_gpu(count, now_s, behind=session.chunks[-1].gpu if count == 1 and first else None)
        session.chunks.extend(Chunk(gpu=block) for block in blocks)
        return first, blocks

    def _start(self, session: Session, residency: Residency, now_s: float) -> Admission:
        """Reserve what its tokens and one more need, and decide what of it is loaded."""
        tiers, size, length = self.tiers, self.chunk_tokens, len(session.tokens)
        total = chunks_of(length + 1, size)
        session.chunks.extend(Chunk() for _ in range(total - len(session.chunks)))
        session.start(now_s)
        self._running += 1
        tiers.pin(session)
        lacking = [chunk for chunk in session.chunks if chunk.gpu is None]
        for chunk, block in zip(lacking, self._take_gpu(len(lacking), now_s), strict=True):
            chunk.gpu = block
        restore = self.restorer.choose(session, tiers.transfers.incoming, alone=self._running == 1)
        swap_in = tiers.copy_in(session, restore.load)
        for index in range(total):
            tiers.update_duplicate(session, index)
        work = missing_runs(session, length, size)
        again = sum(max(0, min(stop, session.computed) - start) for start, stop in work)
        table = tuple(chunk.gpu for chunk in session.chunks if chunk.gpu is not None)
        return Admission(residency, work, table, swap_in, restore.loaded_tokens, again, restore.recomputed_tokens)

    # -- progress -----------------------------------------------------------------------------------------------------

    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        size = self.chunk_tokens
        for start, stop in runs:
            for index in range(start // size, chunks_of(stop, size)):
                chunk = session.chunks[index]
                assert chunk.gpu is not None
                assert chunk.gpu_len == max(start - index * size, 0), "KV is computed in ascending order"
                chunk.gpu_len = min(stop - index * size, size)
                if chunk.cpu is not None:
                    self.tiers.update_duplicate(session, index)
            session.advance(stop)

    def launched(self, step: int) -> None:
        self.tiers.transfers.launched = step

    def collected(self, step: int) -> None:
        self.tiers.transfers.collected(step)

    def complete(self, tickets: Sequence[int]) -> None:
        self.tiers.finish(tickets, valid=True)

    def void(self, tickets: Sequence[int]) -> list[Session]:
        return self.tiers.finish(tickets, valid=False)

    def fail(self, session: Session, written: Iterable[Run]) -> None:
        size = self.chunk_tokens
        for start, stop in written:
            for index in range(start // size, chunks_of(stop, size)):
                self.tiers.invalidate(session, index)

    def preempt(self, session: Session, now_s: float) -> tuple[Copy, ...]:
        self._stop(session, now_s)
        dirty = [(session, index) for index, chunk in enumerate(session.chunks) if chunk.view is View.DIRTY]
        return self._copy_out(dirty, now_s, urgent=True) if self.cpu_blocks else ()

    def release(self, session: Session, now_s: float) -> None:
        self._stop(session, now_s)

    def _stop(self, session: Session, now_s: float) -> None:
        session.stop(now_s)
        self._running -= 1
        self.tiers.unpin(session)

    def make_room_for(self, session: Session, now_s: float) -> None:
        super().make_room_for(session, now_s)
        self.tiers.taker = self.taker

    # -- evict --------------------------------------------------------------------------------------------------------

    def swap_out(self, blocks: int, now_s: float, urgent: bool) -> tuple[Copy, ...]:
        if not self.cpu_blocks or blocks <= 0:
            return ()
        return self._copy_out(self.tiers.dirty.victims(now_s), now_s, urgent, blocks)

    def swap_out_spare(self, blocks: int, now_s: float) -> tuple[Copy, ...]:
        tiers = self.tiers
        most = min(blocks, tiers.cpu.free + len(tiers.duplicates))
        return self._copy_out(tiers.dirty.victims(now_s), now_s, urgent=False, most=most) if most > 0 else ()

    def exchange(self, session: Session, lacking: int, now_s: float) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
        """Its chunks are loaded into the GPU blocks that are free; the CPU blocks of those that are there take what leaves
        the GPU, which frees further GPU blocks. So only what it needs beyond them costs others their only copies, and, where
        no GPU block is free to begin with, an eighth."""
        if not self.cpu_blocks:
            return (), ()
        tiers, wanted = self.tiers, lacking - self.outgoing
        begins = self.settled and not self.available
        loads = self._load_early(session, now_s)
        clean = [index for index, chunk in enumerate(session.chunks) if chunk.view is View.CLEAN]
        held = sum(chunk.cpu is not None for chunk in session.chunks)
        room = tiers.cpu.free + len(tiers.duplicates)
        costly = max(wanted - room - held, ceil_div(held, _STAGES) if begins else 0, 0)
        most = min(wanted, room + len(clean) + costly)
        others = takewhile(lambda victim: victim[0] is not session, tiers.dirty.victims(now_s))
        dropped = self.counters.dropped_chunks
        outward = self._copy_out(others, now_s, True, most, giving=(session, clean)) if most > 0 else ()
        loads = loads or self._load_early(session, now_s)  # where chunks were dropped there are blocks now
        stuck = self.settled and not tiers.transfers.in_flight and dropped == self.counters.dropped_chunks
        if stuck and wanted > 0:
            outward = self.swap_out(wanted, now_s, urgent=True)  # what it has itself must leave the GPU
        return loads, outward

    def _load_early(self, session: Session, now_s: float) -> tuple[Copy, ...]:
        """Of a waiting conversation, as many chunks from the CPU as there are GPU blocks for without a copy."""
        chunks = session.chunks
        own = sum(chunk.view is View.CLEAN for chunk in chunks)
        behind = [index for index, chunk in enumerate(chunks) if chunk.view is View.CPU_ONLY][: self.available - own]
        if not behind:
            return ()
        for index, block in zip(behind, self._take_gpu(len(behind), now_s), strict=True):
            chunks[index].gpu = block
        self._early.setdefault(session.number, set()).update(behind)
        return self.tiers.copy_in(session, behind)

    def drop(self, blocks: int, now_s: float) -> int:
        dirty, dropped = self.tiers.dirty, 0
        if blocks > 0:
            for session, index in dirty.victims(now_s):
                self.tiers.drop_gpu(session, index)
                dropped += 1
                if dirty.enough(session, dropped, blocks):
                    break
        return dropped

    def reclaim(self, blocks: int, now_s: float) -> int:
        """Free GPU blocks of clean chunks, whose KV stays on CPU; returns how many there were."""
        clean, taken = self.tiers.clean, 0
        if blocks > 0:
            for session, index in clean.victims(now_s):
                self.tiers.reclaim(session, index)
                taken += 1
                if clean.enough(session, taken, blocks):
                    break
        return taken

    def _copy_out(
        self,
        chosen: Iterable[tuple[Session, int]],
        now_s: float,
        urgent: bool,
        most: int | None = None,
        giving: tuple[Session, list[int]] | None = None,
    ) -> tuple[Copy, ...]:
        """Of the chosen chunks at most so many; one for which there is no room on CPU is dropped. giving: see CpuRoom."""
        tiers, room = self.tiers, CpuRoom(self.tiers, now_s, giving)
        moves = []
        for taken, (session, index) in enumerate(chosen, start=1):
            if room.give(session, index):
                moves.append(tiers.outward(session, index))
            else:
                tiers.drop_gpu(session, index)
            if tiers.dirty.enough(session, taken, most):
                break
        return tiers.copy_out(moves, urgent)

    def _take_gpu(self, count: int, now_s: float, behind: int | None = None) -> tuple[int, ...]:
        """Free blocks, reclaimed from clean chunks (or, without a CPU tier, dropped) as far as they are lacking."""
        pool = self.tiers.gpu
        lacking = count - pool.free
        taken = self.reclaim(lacking, now_s)
        if taken < lacking:
            assert not self.cpu_blocks, "admission took more blocks than are available"
            self.drop(lacking - taken, now_s)
        return pool.allocate(count) if behind is None else (pool.allocate_after(behind),)

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    def expect(self, session: Session, next_use_s: float | None) -> None:
        super().expect(session, next_use_s)
        self.tiers.reorder(session)

    def mark_waiting(self, session: Session, arrival: int, now_s: float) -> None:
        super().mark_waiting(session, arrival, now_s)
        self.tiers.reorder(session)

    def unmark_waiting(self, session: Session, arrival: int, now_s: float) -> None:
        super().unmark_waiting(session, arrival, now_s)
        self._early.pop(session.number, None)
        self.tiers.reorder(session)

    def fork(self, parent: Session, child: Session, length: int, takes_kv: bool) -> None:
        """A block belongs to one conversation. A child that takes KV gets the whole chunks that both have in common; the
        parent keeps their raw tokens, as of chunks that were dropped."""
        super().fork(parent, child, length, takes_kv)
        self.make_room_for(child, child.last_active_s)
        if takes_kv and not parent.running and not parent.waiting:
            self.tiers.move(parent, child, child.computed // self.chunk_tokens)

    def truncate(self, session: Session, length: int, computed: int | None = None) -> None:
        session.rollback(length, computed)
        self.tiers.cut(session, length)

    def forget(self, session: Session) -> None:
        self.truncate(session, 0)
        self.sessions.pop(session.name, None)

    def check(self) -> None:
        assert self._running == sum(session.running for session in self.sessions.values())
        check_tiers(self.tiers, self.sessions.values())


def _letter(chunk: Chunk) -> str:
    if chunk.gpu_len:
        return "B" if chunk.cpu_len else "G"
    return "C" if chunk.cpu_len else "-"
