"""Pensieve's cache for models of which some layers attend to a window: their KV is given up as it leaves the window. The
rules, also of layers that keep one state of a conversation, are in docs/simulated_hardware.md.

    chunk       0     1     2   |  3     4     5          of a conversation with a window of about 3 chunks
    block      [f]   [f]   [f]  | [f]   [f]   [f]         layers that attend to everything
    beside                      | [w]   [w]   [w]         layers with a window, in groups of the size of all others

What is held is enough to go on behind the last computed position, and for nothing else. Leading chunks are evicted first, so
that holes in the middle are rare. A state is a window of the last computed position, and serves that alone.

For simulated machines: a real cache keeps windows whole, and no states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pensieve.core.cache.blocks import ALIVE, BlockPool
from pensieve.core.cache.heaps import HeapIndex
from pensieve.core.cache.tiers import Tiers
from pensieve.core.cache.two_tier import TwoTierCache, TwoTierRoom
from pensieve.core.cache.victims import Choice, Span, VictimIndex
from pensieve.core.facts import NOBODY_NOW, Admission, Found
from pensieve.core.plan import GPU, Tier
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.request import TokenArray
from pensieve.core.session import NO_BLOCK, ChunkRun, Node, Session, View, chunks_of, runs_of
from pensieve.errors import ConfigError
from pensieve.plugins.caches.restore import RestoreMode, Reuse
from pensieve.units import ceil_div


class Windows(NamedTuple):
    """tokens: of a window, the query among them. beside: blocks that a chunk in the window has besides its own. states: what
    lies in these serves the last computed position alone."""

    tokens: int
    beside: int
    chunk_tokens: int
    states: bool = False

    def passing(self, batch_tokens: int) -> int:
        """Chunks in the window of a prefill of so many tokens an iteration."""
        return 1 if self.states else ceil_div(self.tokens + batch_tokens, self.chunk_tokens) + 1

    def left(self, computed: int) -> int:
        """How many chunks no query from position `computed` on can see."""
        return max(0, computed - self.tokens + 1) // self.chunk_tokens


class WindowPool(BlockPool):
    """Blocks, and which of them lie beside which, or are reserved for a session."""

    def __init__(self, blocks: int, tier: Tier, windows: Windows) -> None:
        super().__init__(blocks, tier)
        self._windows = windows
        self._beside: dict[int, Sequence[int]] = {}
        self._reserved: dict[int, Sequence[int]] = {}

    def widen(self, blocks: Iterable[int], holder: int = NOBODY_NOW) -> None:
        """Give those of these blocks that have none the ones beside them. The caller has checked that there are enough."""
        narrow, count = [block for block in blocks if block not in self._beside], self._windows.beside
        found = self.allocate(len(narrow) * count, holder)
        for place, block in enumerate(narrow):
            self._beside[block] = found[place * count : (place + 1) * count]

    def narrow(self, blocks: Iterable[int]) -> None:
        super().release([other for block in blocks for other in self._beside.pop(block, ())])

    def beside(self, blocks: Iterable[int]) -> list[int]:
        return [other for block in blocks for other in self._beside.get(block, ())]

    def release(self, blocks: Sequence[int]) -> None:
        super().release([*blocks, *(other for block in blocks for other in self._beside.pop(block, ()))])

    def reserve(self, count: int, holder: int) -> None:
        self._reserved[holder] = self.allocate(count, holder)

    def unreserve(self, holder: int) -> None:
        super().release(self._reserved.pop(holder, []))

    def besides(self) -> list[int]:
        return [block for blocks in (*self._beside.values(), *self._reserved.values()) for block in blocks]


class WindowIndex(HeapIndex):
    """Counts the blocks of its chunks too. left: by node, the chunks that have left its window."""

    def __init__(self, policy: EvictionPolicy, view: View, left: dict[int, int], beside: int) -> None:
        super().__init__(policy, view)
        self._left, self._beside = left, beside
        self._within: dict[int, int] = {}  # by node, its chunks in the window
        self.blocks_beside = 0

    @property
    def blocks(self) -> int:
        return self.chunks + self.blocks_beside

    def changed(self, node: Node, more: int) -> None:
        super().changed(node, more)
        self._count(node.number, node.chunks.view.count(self._view, self._left.get(node.number, 0)))

    def remove(self, node: Node) -> None:
        super().remove(node)
        self._count(node.number, 0)

    def _count(self, number: int, within: int) -> None:
        self.blocks_beside += self._beside * (within - self._within.pop(number, 0))
        if within:
            self._within[number] = within


class WindowTiers(Tiers):
    """left: by number of a session, the chunks that have given up what windowed layers had of them. at: the position that
    its states are for, while it is idle."""

    gpu: WindowPool
    cpu: WindowPool
    dirty: WindowIndex
    clean: WindowIndex
    cpu_only: WindowIndex

    def __init__(self, windows: Windows, *given: Any) -> None:
        self.windows = windows
        self.left: dict[int, int] = {}
        self.at: dict[int, int] = {}
        super().__init__(*given)

    def _pool(self, blocks: int, tier: Tier = GPU) -> BlockPool:
        return WindowPool(blocks, tier, self.windows)

    def use(self, pool: Any) -> None:
        """Do nothing: its pools know what lies beside a block."""

    def _victims(self, policy: EvictionPolicy, view: View) -> VictimIndex:
        return WindowIndex(policy, view, self.left, self.windows.beside)

    def widths(self, chosen: Choice) -> NDArray[np.int64]:
        """How many blocks each of these chunks has."""
        left = np.array([self.left.get(node.number, 0) for node in chosen.nodes], np.int64)
        return np.where(chosen.places >= left[chosen.of], 1 + self.windows.beside, 1)

    def _narrow(self, node: Node, start: int, stop: int) -> None:
        """What a copy reads or writes stays until that is over (update)."""
        chunks = node.chunks
        busy = chunks.copying[start:stop]
        for pool, column in ((self.gpu, chunks.gpu), (self.cpu, chunks.cpu)):
            pool.narrow(block for block, copying in zip(column[start:stop], busy, strict=True) if not copying)

    def update(self, node: Node, start: int, stop: int) -> None:
        if left := self.left.get(node.number, 0):
            self._narrow(node, start, min(stop, left))
        super().update(node, start, stop)

    def unpin(self, node: Node) -> None:
        self.settle(node, node.session.computed)
        self.at[node.number] = node.session.computed
        super().unpin(node)

    def cut_into(self, session: Session, computed: int) -> bool:
        """What an idle session has in its window does not serve position `computed`."""
        if self.windows.states:
            return computed != self.at.get(session.number, 0)
        return self.windows.left(computed) < self.left.get(session.number, 0)

    def settle(self, node: Node, computed: int) -> None:
        """The window is where the next position is: give up what lies before it, and have all of it."""
        self.gpu.unreserve(node.number)
        left, chunks = self.windows.left(computed), node.chunks
        self._narrow(node, self.left.get(node.number, 0), left)
        self.left[node.number] = left
        columns = zip(chunks.gpu[left:], chunks.gpu_len[left:], strict=True)
        self.gpu.widen([block for block, length in columns if length], node.number)

    def copy_out(self, chosen: Choice, waiting: Session | None) -> None:
        planned = len(self.planned)
        super().copy_out(chosen, waiting)
        self.counters.swapped_out_blocks += self._with_beside(planned, self.gpu, self.cpu)

    def copy_in(self, session: Session, runs: Iterable[ChunkRun]) -> int:
        planned = len(self.planned)
        chunks = super().copy_in(session, runs)
        beside = self._with_beside(planned, self.cpu, self.gpu)
        self.counters.swapped_in_blocks += beside
        return chunks + beside

    def _with_beside(self, first: int, source: WindowPool, target: WindowPool) -> int:
        """Have the moves planned from `first` on copy the blocks beside theirs too; returns how many these are."""
        count = 0
        for place, move in enumerate(self.planned[first:], first):
            src, dst = source.beside(move.src), target.beside(move.dst)
            assert len(src) == len(dst), "a chunk is in the window on both sides of a copy, or on neither"
            self.planned[place] = replace(move, src=(*move.src, *src), dst=(*move.dst, *dst))
            count += len(src)
        return count

    def lost_for_want(self, lacking: Choice, now_s: float) -> tuple[list[int], Choice]:
        """In blocks: one of the others may not be enough for a chunk in its window."""
        needed = int(self.widths(lacking).sum())
        while self.cpu.free < needed and self.duplicates:
            self.free_duplicates(ceil_div(needed - self.cpu.free, 1 + self.windows.beside))
        free = self.cpu.free
        there = self.cpu_only.choose(max(0, needed - free), now_s)
        others = zip(there.victims(), self.widths(there).tolist(), strict=True)
        least, lost, instead = next(others, None), [], 0
        for row, (victim, width) in enumerate(zip(lacking.victims(), self.widths(lacking).tolist(), strict=True)):
            while free < width and least is not None and not victim < least[0]:
                free, instead = free + least[1], instead + 1
                least = next(others, None)
            if free < width:
                lost.append(row)
            else:
                free -= width
        return lost, there.some(slice(instead))


class Need(NamedTuple):
    """What an admission needs, in chunks. again: leading ones that are computed again. first, done: those between were
    computed, and are in the window. last: those from here on are in it when the prompt is computed. passing: those that get
    KV, or keep it, without blocks beside theirs."""

    again: int
    first: int
    done: int
    last: int
    passing: int

    def within(self, start: int, stop: int) -> list[range]:
        """Those of the chunks [start, stop) that have blocks beside theirs."""
        both = range(max(start, self.first), min(stop, self.done, self.last)), range(max(start, self.last), stop)
        return [run for run in both if run]


class WindowRoom(TwoTierRoom):
    """As TwoTierRoom, in blocks: a chunk has one, or as many more as lie beside it."""

    tiers: WindowTiers
    frees = True

    def __init__(self, tiers: WindowTiers) -> None:
        super().__init__(tiers)
        self.chunk_blocks = 1 + tiers.windows.beside
        self.most_passing = 0
        """Chunks of a prefill that are in its window while they are computed."""

    def begin(self, batch_tokens: int) -> None:
        self.most_passing = max(self.most_passing, self.tiers.windows.passing(batch_tokens))

    @property
    def available(self) -> int:
        tiers = self.tiers
        return tiers.gpu.free + tiers.clean.blocks + (0 if self.cpu_blocks else tiers.dirty.blocks)

    @property
    def outgoing(self) -> int:
        if not self.tiers.copies.outgoing:
            return 0
        outward = (one for one in self.tiers.copies.under_way() if one.outward and not one.node.running)
        pool = self.tiers.gpu
        own = [block for one in outward for block, fate in zip(one.gpu, one.fates, strict=True) if fate == ALIVE]
        return len(own) + len(pool.beside(own))

    def need(self, session: Session, keep: int, length: int) -> Need:
        """Of an idle session that keeps so many tokens, and then has `length`."""
        windows, size = self.tiers.windows, self.tiers.chunk_tokens
        computed, left = min(session.computed, keep), self.tiers.left.get(session.number, 0)
        done, last = chunks_of(computed, size), windows.left(length)
        further = max(0, last - done)
        if self.tiers.cut_into(session, computed):
            return Need(done, last, done, last, done + further)
        again = _hole_ends(session, computed, size) if left else 0  # with all windows there, holes alone are computed
        return Need(again, left, done, last, min(again, left) + further)

    def reserved(self, need: Need) -> int:
        """Blocks for the window of a prefill as it moves."""
        return self.tiers.windows.beside * min(need.passing, self.most_passing)

    def lacking(self, session: Session, keep: int, prompt: TokenArray[int]) -> int:
        size, need = self.tiers.chunk_tokens, self.need(session, keep, len(prompt))
        column = session.chunks.gpu[: chunks_of(keep, size)]
        within = need.within(0, chunks_of(len(prompt) + 1, size))
        there = [column[run.start : run.stop] for run in within]
        lacks = sum(map(len, within)) - sum(len(run) - run.count(NO_BLOCK) for run in there)
        left, counted = self.tiers.left.get(session.number, 0), len(session.chunks)
        if not self.tiers.copies.in_flight:
            counted = min(counted, chunks_of(keep, size))
        available = (View.CLEAN,) if self.cpu_blocks else (View.CLEAN, View.DIRTY)
        own = sum(session.chunks.view.count(view, left, counted) for view in available)
        beside = self.tiers.windows.beside * (lacks + own)
        return super().lacking(session, keep, prompt) + beside + self.reserved(need)

    def swap_out(self, blocks: int, now_s: float, waiting: Session | None, spare: bool = False) -> None:
        if spare:
            blocks = min(blocks, self.spare_cpu_blocks)
        if self.cpu_blocks and blocks > 0:
            self.copy_out(self._worth(self.tiers.dirty, blocks, now_s, whole=not spare), now_s, waiting)

    def _free_gpu(self, victims: VictimIndex, take: Callable[[Sequence[Span]], None], blocks: int, now_s: float) -> int:
        if blocks <= 0 or not victims.chunks:
            return 0
        chosen = self._worth(victims, blocks, now_s, whole=True)
        freed = self.blocks_of(chosen)
        take(chosen.spans())
        return freed

    def _worth(self, victims: VictimIndex, blocks: int, now_s: float, whole: bool) -> Choice:
        """The first victims that have so many blocks together."""
        chosen = victims.choose(blocks, now_s, whole=whole)
        if len(chosen) > blocks:
            return chosen  # whole conversations
        together = np.cumsum(self.tiers.widths(chosen))
        return chosen.some(slice(int(np.searchsorted(together, blocks)) + 1))

    def blocks_of(self, chosen: Choice) -> int:
        return int(self.tiers.widths(chosen).sum())

    def _take_cpu(self, node: Node, start: int, stop: int) -> None:
        super()._take_cpu(node, start, stop)
        within = max(start, self.tiers.left.get(node.number, 0))
        self.tiers.cpu.widen(node.chunks.cpu[within:stop], node.number)

    def take_gpu(self, session: Session, count: int, now_s: float, behind: int | None = None) -> tuple[int, ...]:
        """Of a session that is being admitted, those of its chunks that have none take them, in order; of one that runs,
        further ones."""
        column = session.leaf.chunks.gpu
        lacking = [index for index, block in enumerate(column) if block == NO_BLOCK]
        assert len(lacking) in (0, count), "chunks are loaded with the request that needs them"
        wide = list(range(count))
        if lacking:
            need = self.need(session, session.computed, len(session.tokens))
            within = {index for run in need.within(0, len(column)) for index in run}
            wide = [place for place, index in enumerate(lacking) if index in within]
        self.make_free(count + self.tiers.windows.beside * len(wide), now_s)
        blocks = super().take_gpu(session, count, now_s, behind)
        self.tiers.gpu.widen((blocks[place] for place in wide), session.number)
        return blocks

    def make_free(self, count: int, now_s: float) -> None:
        """Of those available, as take_gpu does."""
        pool = self.tiers.gpu
        if (lacking := count - pool.free) > 0 and (lacking := lacking - self.reclaim(lacking, now_s)) > 0:
            assert not self.cpu_blocks, "admission took more blocks than are available"
            self.drop(lacking, now_s)


class WindowedCache(TwoTierCache):
    """TwoTierCache with blocks of the layers without a window. gpu_blocks, cpu_blocks: of these."""

    tiers: WindowTiers
    room: WindowRoom
    drops = False

    def __init__(
        self,
        *,
        window_tokens: int | None,
        beside: int,
        states: bool = False,
        policy: EvictionPolicy,
        chunk_tokens: int,
        gpu_blocks: int,
        cpu_blocks: int,
        restore: RestoreMode = "load",
        reuse: Reuse = "any",
    ) -> None:
        """window_tokens: that a windowed layer attends to; layers with states need none. beside: blocks that a chunk in the
        window has besides its own. states: these hold one state.

        Raises ConfigError for what would need KV that has left its window.
        """
        if restore != "load" or reuse != "any":
            raise ConfigError(
                "cache.windows=slide keeps too little to go on from the middle of a conversation; set "
                "baseline.cache.restore=load and baseline.cache.reuse=any, or cache.windows=whole."
            )
        # Of states: the last position is in the last chunk always.
        tokens = 2 if states or window_tokens is None else window_tokens
        self.windows = Windows(tokens, beside, chunk_tokens, states)
        super().__init__(policy=policy, chunk_tokens=chunk_tokens, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks)
        self.room = WindowRoom(self.tiers)

    def _tiers(self, *given: Any) -> Tiers:
        return WindowTiers(self.windows, *given)

    def begin(self, **parts: Any) -> None:
        super().begin(**parts)
        self.room.begin(parts.get("batch_tokens", 1))
        # At most the window that was kept, the one behind the prompt, and that of a prefill on its way.
        within = self.room.most_passing + 2 * (ceil_div(self.windows.tokens, self.chunk_tokens) + 1)
        beside = self.windows.beside
        self.request_blocks = max(self.gpu_blocks - beside * within, self.gpu_blocks // (1 + beside))

    def extend(self, session: Session, length: int, now_s: float) -> tuple[int, tuple[int, ...]] | None:
        """What has left the window goes first."""
        tiers, room, leaf = self.tiers, self.room, session.leaf
        count = chunks_of(length, self.chunk_tokens) - len(leaf.chunks)
        if count > 0:
            tiers.settle(leaf, max(length - 2, 0))  # a plan in flight may compute the position before
            if count * room.chunk_blocks > room.available:
                return None
        return super().extend(session, length, now_s)

    def fork(self, parent: Session, child: Session, length: int, takes_kv: bool) -> None:
        """The child begins without KV: the parent's window is behind it."""
        super().fork(parent, child, length, takes_kv=False)

    def check(self) -> None:
        super().check()
        for session in self.sessions.values():
            chunks, left = session.chunks, self.tiers.left.get(session.number, 0)
            for pool, blocks in ((self.tiers.gpu, chunks.gpu), (self.tiers.cpu, chunks.cpu)):
                for index, block in enumerate(blocks) if not session.running else ():
                    assert block == NO_BLOCK or index < left or pool.beside((block,)), "a window is not whole"

    def _strand(self, session: Session) -> frozenset[int]:
        """Have an idle session that is about to run compute again all before its last hole, and everything where its window
        is not there. Returns the chunks that it had of these."""
        need = self.room.need(session, session.computed, len(session.tokens))
        chunks, leaf = session.chunks, session.leaf
        lengths = enumerate(map(max, chunks.gpu_len[: need.again], chunks.cpu_len[: need.again]))
        stranded = frozenset(index for index, length in lengths if length)
        for start, stop in runs_of(sorted(stranded)):
            self.tiers.strand(leaf, start, stop)
        if self.tiers.cut_into(session, session.computed):
            self.tiers.left[session.number] = need.done  # until it is computed, nothing of it is in the window
        return stranded

    def _start(self, session: Session, found: Found | None, now_s: float) -> Admission:
        need = self.room.need(session, session.computed, len(session.tokens))
        admission = super()._start(session, found, now_s)
        reserved = self.room.reserved(need)
        self.room.make_free(reserved, now_s)
        self.tiers.gpu.reserve(reserved, session.number)
        return admission

    def _let_go(self, session: Session) -> None:
        super()._let_go(session)
        self.tiers.left.pop(session.number, None)
        self.tiers.at.pop(session.number, None)


def _hole_ends(session: Session, computed: int, chunk_tokens: int) -> int:
    """The first chunk behind the last one that lacks KV of the first `computed` positions; 0: none does."""
    chunks, whole = session.chunks, computed // chunk_tokens
    there = list(map(max, chunks.gpu_len[: whole + 1], chunks.cpu_len[: whole + 1]))
    there += [0] * (whole + 1 - len(there))
    if there[whole] < computed % chunk_tokens:
        return whole + 1
    if there[:whole].count(chunk_tokens) == whole:
        return 0
    return max(index for index in range(whole) if there[index] < chunk_tokens) + 1
