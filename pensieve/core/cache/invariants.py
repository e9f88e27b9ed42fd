"""What must always be true of Tiers; for tests, since the check costs as much as everything there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from pensieve.core.cache.blocks import ABANDONED, ALIVE
from pensieve.core.cache.tiers import Tiers
from pensieve.core.session import Chunk, Node, Session, View, chunks_of


def check_tiers(tiers: Tiers, sessions: Collection[Session]) -> None:
    """sessions: all that the cache knows."""
    users = [(node, session) for session in sessions for node in session.nodes()]
    nodes = {node.number: node for node, _ in users}
    running = Counter(node.number for node, session in users if session.running)
    assert all(node is nodes[node.number] for node, _ in users), "two nodes have one number"
    _check_pools(tiers, nodes.values())
    tiers.copies.check()
    copying: Counter[tuple[int, int]] = Counter()
    under_way: set[tuple[int, int]] = set()
    for moved in tiers.copies.under_way():
        number, chunks = moved.node.number, moved.node.chunks
        assert max(moved.lengths) <= tiers.chunk_tokens
        copying.update((number, index) for start, stop in moved.runs(ABANDONED) for index in range(start, stop))
        for index in (index for start, stop in moved.runs(ALIVE) for index in range(start, stop)):
            assert (number, index) not in under_way, "two copies of one chunk are alive"
            under_way.add((number, index))
            place = index - moved.first
            blocks = moved.gpu[place], moved.cpu[place]
            assert (chunks.gpu[index], chunks.cpu[index]) == blocks, "a chunk under way kept its blocks"
            if not moved.outward:
                assert chunks.gpu_len[index] >= moved.lengths[place], "KV on its way counts as there; plans wait for it"
    for session in sessions:
        assert session.computed <= len(session.tokens)
        assert len(session.chunks) <= chunks_of(len(session.tokens) + 1, tiers.chunk_tokens)
        for index, chunk in enumerate(session.chunks):
            # KV of a turn's last token may be there; it does not count (Session.stop).
            assert index * tiers.chunk_tokens + chunk.resident_len <= max(session.computed, len(session.tokens))
    members: dict[View, set[tuple[int, int]]] = {view: set() for view in View if view is not View.NONE}
    for node in nodes.values():
        assert node.running == running[node.number]
        for index, chunk in enumerate(node.chunks):
            _check_chunk(tiers.chunk_tokens, chunk, bool(node.running))
            assert chunk.copying == copying[node.number, index]
            if chunk.view is not View.NONE:
                members[chunk.view].add((node.number, index))
            is_duplicate = (node.number, index) in tiers.duplicates
            assert is_duplicate == bool(
                node.running and chunk.cpu is not None and not chunk.copying and chunk.gpu_len >= chunk.cpu_len
            )
    for view, index_of_view in ((View.DIRTY, tiers.dirty), (View.CLEAN, tiers.clean), (View.CPU_ONLY, tiers.cpu_only)):
        of_view = members[view]
        assert index_of_view.chunks == len(of_view)
        leads: dict[int, tuple[int, int]] = {}
        for number, index in sorted(of_view):
            first, count = leads.get(number, (index, 0))
            leads[number] = (~index if tiers.from_tail else first, count + 1)
        assert index_of_view.leads() == leads


def _check_pools(tiers: Tiers, nodes: Collection[Node]) -> None:
    """Every block is free, in quarantine, or a chunk's: exactly one of these."""
    for on_gpu, pool in ((True, tiers.gpu), (False, tiers.cpu)):
        owned = [
            block
            for node in nodes
            for chunk in node.chunks
            if (block := chunk.gpu if on_gpu else chunk.cpu) is not None
        ]
        held = [*owned, *tiers.copies.quarantined(on_gpu), *pool.besides()]
        free = pool.free_blocks()
        assert len(free) == pool.free
        assert len(held) == len(set(held)), "a block belongs to two chunks"
        assert not free & set(held), "a free block is in use"
        assert len(free) + len(held) == pool.blocks, "a block was lost"


def _check_chunk(chunk_tokens: int, chunk: Chunk, running: bool) -> None:
    assert 0 <= chunk.gpu_len <= chunk_tokens
    assert 0 <= chunk.cpu_len <= chunk_tokens
    assert chunk.gpu is not None or chunk.gpu_len == 0
    assert chunk.cpu is not None or chunk.cpu_len == 0
    assert chunk.cpu is None or chunk.cpu_len or chunk.copying
    expected = View.NONE
    if not running and not chunk.copying:
        if chunk.gpu_len:
            expected = View.CLEAN if chunk.cpu_len == chunk.gpu_len else View.DIRTY
        elif chunk.cpu_len:
            expected = View.CPU_ONLY
    assert chunk.view is expected
    assert running or chunk.gpu is None or chunk.gpu_len, "an idle chunk holds a block without KV"
    assert running or chunk.gpu is None or chunk.gpu_len >= chunk.cpu_len, (
        "KV computed again in part outlived its request"
    )
