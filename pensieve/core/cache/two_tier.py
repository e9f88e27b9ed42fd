"""Pensieve's cache: KV on GPU, then on CPU, then as raw tokens (paper sections 4.2 and 4.3)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, count, islice
from operator import gt
from typing import Any

import numpy as np

from pensieve.core.cache.base import Broken, CacheManager, Room
from pensieve.core.cache.tiers import Tiers, found_in, missing_runs
from pensieve.core.cache.victims import Choice, Span, VictimIndex
from pensieve.core.facts import Admission, Found
from pensieve.core.plan import Move, Moved
from pensieve.core.policies.base import EvictionPolicy, as_policy
from pensieve.core.request import TokenArray
from pensieve.core.session import (
    NO_BLOCK,
    NO_BLOCKS,
    Chunks,
    Node,
    Run,
    Session,
    View,
    chunks_of,
    runs_of,
    tokens_in,
)


class TwoTierRoom(Room):
    """Which blocks of both tiers can be had, and who gives up theirs.

    cpu_blocks: of the CPU tier.
    loaded_early: by number of a waiting session, its chunks that were loaded before its admission (copy_ahead=never): what
    finds its KV there counts them as on CPU.
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
    def can_swap_out(self) -> bool:
        return bool(self.cpu_blocks and self.tiers.dirty.chunks)

    @property
    def spare_cpu_blocks(self) -> int:
        """CPU blocks that are free or hold a second copy: using them for something else loses no KV."""
        return self.tiers.cpu.free + len(self.tiers.duplicates)

    def lacking(self, session: Session, keep: int, prompt: TokenArray[int]) -> int:
        size = self.tiers.chunk_tokens
        total = chunks_of(len(prompt) + 1, size)  # one position more: the first token decoded needs no new block
        chunks, kept = session.chunks, chunks_of(keep, size)
        own = len(chunks.gpu[:kept]) - chunks.gpu[:kept].count(NO_BLOCK)
        # With a plan in flight, blocks of chunks that are not kept go to quarantine: they are not to be had either.
        counted = len(chunks) if self.tiers.copies.in_flight else kept
        own_available = chunks.view.count(View.CLEAN, 0, counted)
        if not self.cpu_blocks:
            own_available += chunks.view.count(View.DIRTY, 0, counted)
        return total - own + own_available - self.available

    def make_room(self, head: Session | None, lacking: int, now_s: float) -> None:
        """At once for a head that lacks blocks; ahead of time below the low watermark and up to the high one (section
        4.3.2)."""
        blocks = max(self.ahead(), lacking - self.outgoing if lacking else 0)
        if blocks > 0:
            self.swap_out(blocks, now_s, head)

    def ahead(self) -> int:
        """Blocks to copy ahead of time."""
        have = self.available + self.outgoing
        return self.high - have if have < self.low else 0

    def begins_below(self, prefilled: Sequence[Session]) -> int:
        return self.low

    def swap_out(self, blocks: int, now_s: float, waiting: Session | None, spare: bool = False) -> None:
        """spare: only as far as there are CPU blocks that nothing has its only copy in."""
        if spare:
            blocks = min(blocks, self.spare_cpu_blocks)
        if self.cpu_blocks and blocks > 0:
            self.copy_out(self.tiers.dirty.choose(blocks, now_s, whole=not spare), now_s, waiting)

    def swap_out_all(self, session: Session, now_s: float) -> None:
        if not self.cpu_blocks:
            return
        self.copy_out(self.tiers.dirty.listed(session.nodes(), now_s), now_s, session)

    def drop(self, blocks: int, now_s: float) -> int:
        return self._free_gpu(self.tiers.dirty, self.tiers.drop_gpu, blocks, now_s)

    def reclaim(self, blocks: int, now_s: float) -> int:
        """Free GPU blocks of clean chunks, whose KV stays on CPU; returns how many were freed."""
        return self._free_gpu(self.tiers.clean, self.tiers.reclaim, blocks, now_s)

    def _free_gpu(self, victims: VictimIndex, take: Callable[[Sequence[Span]], None], blocks: int, now_s: float) -> int:
        if blocks <= 0 or not victims.chunks:
            return 0
        chosen = victims.choose(blocks, now_s, whole=True)
        take(chosen.spans())
        return len(chosen)

    def copy_out(self, chosen: Choice, now_s: float, waiting: Session | None) -> None:
        """Start to copy dirty chunks to the CPU: to blocks that are free, then those of duplicates, then of the policy's
        victims. Where every CPU block holds what the policy would keep longer than a chunk, that is dropped. waiting: see
        swap_out."""
        if not chosen:
            return
        if self.tiers.cpu.free < len(chosen) * self.chunk_blocks:
            chosen = self._for_cpu(chosen, now_s)
        for span in chosen.spans():
            self._take_cpu(*span)
        self.tiers.copy_out(chosen, waiting)

    def _for_cpu(self, chosen: Choice, now_s: float) -> Choice:
        """Have CPU blocks freed for those that have none; returns those for which there are."""
        tiers = self.tiers
        lacking = np.flatnonzero(chosen.column("cpu") == NO_BLOCK)
        if tiers.cpu.free < len(lacking) and tiers.duplicates:
            tiers.free_duplicates(len(lacking) - tiers.cpu.free)
        if tiers.cpu.free >= len(lacking) * self.chunk_blocks:
            return chosen
        rows, instead = tiers.lost_for_want(chosen.some(lacking), now_s)
        lost = lacking[rows]
        tiers.drop_cpu(instead.spans())
        if len(lost):
            tiers.drop_gpu(_still_dirty(chosen.some(lost)).spans())
            chosen = chosen.some(np.delete(np.arange(len(chosen)), lost))
        return _still_dirty(chosen)

    def _take_cpu(self, node: Node, start: int, stop: int) -> None:
        """Take CPU blocks for those of the chunks that have none, behind the block of the chunk before as far as that is
        free."""
        blocks, lacking = node.chunks.cpu, [(start, stop)]
        if blocks[start:stop].count(NO_BLOCK) < stop - start:
            lacking = runs_of(index for index in range(start, stop) if blocks[index] == NO_BLOCK)
        for first, end in lacking:
            behind = blocks[first - 1] if first and blocks[first - 1] != NO_BLOCK else None
            blocks[first:end] = array("i", self.tiers.cpu.allocate_after(behind, end - first, node.session.number))

    def take_gpu(self, session: Session, count: int, now_s: float, behind: int | None = None) -> tuple[int, ...]:
        """Take GPU blocks for a session: free ones, and as far as these do not suffice those of clean chunks or, without a
        CPU tier, of dropped ones. behind: a block that they should follow."""
        pool = self.tiers.gpu
        if (lacking := count - pool.free) > 0 and (lacking := lacking - self.reclaim(lacking, now_s)) > 0:
            assert not self.cpu_blocks, "admission took more blocks than are available"
            self.drop(lacking, now_s)
        number = session.number
        return tuple(pool.allocate(count, number) if behind is None else pool.allocate_after(behind, count, number))


