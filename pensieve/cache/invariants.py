"""What must always be true of a TwoTierCache; for tests, since the check costs as much as everything there is."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pensieve.cache.chunk import Chunk, View
from pensieve.units import ceil_div

if TYPE_CHECKING:
    from pensieve.cache.two_tier import TwoTierCache


def check_two_tier(cache: TwoTierCache) -> None:
    _check_pools(cache)
    cache.transfers.check()
    copying: Counter[int] = Counter()
    for moved in cache.transfers.under_way():
        copying[id(moved.chunk)] += 1
        if moved.alive and not moved.outward:
            assert moved.chunk.gpu_len >= moved.length, "KV on its way counts as there; plans wait for it"
        assert moved.length <= cache.chunk_tokens
        if moved.alive:
            assert moved.session.chunks[moved.index] is moved.chunk
            assert (moved.chunk.gpu, moved.chunk.cpu) == (moved.gpu, moved.cpu), "a chunk under way kept its blocks"
    members: dict[View, set[tuple[int, int]]] = {view: set() for view in View if view is not View.NONE}
    assert cache._running == sum(session.running for session in cache.sessions.values())
    for session in cache.sessions.values():
        assert session.computed <= len(session.tokens)
        assert session.running or session.computed < max(len(session.tokens), 1)
        assert len(session.chunks) <= ceil_div(len(session.tokens) + 1, cache.chunk_tokens)
        for index, chunk in enumerate(session.chunks):
            _check_chunk(cache, chunk, session.running)
            assert chunk.copying == copying[id(chunk)]
            assert index * cache.chunk_tokens + chunk.resident_len <= max(session.computed, len(session.tokens))
            if chunk.view is not View.NONE:
                members[chunk.view].add((session.order, index))
            is_shadow = (session.order, index) in cache.shadows
            assert is_shadow == (
                chunk.pins > 0 and chunk.cpu is not None and not chunk.copying and chunk.gpu_len >= chunk.cpu_len
            )
    for view, index_of_view in ((View.DIRTY, cache.dirty), (View.CLEAN, cache.clean), (View.CPU_ONLY, cache.cpu_only)):
        chunks = members[view]
        assert index_of_view.chunks == len(chunks)
        leads: dict[int, tuple[int, int]] = {}
        for order, index in sorted(chunks):
            first, count = leads.get(order, (index, 0))
            leads[order] = (first, count + 1)
        assert index_of_view.leads() == leads


def _check_pools(cache: TwoTierCache) -> None:
    """Every block is free, in quarantine, or a chunk's: exactly one of these."""
    for on_gpu, pool in ((True, cache.gpu), (False, cache.cpu)):
        held = [
            block
            for session in cache.sessions.values()
            for chunk in session.chunks
            if (block := chunk.gpu if on_gpu else chunk.cpu) is not None
        ]
        held += cache.transfers.quarantined(on_gpu)
        free = pool.free_blocks()
        assert len(free) == pool.free
        assert len(held) == len(set(held)), "a block belongs to two chunks"
        assert not free & set(held), "a free block is in use"
        assert len(free) + len(held) == pool.blocks, "a block was lost"


def _check_chunk(cache: TwoTierCache, chunk: Chunk, running: bool) -> None:
    assert chunk.pins == (1 if running else 0)
    assert 0 <= chunk.gpu_len <= cache.chunk_tokens
    assert 0 <= chunk.cpu_len <= cache.chunk_tokens
    assert chunk.gpu is not None or chunk.gpu_len == 0
    assert chunk.cpu is not None or chunk.cpu_len == 0
    assert chunk.cpu is None or chunk.cpu_len or chunk.copying
    expected = View.NONE
    if not chunk.pins and not chunk.copying:
        if chunk.gpu_len:
            expected = View.CLEAN if chunk.clean else View.DIRTY
        elif chunk.cpu_len:
            expected = View.CPU_ONLY
    assert chunk.view is expected
    assert running or chunk.gpu is None or chunk.gpu_len, "an idle chunk holds a block without KV"
    assert running or chunk.gpu is None or chunk.gpu_len >= chunk.cpu_len, (
        "KV computed again in part outlived its request"
    )
