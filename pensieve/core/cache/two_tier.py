"""Pensieve's cache: KV on GPU, then on CPU, then as raw tokens (paper sections 4.2 and 4.3)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

from pensieve.core.cache.base import Broken, CacheManager, LowerTier, Room
from pensieve.core.cache.invariants import check_tiers
from pensieve.core.cache.loops import Victim, session_and_chunk
from pensieve.core.cache.restore import RestoreMode, Restorer
from pensieve.core.cache.tiers import Tiers, found_in, missing_runs
from pensieve.core.cache.victims import VictimIndex
from pensieve.core.cost import CostModel
from pensieve.core.facts import Admission, Facts, Found
from pensieve.core.plan import Move, Moved, StartReport
from pensieve.core.policies.base import EvictionPolicy, as_policy
from pensieve.core.request import TokenArray
from pensieve.core.session import NO_BLOCK, Run, Session, View, chunks_of, common_prefix, repeated, runs_of, tokens_in


class TwoTierRoom(Room):
    """Which blocks of both tiers can be had, and who gives up theirs.

    cpu_blocks: of the CPU tier. loaded_early: by number of a waiting session, its chunks that were loaded before its
    admission (exchange.py): what finds its KV there counts them as on CPU.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers, self.cpu_blocks = tiers, tiers.cpu.blocks
        self.loaded_early: dict[int, set[int]] = {}

    @property
    def available(self) -> int:
        tiers = self.tiers
        return tiers.gpu.free + tiers.clean.chunks + (0 if self.cpu_blocks else tiers.dirty.chunks)

    @property
    def outgoing(self) -> int:
        return self.tiers.copies.outgoing

    @property
    def copies_done(self) -> bool:
        return not self.tiers.copies.any_open

    @property
    def can_swap_out(self) -> bool:
        return bool(self.cpu_blocks and self.tiers.dirty.chunks)

    @property
    def spare_cpu_blocks(self) -> int:
        return self.tiers.cpu.free + len(self.tiers.duplicates)

    def on_cpu(self, session: Session) -> bool:
        return session.chunks.cpu.count(NO_BLOCK) < len(session.chunks)

    def lacking(self, session: Session, keep: int, length: int) -> int:
        size = self.tiers.chunk_tokens
        total = chunks_of(length + 1, size)  # one position more: the first token decoded needs no new block
        chunks, kept = session.chunks, chunks_of(keep, size)
        own = min(kept, len(chunks)) - chunks.gpu[:kept].count(NO_BLOCK)
        # With a plan in flight, blocks of chunks that are not kept go to quarantine: they are not to be had either.
        counted = len(chunks) if self.tiers.copies.in_flight else kept
        own_available = chunks.view.count(View.CLEAN, 0, counted)
        if not self.cpu_blocks:
            own_available += chunks.view.count(View.DIRTY, 0, counted)
        return total - own + own_available - self.available

    def swap_out(self, blocks: int, now_s: float, waiting: Session | None, spare: bool = False) -> None:
        if spare:
            blocks = min(blocks, self.spare_cpu_blocks)
        if self.cpu_blocks and blocks > 0:
            self.copy_out(self.tiers.dirty.choose(blocks, now_s, whole=not spare), now_s, waiting)

    def swap_out_all(self, session: Session, now_s: float) -> None:
        if not self.cpu_blocks:
            return
        as_victim, runs = self.tiers.dirty.as_victim, session.chunks.runs(View.DIRTY, 0, len(session.chunks))
        dirty = [as_victim(session, index, now_s) for start, stop in runs for index in range(start, stop)]
        self.copy_out(dirty, now_s, session)

    def drop(self, blocks: int, now_s: float) -> int:
        return self._free_gpu(self.tiers.dirty, self.tiers.drop_gpu, blocks, now_s)

    def reclaim(self, blocks: int, now_s: float) -> int:
        """Free GPU blocks of clean chunks, whose KV stays on CPU; returns how many were freed."""
        return self._free_gpu(self.tiers.clean, self.tiers.reclaim, blocks, now_s)

    def _free_gpu(
        self, victims: VictimIndex, take: Callable[[Session, int, int], None], blocks: int, now_s: float
    ) -> int:
        if blocks <= 0 or not victims.chunks:
            return 0
        chosen = victims.choose(blocks, now_s, whole=True)
        self.give_up(victims, chosen, take)
        return len(chosen)

    def give_up(self, victims: VictimIndex, chosen: list[Victim], take: Callable[[Session, int, int], None]) -> None:
        """Have `take` do what it does with the runs of the chosen chunks: reclaim them, or drop them."""
        sessions = victims.sessions_of(chosen)
        for number, start, stop in victims.spans(chosen):
            take(sessions[number], start, stop)

    def victims_of_others(
        self, victims: VictimIndex, session: Session, view: View, count: int, now_s: float
    ) -> list[Victim]:
        """Choose at most `count` victims among the other sessions, whatever its own chunks are worth to the policy."""
        own = session.chunks.view.count(view)
        chosen = victims.choose(count + own, now_s)
        return [victim for victim in chosen if session_and_chunk(victim)[0] != session.number][:count]

    def copy_out(
        self,
        chosen: list[Victim],
        now_s: float,
        waiting: Session | None,
        giving: tuple[Session, list[int]] | None = None,
    ) -> None:
        """Start to copy dirty chunks to the CPU, and drop those for which there is no room there. waiting: see swap_out.
        giving: a waiting session, and clean chunks of it: their CPU blocks count as those of duplicates."""
        if not chosen:
            return
        tiers = self.tiers
        sessions = tiers.dirty.sessions_of(chosen)
        kept, lost = self._find_cpu_room(chosen, sessions, now_s, giving)
        for number, start, stop in tiers.dirty.spans(lost):
            tiers.drop_gpu(sessions[number], start, stop)
        tiers.copy_out(kept, sessions, waiting)

    def _find_cpu_room(
        self,
        leaving: Sequence[Victim],
        sessions: Mapping[int, Session],
        now_s: float,
        giving: tuple[Session, list[int]] | None,
    ) -> tuple[list[Victim], list[Victim]]:
        """Take CPU blocks for chunks that leave the GPU: free ones, then those of duplicates, then of the policy's victims.
        Returns the chunks that have one, and those for which there is none: where every CPU block holds what the policy
        would keep longer than the chunk, the chunk should be lost."""
        tiers = self.tiers
        lacking = []
        for victim in leaving:
            number, chunk = session_and_chunk(victim)
            if sessions[number].chunks.cpu[chunk] == NO_BLOCK:
                lacking.append(victim)
        if tiers.cpu.free < len(lacking) and tiers.duplicates:
            tiers.free_duplicates(len(lacking) - tiers.cpu.free)
        while tiers.cpu.free < len(lacking) and giving is not None and giving[1]:
            tiers.free_copy(giving[0], giving[1].pop())
        rest = lacking[tiers.cpu.free :]
        there = iter(tiers.cpu_only.choose(len(rest), now_s) if rest else ())
        least = next(there, None)
        lost: list[Victim] = []
        instead: list[Victim] = []
        for victim in rest:
            if least is None or victim < least:
                lost.append(victim)
            else:
                instead.append(least)
                least = next(there, None)
        self.give_up(tiers.cpu_only, instead, tiers.drop_cpu)
        without = set(lost)
        kept = [victim for victim in leaving if victim not in without] if lost else list(leaving)
        for number, start, stop in tiers.dirty.spans(kept):
            self._take_cpu(sessions[number], start, stop)
        return kept, lost

    def _take_cpu(self, session: Session, start: int, stop: int) -> None:
        """Take CPU blocks for those of the chunks that have none, behind the block of the chunk before as far as that is
        free."""
        blocks = session.chunks.cpu
        for first, end in runs_of(index for index in range(start, stop) if blocks[index] == NO_BLOCK):
            behind = blocks[first - 1] if first and blocks[first - 1] != NO_BLOCK else None
            blocks[first:end] = array("i", self.tiers.cpu.allocate_after(behind, end - first, session.number))

    def take_gpu(self, session: Session, count: int, now_s: float, behind: int | None = None) -> tuple[int, ...]:
        """Take GPU blocks for a session: free ones, and as far as these do not suffice those of clean chunks or, without a
        CPU tier, of dropped ones. behind: a block that they should follow."""
        pool = self.tiers.gpu
        lacking = count - pool.free
        taken = self.reclaim(lacking, now_s)
        if taken < lacking:
            assert not self.cpu_blocks, "admission took more blocks than are available"
            self.drop(lacking - taken, now_s)
        if behind is None:
            return pool.allocate(count, session.number)
        return tuple(pool.allocate_after(behind, count, session.number))