class TwoTierCache(CacheManager):
    """Decides what is copied, loaded, computed again and lost; tiers.py keeps where everything is.

    Every KV position of a session is on GPU, on CPU, or missing (its raw token is kept, so it can be recomputed). With
    cpu_blocks = 0 it is the GPU-only baseline: evicting a chunk drops it, and every idle chunk counts as available.
    """

    room: TwoTierRoom
    drops = True

    def __init__(self, *, policy: EvictionPolicy, chunk_tokens: int, gpu_blocks: int, cpu_blocks: int) -> None:
        super().__init__(chunk_tokens, gpu_blocks, cpu_blocks)
        self.policy = as_policy(policy)
        self.tiers = self._tiers(self.policy, chunk_tokens, gpu_blocks, cpu_blocks, self.counters)
        self.room = TwoTierRoom(self.tiers)

    def _tiers(self, *given: Any) -> Tiers:
        return Tiers(*given)

    def begin(self, **parts: Any) -> None:
        if parts.get("pool") is not None:
            self.tiers.use(parts["pool"])
        super().begin(**parts)
        self.tiers.below = self.below
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
        lengths = zip(chunks.gpu_len[:], chunks.cpu_len[:], strict=False)  # another thread may ask
        places = ("-CGB"[2 * bool(on_gpu) + bool(on_cpu)] for on_gpu, on_cpu in lengths)
        letters = ["D" if x == "-" and holds(session, i) else x for i, x in enumerate(places)]
        return "".join(letters).ljust(chunks_of(len(session.tokens), self.chunk_tokens), "-")

    # -- admit --------------------------------------------------------------------------------------------------------

    def admit(self, session: Session, keep: int, suffix: TokenArray[int] | None, now_s: float) -> Admission:
        if suffix is not None:
            if keep < len(session.tokens):
                self.truncate(session, keep)
            session.extend(suffix)
            if self.policy.observe is not None:
                self.policy.observe(session, now_s)
        self.meet(session, len(session.tokens) - 1)
        stranded = self._strand(session)
        if suffix is None:
            return self._start(session, None, now_s)
        length = len(session.tokens) if self.tiers.shares else keep
        found = found_in(session, length, self.chunk_tokens, self.room.loaded_early.get(session.number, ()))
        if self.tiers.shares:
            found = found._replace(shared=True, names=session.named(length, self.chunk_tokens))
        return self._start(session, found._replace(stranded=stranded) if stranded else found, now_s)

    def _strand(self, session: Session) -> frozenset[int]:
        """Chunks of a session that is about to run which are there and are computed again all the same."""
        return frozenset()

    def meet(self, session: Session, length: int) -> None:
        """Join what other sessions have of the full chunks in [0, length) of an idle one, where sessions share chunks."""

    def used(self, session: Session) -> None:
        """The chunks of a session are kept for its sake from now on, also those that others have, where sessions share."""

    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        leaf = session.leaf
        chunks, column = leaf.chunks, leaf.chunks.gpu
        held = len(column)
        first = leaf.start + held
        count = chunks_of(length, self.chunk_tokens) - first
        if count <= 0:
            return first, ()
        if count > self.room.available:
            return None
        last = column[-1] if count == 1 and held else NO_BLOCK
        blocks = self.room.take_gpu(session, count, now_s, behind=None if last == NO_BLOCK else last)
        chunks.add(count)
        column[held:] = array("i", blocks)
        return first, blocks

    def _start(self, session: Session, found: Found | None, now_s: float) -> Admission:
        """Reserve blocks for its tokens and one more, and decide which of its chunks are loaded and which computed."""
        tiers, size, length = self.tiers, self.chunk_tokens, len(session.tokens)
        self.used(session)
        leaf, nodes = session.leaf, session.nodes()
        leaf.chunks.add(chunks_of(length + 1, size) - leaf.start - len(leaf.chunks.gpu))
        session.start(now_s)
        self.facts.runs(session)
        lacking, needed = [], 0
        for node in nodes:
            tiers.pin(node)
            for start, stop in node.chunks.without_gpu():
                lacking.append((node.chunks.gpu, start, stop))
                needed += stop - start
        blocks = iter(self.room.take_gpu(session, needed, now_s))
        for column, start, stop in lacking:
            column[start:stop] = array("i", islice(blocks, stop - start))
        chunks = session.chunks
        on_cpu = list(compress(count(), map(gt, chunks.cpu_len, chunks.gpu_len)))
        again = self._recomputed(chunks, length, on_cpu) if on_cpu else 0
        loading = tiers.copy_in(session, runs_of(on_cpu[again:])) if again < len(on_cpu) else 0
        read_ticket, read = self._read_from_below(session) if self.below.blocks else (None, ())
        for node in nodes:
            if node.chunks.cpu.count(NO_BLOCK) < len(node.chunks.cpu):
                tiers.update_duplicates(node, range(len(node.chunks.cpu)))
        chunks = session.chunks if leaf.parent is not None else chunks  # of several nodes it is a copy
        return Admission(
            missing_runs(chunks, length, size),
            tuple(chunks.gpu),
            found,
            loading,
            sum(map(chunks.cpu_len.__getitem__, on_cpu[again:])) + tokens_in(read),
            sum(map(chunks.cpu_len.__getitem__, on_cpu[:again])),
            read_ticket,
            read,
        )

    def _recomputed(self, chunks: Chunks, length: int, on_cpu: Sequence[int]) -> int:
        """How many of the chunks on CPU, the first ones, a session of that length computes again while the others load."""
        return 0

    def _read_from_below(self, session: Session) -> tuple[int | None, tuple[Run, ...]]:
        """Start to read those chunks without KV for which reading is worth it; returns the ticket and the positions."""
        readable = len(session.tokens) - 1  # that is computed in any case
        if not self.tiers.shares:
            readable = min(session.computed, readable)
        runs = self.below.worth_reading(session, readable)
        if not runs:
            return None, ()
        ticket, size = self.tiers.read_in(session, runs), self.chunk_tokens
        return ticket, tuple((start * size, stop * size) for start, stop in runs)

    # -- progress -----------------------------------------------------------------------------------------------------

    def advance(self, session: Session, runs: Iterable[Run]) -> None:
        size, leaf = self.chunk_tokens, session.leaf
        for start, stop in runs:
            if start >= leaf.start * size:
                self._advance(leaf, start - leaf.start * size, stop - leaf.start * size)
            else:
                for node, first, last in session.in_nodes([(start // size, chunks_of(stop, size))]):
                    origin = node.start * size
                    self._advance(node, max(start - origin, first * size), min(stop - origin, last * size))
            session.advance(stop)

    def _advance(self, node: Node, start: int, stop: int) -> None:
        """Positions [start, stop) of the node are computed."""
        size, chunks = self.chunk_tokens, node.chunks
        first, last = start // size, (stop - 1) // size
        assert chunks.gpu[last] != NO_BLOCK
        assert chunks.gpu_len[first] == start - first * size, "KV is computed in ascending order"
        chunks.gpu_len[last] = stop - last * size
        if first == last:
            held = chunks.cpu[last] != NO_BLOCK
        else:
            chunks.gpu_len[first:last] = self.tiers.full * (last - first)
            held = chunks.cpu[first : last + 1] != NO_BLOCKS * (last + 1 - first)
        if held:
            self.tiers.update_duplicates(node, range(first, last + 1))

    def plans(self, oldest: int, following: int) -> None:
        self.tiers.copies.plans(oldest, following)

    def take_moves(self) -> tuple[Move, ...]:
        moves, self.tiers.planned = self.tiers.planned, []
        return tuple(moves)

    def finish(self, moved: Sequence[Moved]) -> Broken:
        return self.tiers.finish(moved)

    def invalidate(self, session: Session, written: Iterable[Run]) -> None:
        size = self.chunk_tokens
        for node, start, stop in session.in_nodes((start // size, chunks_of(stop, size)) for start, stop in written):
            self.tiers.invalidate(node, start, stop)

    def release(self, session: Session, now_s: float, finished: bool = True) -> None:
        if not session.running:
            return
        self.used(session)
        if finished and self.policy.rest is not None:
            self.policy.rest(session, now_s)
        session.stop(now_s)
        self.facts.rests(session)
        for node in session.nodes():
            self.tiers.unpin(node)
        self.meet(session, session.computed)

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    def reorder(self, session: Session) -> None:
        if not session.waiting or session.running:
            self.room.loaded_early.pop(session.number, None)
        for node in session.nodes():
            self.tiers.reorder(node)

    def fork(self, parent: Session, child: Session, length: int, takes_kv: bool) -> None:
        """Move the whole chunks that both have in common to a child that takes KV, since a block belongs to one
        session. The parent keeps their raw tokens, as of chunks that were dropped."""
        super().fork(parent, child, length, takes_kv)
        if self.tiers.shares:
            self.meet(child, child.computed)
            return
        self.facts.room_for(child, child.last_active_s)
        if takes_kv and not parent.running and not parent.waiting:
            self.tiers.move(parent.leaf, child.leaf, child.computed // self.chunk_tokens)

    def _cut(self, session: Session, length: int) -> None:
        self.tiers.cut(session.leaf, length)

    def _holds(self, session: Session) -> bool:
        chunks = session.leaf.chunks
        somewhere = min(chunks.gpu.count(NO_BLOCK), chunks.cpu.count(NO_BLOCK)) < len(chunks)
        return bool(somewhere or self.below.blocks or self.tiers.copies.any_of(session.leaf))

    def check(self) -> None:
        self.tiers.copies.check()
        self.below.check()


def _still_dirty(chosen: Choice) -> Choice:
    """Those that did not go with a chunk before them."""
    return chosen.some(chosen.column("view") == View.DIRTY)
