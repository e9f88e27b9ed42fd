"""What is copied ahead of time: what each mode keeps, what it gives up for it, and how auto chooses."""

from array import array

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import Moved
from pensieve.core.policies.lru import Lru
from pensieve.plugins.overlap import choose_copy_ahead
from tests.crossings import calls_of
from tests.invariants import check_cache
from tests.simulated import policy_context


def idle(cache, name, chunks):
    """A conversation of so many chunks, the last one not quite filled, all on GPU."""
    session, tokens = cache.open(name, 0.0), 4 * chunks - 1
    cache.admit(session, 0, array("i", range(tokens)), 0.0)
    cache.advance(session, [(0, tokens)])
    cache.release(session, 0.0)


def copied_out(cache, blocks):
    """So many chunks have been copied to the CPU."""
    cache.room.swap_out(blocks, 1.0, None)
    finish(cache, cache.take_moves())


def finish(cache, moves):
    cache.finish([Moved(move.ticket) for move in moves])


@pytest.mark.parametrize("ahead", ["paper", "spare"])
def test_a_copy_ahead_of_time_costs_nobody_its_only_copy(ahead):
    cache = TwoTierCache(policy=Lru(policy_context(4, 12, 6)), chunk_tokens=4, gpu_blocks=12, cpu_blocks=6)
    idle(cache, "a", 5)
    copied_out(cache, 5)
    cache.room.reclaim(5, 1.0)
    idle(cache, "b", 5)
    cache.room.swap_out(4, 2.0, None, spare=ahead == "spare")
    assert [len(move.src) for move in cache.take_moves()] == ([4] if ahead == "paper" else [1])
    assert cache.counters.dropped_chunks == (3 if ahead == "paper" else 0)
    check_cache(cache)


def test_a_step_does_not_look_at_blocks_that_still_wait_for_their_copies():
    """Each chunk of a forgotten conversation is being copied out. Work is counted in calls."""
    costs = []
    for chunks in (40, 400):
        blocks = chunks + 1
        policy = Lru(policy_context(4, blocks, blocks))
        cache = TwoTierCache(policy=policy, chunk_tokens=4, gpu_blocks=blocks, cpu_blocks=blocks)
        idle(cache, "a", chunks)
        cache.room.swap_out(chunks, 0.0, None)
        cache.plans(0, 1)
        assert cache.room.outgoing == chunks
        copies = cache.take_moves()
        cache.forget(cache.sessions["a"])
        cache.plans(1, 1)
        assert cache.tiers.gpu.free == 1, "all the others are read by copies"
        cache.plans(1, 2)
        costs.append(calls_of(lambda cache=cache: cache.plans(2, 2)))
        check_cache(cache)
        finish(cache, copies)
        check_cache(cache)
        assert cache.tiers.gpu.free == cache.tiers.cpu.free == blocks
    assert costs[0] == costs[1]


# -- auto -------------------------------------------------------------------------------------------------------------


def test_auto_goes_by_what_the_tiers_are_and_by_their_sizes():
    assert choose_copy_ahead("auto", 10, one_memory=True).mode == "never"
    assert choose_copy_ahead("auto", 10, one_memory=False).mode == "paper"
    assert choose_copy_ahead("auto", 0, one_memory=True).mode == "paper"
    assert choose_copy_ahead("spare", 10, one_memory=True) == choose_copy_ahead("spare", 0, False)
    assert choose_copy_ahead("auto", 10, False, kept_clean=10).mode == "paper"
    small = choose_copy_ahead("auto", 9, False, kept_clean=10)
    assert small.mode == "spare" and "9 blocks, fewer than the 10" in small.note
    assert choose_copy_ahead("auto", 9, True, kept_clean=10).mode == "never"
    assert choose_copy_ahead("paper", 9, False, kept_clean=10).mode == "paper"
