"""Copies under way: what they cost does not grow with how many there are, and what is counted is what a recount finds."""

from __future__ import annotations

from array import array

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import Moved
from pensieve.core.policies.lru import Lru
from pensieve.core.session import Session
from tests.crossings import calls_of
from tests.invariants import check_cache
from tests.simulated import policy_context


def cache_of(blocks: int) -> TwoTierCache:
    return TwoTierCache(
        policy=Lru(policy_context(4, blocks, blocks)), chunk_tokens=4, gpu_blocks=blocks, cpu_blocks=blocks
    )


def rest(cache: TwoTierCache, name: str, chunks: int) -> None:
    """A conversation of so many chunks, all of them on GPU, idle."""
    session, tokens = cache.open(name, 0.0), array("i", range(4 * chunks))
    cache.admit(session, 0, tokens, 0.0)
    cache.advance(session, [(0, 4 * chunks)])
    cache.release(session, 0.0)


def under_way(chunks: int) -> tuple[TwoTierCache, list[Moved]]:
    """Each chunk of a conversation is being copied out, while a plan is in flight."""
    cache = cache_of(chunks + 1)
    rest(cache, "a", chunks)
    cache.room.swap_out(chunks, 0.0, None)
    cache.plans(0, 1)
    assert cache.room.outgoing == chunks
    return cache, [Moved(move.ticket) for move in cache.take_moves()]


def session_of(cache: TwoTierCache, name: str) -> Session:
    session = cache.sessions.get(name)
    assert session is not None
    return session


def test_a_step_does_not_look_at_blocks_that_still_wait_for_their_copies() -> None:
    costs = []
    for chunks in (40, 400):
        cache, copies = under_way(chunks)
        cache.forget(session_of(cache, "a"))
        cache.plans(1, 1)
        assert cache.tiers.gpu.free == 1, "all the others are read by copies"
        cache.plans(1, 2)
        costs.append(calls_of(lambda cache=cache: cache.plans(2, 2)))
        check_cache(cache)
        cache.finish(copies)
        check_cache(cache)
        assert cache.tiers.gpu.free == cache.tiers.cpu.free == chunks + 1
    assert costs[0] == costs[1]
