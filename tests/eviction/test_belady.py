"""Belady's choice among conversations that wait: by when their requests are admitted, not by what is scheduled after them."""

from __future__ import annotations

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.belady import Belady
from tests.invariants import check_cache
from tests.simulated import policy_context, request


def idle(cache, name, tokens):
    session = cache.open(name, 0.0)
    cache.admit(session, 0, request(1, name, tokens, 1).prompt, 0.0)
    cache.advance(session, [(0, tokens)])
    cache.release(session, 0.0)
    return session


def test_of_two_that_wait_the_one_that_is_served_last_goes_first():
    cache = TwoTierCache(policy=Belady(policy_context(4, 8, 0)), chunk_tokens=4, gpu_blocks=8, cpu_blocks=0)
    first, second = idle(cache, "first", 8), idle(cache, "second", 8)
    first.next_use_s, second.next_use_s = 100.0, 10.0  # behind the requests that wait
    first.mark_waiting(1)
    cache.reorder(first)
    second.mark_waiting(2)
    cache.reorder(second)
    cache.room.drop(1, 5.0)
    lost = [session.name for session in (first, second) if session.chunks[0].gpu is None]
    assert lost == ["second"]
    first.unmark_waiting(1)  # it is admitted, ends, and is next asked long after the second one
    cache.reorder(first)
    cache.room.drop(1, 6.0)
    assert first.chunks[0].gpu is None
    check_cache(cache)