class TwoTierCache(CacheManager):
    """Decides what is copied, loaded, computed again and lost; tiers.py keeps where everything is.

    Every KV position of a session is on GPU, on CPU, or missing (its raw token is kept, so it can be recomputed). With
    cpu_blocks = 0 it is the GPU-only baseline: evicting a chunk drops it, and every idle chunk counts as available.
    """

    room: TwoTierRoom

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
        self.room = TwoTierRoom(self.tiers)
        self._running = 0

    def begin(
        self,
        *,
        cost: CostModel | None = None,
        layers: int = 1,
        batch_tokens: int = 1,
        below: LowerTier | None = None,
        report: StartReport | None = None,
        facts: Facts | None = None,
    ) -> None:
        if cost is not None:
            self.restorer.set_cost_model(cost, layers, batch_tokens)
        if below is not None:
            assert cost is not None and report is not None
            self.below = self.tiers.below = below
            below.begin(report, self.chunk_tokens, layers, cost, self.counters.extra)
            below.report_to(self.facts)
        super().begin(facts=facts)
        self.tiers.report_to(self.facts)

    # -- query --------------------------------------------------------------------------------------------------------

    @property
    def gpu_blocks_used(self) -> int:
        return self.gpu_blocks - self.tiers.gpu.free

    @property
    def cpu_blocks_used(self) -> int:
        return self.cpu_blocks - self.tiers.cpu.free

    def free_blocks(self) -> tuple[set[int], set[int]]:
        return self.tiers.gpu.free_blocks(), self.tiers.cpu.free_blocks()

    def places(self, session: Session) -> str:
        chunks, holds = session.chunks, self.below.holds
        places = map(_letter, chunks.gpu_len[:], chunks.cpu_len[:])
        letters = ["D" if x == "-" and holds(session, i) else x for i, x in enumerate(places)]
        return "".join(letters).ljust(chunks_of(len(session.tokens), self.chunk_tokens), "-")

    # -- admit --------------------------------------------------------------------------------------------------------

    def admit(self, session: Session, keep: int, suffix: TokenArray[int] | None, now_s: float) -> Admission:
        if suffix is None:
            return self._start(session, None, now_s)
        found = found_in(session, keep, self.chunk_tokens, self.room.loaded_early.get(session.number, ()))
        if keep < len(session.tokens):
            self.truncate(session, keep)
        session.extend(suffix)
        if self.policy.observe is not None:
            self.policy.observe(session, now_s)
        return self._start(session, found, now_s)

    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        first = len(session.chunks)
        count = chunks_of(length, self.chunk_tokens) - first
        if count <= 0:
            return first, ()
        if count > self.room.available:
            return None
        column = session.chunks.gpu
        last = column[-1] if count == 1 and first else NO_BLOCK
        blocks = self.room.take_gpu(session, count, now_s, behind=None if last == NO_BLOCK else last)
        session.chunks.add(count)
        column[first:] = array("i", blocks)
        return first, blocks

    def _start(self, session: Session, found: Found | None, now_s: float) -> Admission:
        """Reserve blocks for its tokens and one more, and decide which of its chunks are loaded and which computed."""
        tiers, size, length = self.tiers, self.chunk_tokens, len(session.tokens)
        chunks, total = session.chunks, chunks_of(length + 1, size)
        chunks.add(total - len(chunks))
        session.start(now_s)
        self.facts.runs(session)
        self._running += 1
        tiers.pin(session)
        lacking = chunks.without_gpu()
        blocks = self.room.take_gpu(session, sum(stop - start for start, stop in lacking), now_s)
        taken = 0
        for start, stop in lacking:
            chunks.gpu[start:stop] = array("i", blocks[taken : taken + stop - start])
            taken += stop - start
        restore = self.restorer.choose(session, tiers.copies.incoming, alone=self._running == 1)
        loading = tiers.copy_in(session, runs_of(restore.load))
        read_ticket, read = self._read_from_below(session)
        tiers.update_duplicates(session, tiers.on_cpu(session))
        work = missing_runs(session, length, size)
        table, loaded = tuple(chunks.gpu), restore.loaded_tokens + tokens_in(read)
        return Admission(work, table, found, loading, loaded, restore.recomputed_tokens, read_ticket, read)

    def _read_from_below(self, session: Session) -> tuple[int | None, tuple[Run, ...]]:
        """Start to read those chunks without KV for which reading is worth it; returns the ticket and the positions."""
        runs = self.below.worth_reading(session)
        if not runs:
            return None, ()
        ticket, size = self.tiers.read_in(session, runs), self.chunk_tokens
        return ticket, tuple((start * size, stop * size) for start, stop in runs)

    # -- progress -----------------------------------------------------------------------------------------------------

    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        size, chunks = self.chunk_tokens, session.chunks
        for start, stop in runs:
            first, last = start // size, (stop - 1) // size
            assert chunks.gpu[last] != NO_BLOCK
            assert chunks.gpu_len[first] == start - first * size, "KV is computed in ascending order"
            chunks.gpu_len[first:last] = repeated(size, last - first)
            chunks.gpu_len[last] = stop - last * size
            on_cpu = chunks.cpu[first : last + 1]
            if on_cpu.count(NO_BLOCK) < len(on_cpu):
                held = [index for index, block in enumerate(on_cpu, first) if block != NO_BLOCK]
                self.tiers.update_duplicates(session, held)
            session.advance(stop)

    def plans(self, oldest: int, following: int) -> None:
        self.tiers.copies.plans(oldest, following)

    def take_moves(self) -> tuple[Move, ...]:
        moves, self.tiers.planned = self.tiers.planned, []
        return tuple(moves)

    def finish(self, moved: Sequence[Moved]) -> Broken:
        return self.tiers.finish(moved)

    def invalidate(self, session: Session, written: Iterable[Run]) -> None:
        size = self.chunk_tokens
        for start, stop in written:
            self.tiers.invalidate(session, start // size, chunks_of(stop, size))

    def release(self, session: Session, now_s: float, finished: bool = True) -> None:
        if not session.running:
            return
        if finished and self.policy.rest is not None:
            self.policy.rest(session, now_s)
        session.stop(now_s)
        self.facts.rests(session)
        self._running -= 1
        self.tiers.unpin(session)

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    def receive(self, session: Session, tokens: TokenArray[int], lengths: Sequence[int], now_s: float) -> int:
        """Store the KV in CPU blocks that are free, or of duplicates, or of the policy's victims. Where these do not
        suffice, the last chunks get them, which take longest to compute."""
        size, chunks, tiers = self.chunk_tokens, session.chunks, self.tiers
        keep = common_prefix(session.tokens, tokens)
        for index, length in enumerate(lengths[: len(chunks)]):
            if length > chunks[index].resident_len > 0:
                keep = min(keep, index * size)  # what is there of that chunk gives way to more of it
        self.facts.room_for(session, now_s)
        self.truncate(session, keep)
        session.extend(tokens[keep:])
        session.advance(len(tokens) - 1)
        chunks.add(chunks_of(len(tokens), size) - len(chunks))
        wanted = [index for index, length in enumerate(lengths) if length and not chunks[index].resident_len]
        tiers.free_duplicates(max(0, len(wanted) - tiers.cpu.free))
        lacking = max(0, len(wanted) - tiers.cpu.free)
        others = self.room.victims_of_others(tiers.cpu_only, session, View.CPU_ONLY, lacking, now_s)
        self.room.give_up(tiers.cpu_only, others, tiers.drop_cpu)
        taken = wanted[max(0, len(wanted) - tiers.cpu.free) :]
        for index, block in zip(taken, tiers.cpu.allocate(len(taken), session.number), strict=True):
            chunks.cpu[index], chunks.cpu_len[index] = block, lengths[index]
            self.facts.not_lost(session, index, index + 1)
        tiers.update(session, 0, len(chunks))
        return sum(lengths[index] for index in taken)

    def reorder(self, session: Session) -> None:
        if not session.waiting or session.running:
            self.room.loaded_early.pop(session.number, None)
        self.tiers.reorder(session)

    def fork(self, parent: Session, child: Session, length: int, takes_kv: bool) -> None:
        """Move the whole chunks that both have in common to a child that takes KV, since a block belongs to one
        session. The parent keeps their raw tokens, as of chunks that were dropped."""
        super().fork(parent, child, length, takes_kv)
        self.facts.room_for(child, child.last_active_s)
        if takes_kv and not parent.running and not parent.waiting:
            self.tiers.move(parent, child, child.computed // self.chunk_tokens)

    def truncate(self, session: Session, length: int, computed: int | None = None) -> None:
        self.facts.truncating(session, length)
        session.rollback(length, computed)
        self.tiers.cut(session, length)

    def _give_up(self, session: Session) -> None:
        self.below.forget(session)
        self.truncate(session, 0)

    def _holds(self, session: Session) -> bool:
        somewhere = self.room.on_cpu(session) or session.chunks.gpu.count(NO_BLOCK) < len(session.chunks)
        return bool(somewhere or self.below.blocks or self.tiers.copies.any_of(session))

    def check(self) -> None:
        assert self._running == sum(session.running for session in self.sessions.values())
        check_tiers(self.tiers, self.sessions.values())
        self.below.check()


def _letter(gpu_len: int, cpu_len: int) -> str:
    if gpu_len:
        return "B" if cpu_len else "G"
    return "C" if cpu_len else "-"
