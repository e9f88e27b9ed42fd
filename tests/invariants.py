"""What must always be true of a cache: its own check, and of Tiers what costs as much to check as everything there is."""

from collections import Counter
from collections.abc import Collection
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pensieve.core.cache.base import CacheManager
from pensieve.core.cache.blocks import ABANDONED, ALIVE
from pensieve.core.cache.tiers import Tiers
from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.session import NO_BLOCK, Node, Session, View, chunks_of


def check_cache(cache: CacheManager) -> None:
    """Assert every invariant."""
    cache.check()
    if isinstance(cache, TwoTierCache):
        _check_tiers(cache.tiers, cache.sessions.values())


def _check_tiers(tiers: Tiers, sessions: Collection[Session]) -> None:
    """sessions: all that the cache knows."""
    users = [(node, session) for session in sessions for node in session.nodes()]
    nodes = {node.number: node for node, _ in users}
    running = Counter(node.number for node, session in users if session.running)
    assert all(node is nodes[node.number] for node, _ in users), "two nodes have one number"
    assert all(node.running == running[node.number] for node in nodes.values())
    all_chunks = _AllChunks(nodes)
    _check_pools(tiers, all_chunks)
    _check_copies(tiers, all_chunks)
    _check_sessions(tiers.chunk_tokens, sessions, users, all_chunks)
    _check_chunks(tiers.chunk_tokens, all_chunks)
    _check_victims(tiers, all_chunks)


class _AllChunks:
    """The records of all chunks, in columns. of: the place of a chunk's node among all. index: of the chunk in its node."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes = list(nodes.values())
        counts = [len(node.chunks) for node in self.nodes]
        firsts = accumulate(counts, initial=0)
        self.first = {number: (first, count) for number, first, count in zip(nodes, firsts, counts, strict=False)}
        self.of = np.repeat(np.arange(len(counts)), counts)
        self.index = np.concatenate([np.arange(count) for count in (0, *counts)])
        self.running = np.array([bool(node.running) for node in self.nodes], bool)[self.of]
        self.gpu, self.gpu_len, self.cpu, self.cpu_len, self.copying, self.view = map(self._column, _COLUMNS)

    def _column(self, name: str) -> NDArray[np.int64]:
        columns = [np.array(getattr(node.chunks, name), np.int64) for node in self.nodes]
        return np.concatenate([np.empty(0, np.int64), *columns])

    def places(self, number: int, start: int, stop: int) -> slice:
        """Of those of the chunks [start, stop) of the node of that number that are still there."""
        first, count = self.first.get(number, (0, 0))
        return slice(first + min(start, count), first + min(stop, count))


_COLUMNS = ("gpu", "gpu_len", "cpu", "cpu_len", "copying", "view")


def _check_pools(tiers: Tiers, chunks: _AllChunks) -> None:
    """Every block is free, in quarantine, or a chunk's: exactly one of these."""
    for on_gpu, pool, column in ((True, tiers.gpu, chunks.gpu), (False, tiers.cpu, chunks.cpu)):
        owned = column[column != NO_BLOCK].tolist()
        held = [*owned, *tiers.copies.quarantined(on_gpu), *pool.besides()]
        free = pool.free_blocks()
        assert len(free) == pool.free
        assert len(held) == len(set(held)), "a block belongs to two chunks"
        assert free.isdisjoint(held), "a free block is in use"
        assert len(free) + len(held) == pool.blocks, "a block was lost"


def _check_copies(tiers: Tiers, chunks: _AllChunks) -> None:
    copying = np.zeros_like(chunks.copying)
    under_way: set[tuple[int, int]] = set()
    for moved in tiers.copies.under_way():
        number, own = moved.node.number, moved.node.chunks
        assert max(moved.lengths) <= tiers.chunk_tokens
        for start, stop in moved.runs(ABANDONED):
            copying[chunks.places(number, start, stop)] += 1
        for index in (index for start, stop in moved.runs(ALIVE) for index in range(start, stop)):
            assert (number, index) not in under_way, "two copies of one chunk are alive"
            under_way.add((number, index))
            place = index - moved.first
            blocks = moved.gpu[place], moved.cpu[place]
            assert (own.gpu[index], own.cpu[index]) == blocks, "a chunk under way kept its blocks"
            if not moved.outward:
                assert own.gpu_len[index] >= moved.lengths[place], "KV on its way counts as there; plans wait for it"
    assert (chunks.copying == copying).all()


def _check_sessions(
    chunk_tokens: int, sessions: Collection[Session], users: Collection[tuple[Node, Session]], chunks: _AllChunks
) -> None:
    for session in sessions:
        assert session.computed <= len(session.tokens)
        assert sum(len(node.chunks) for node in session.nodes()) <= chunks_of(len(session.tokens) + 1, chunk_tokens)
    resident = chunks.index * chunk_tokens + np.maximum(chunks.gpu_len, chunks.cpu_len)
    for node, session in users:
        first, count = chunks.first[node.number]
        if count:
            # KV of a turn's last token may be there; it does not count (Session.stop).
            ends = node.start * chunk_tokens + int(resident[first : first + count].max())
            assert ends <= max(session.computed, len(session.tokens))


def _check_chunks(chunk_tokens: int, chunks: _AllChunks) -> None:
    gpu, gpu_len, cpu, cpu_len = chunks.gpu, chunks.gpu_len, chunks.cpu, chunks.cpu_len
    on_gpu, on_cpu, idle, still = gpu != NO_BLOCK, cpu != NO_BLOCK, ~chunks.running, chunks.copying == 0
    assert ((gpu_len >= 0) & (gpu_len <= chunk_tokens) & (cpu_len >= 0) & (cpu_len <= chunk_tokens)).all()
    assert not gpu_len[~on_gpu].any() and not cpu_len[~on_cpu].any(), "KV without a block"
    assert cpu_len[on_cpu & still].all(), "a CPU block holds nothing, and nothing is on its way"
    expected = np.select(
        [~(idle & still), (gpu_len > 0) & (cpu_len == gpu_len), gpu_len > 0, cpu_len > 0],
        [View.NONE, View.CLEAN, View.DIRTY, View.CPU_ONLY],
        View.NONE,
    )
    assert (chunks.view == expected).all()
    assert gpu_len[idle & on_gpu].all(), "an idle chunk holds a block without KV"
    assert (gpu_len >= cpu_len)[idle & on_gpu].all(), "KV computed again in part outlived its request"


def _check_victims(tiers: Tiers, chunks: _AllChunks) -> None:
    """The indices have the chunks of their view, and the duplicates are the second copies of chunks in use."""
    second = chunks.running & (chunks.cpu != NO_BLOCK) & (chunks.copying == 0) & (chunks.gpu_len >= chunks.cpu_len)
    numbers = np.array([node.number for node in chunks.nodes], np.int64)[chunks.of]
    there = zip(numbers[second].tolist(), chunks.index[second].tolist(), strict=True)
    assert set(tiers.duplicates) == set(there)
    for view, victims in ((View.DIRTY, tiers.dirty), (View.CLEAN, tiers.clean), (View.CPU_ONLY, tiers.cpu_only)):
        of_view = chunks.view == view
        assert victims.chunks == np.count_nonzero(of_view)
        leads: dict[int, tuple[int, int]] = {}
        for number, index in zip(numbers[of_view].tolist(), chunks.index[of_view].tolist(), strict=True):
            first, count = leads.get(number, (index, 0))
            leads[number] = (~index if tiers.from_tail else first, count + 1)
        assert victims.leads() == leads
