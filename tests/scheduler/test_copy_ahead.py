"""What is copied ahead of time: what each mode keeps, what it gives up for it, and how auto chooses."""

from __future__ import annotations

from array import array

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import GPU, Moved
from pensieve.core.policies.lru import Lru
from pensieve.errors import ConfigError
from pensieve.plugins.overlap import Never, choose_copy_ahead
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
    cache.check()


def test_the_head_changes_places_with_what_leaves_the_gpu():
    """Its six chunks on CPU and the six of another on GPU, and not a block free: the first of them goes, and then each place
    that becomes free is used by the next."""
    cache = TwoTierCache(policy=Lru(policy_context(4, 6, 6)), chunk_tokens=4, gpu_blocks=6, cpu_blocks=6)
    idle(cache, "a", 6)
    copied_out(cache, 6)
    cache.room.reclaim(6, 1.0)
    idle(cache, "b", 6)
    a = cache.sessions.get("a")
    assert a is not None and cache.places(a) == "CCCCCC"
    a.mark_waiting(1)
    cache.reorder(a)
    plans = 0
    while (lacking := cache.room.lacking(a, 20, array("i", range(22)))) > 0:
        Never(cache.room).make_room(a, lacking, 2.0)
        moves = cache.take_moves()
        assert moves or cache.room.outgoing
        finish(cache, moves)
        cache.check()
        plans += 1
        assert plans < 30, "it comes to an end"
    b = cache.sessions.get("b")
    assert b is not None
    kept = sum(chunk.resident_len for chunk in (*a.chunks, *b.chunks))
    print(f"{kept} of 46 tokens kept, in {plans} plans: {cache.places(a)} {cache.places(b)}")
    assert kept >= 42, "one chunk was given up to begin with, not six"
    admission = cache.admit(a, 20, array("i", [1, 2]), 3.0)
    assert admission.found is not None and (admission.found.gpu, admission.found.cpu) == ((), ((0, 20),))
    cache.check()


def test_the_head_does_not_give_up_its_own_chunks_for_its_own_chunks():
    """It waits for more than there is, and was active before all others: for the policy its chunks are the first to go."""
    cache = TwoTierCache(policy=Lru(policy_context(4, 14, 20)), chunk_tokens=4, gpu_blocks=14, cpu_blocks=20)
    for number, name in enumerate("ab"):
        idle(cache, name, 6 - 2 * number)
        copied_out(cache, 6)
    running = cache.open("running", 0.0)
    cache.admit(running, 0, array("i", range(23)), 2.0)  # six blocks, two of them from the oldest
    a, b = cache.sessions.get("a"), cache.sessions.get("b")
    assert a is not None and b is not None
    assert sorted(cache.places(a)) == [*"BBBBCC"] and cache.places(b) == "BBBB"
    a.mark_waiting(1)
    cache.reorder(a)
    b.mark_waiting(2)
    cache.reorder(b)
    loaded = 0
    for _ in range(20):
        lacking = cache.room.lacking(a, 20, array("i", range(50)))
        assert lacking > 0
        Never(cache.room).make_room(a, lacking, 3.0)
        moves = cache.take_moves()
        loaded += sum(len(move.src) for move in moves if move.target == GPU)
        finish(cache, moves)
        cache.check()
    assert cache.places(a) == "BBBBBB" and loaded == 2


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
    with pytest.raises(ConfigError, match=r"scheduler\.copy_ahead is one of auto, paper, spare, never, not 'always'"):
        choose_copy_ahead("always", 10, False)
