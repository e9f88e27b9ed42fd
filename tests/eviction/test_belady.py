"""Belady's choice among conversations that wait: by when their requests are admitted, not by what is scheduled after them."""

from __future__ import annotations

import random

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.clock import VirtualClock
from pensieve.core.policies.belady import Belady
from pensieve.core.session import Session
from pensieve.lab.bound import offline_bound
from tests.simulated import make_engine, policy_context, request, run


class ByTheUseBehindTheQueue(Belady):
    """As it was: a submitted request hid itself, and what is scheduled behind it decided."""

    def order(self, session, chunk):
        return -session.next_use_s if session.next_use_s is not None else float("-inf")


def idle(cache, name, tokens):
    session = cache.open(name, 0.0)
    cache.admit(session, 0, request(1, name, tokens, 1).prompt, 0.0)
    cache.advance(session, [(0, tokens)])
    cache.release(session, 0.0)
    return session


@pytest.mark.parametrize("policy", [Belady, ByTheUseBehindTheQueue])
def test_of_two_that_wait_the_one_that_is_served_last_goes_first(policy):
    cache = TwoTierCache(policy=policy(policy_context(4, 8, 0)), chunk_tokens=4, gpu_blocks=8, cpu_blocks=0)
    first, second = idle(cache, "first", 8), idle(cache, "second", 8)
    first.next_use_s, second.next_use_s = 100.0, 10.0  # behind the requests that wait
    first.mark_waiting(1)
    cache.reorder(first)
    second.mark_waiting(2)
    cache.reorder(second)
    cache.room.drop(1, 5.0)
    lost = [session.name for session in (first, second) if session.chunks[0].gpu is None]
    assert lost == (["second"] if policy is Belady else ["first"])
    first.unmark_waiting(1)  # it is admitted, ends, and is next asked long after the second one
    cache.reorder(first)
    cache.room.drop(1, 6.0)
    assert first.chunks[0].gpu is None
    cache.check()


def test_of_several_requests_of_one_conversation_the_first_counts():
    session, policy = Session("a", 0, 0.0, 0.0, next_use_s=50.0), Belady(policy_context())
    assert policy.order(session, 0) == -50.0
    session.mark_waiting(7)
    session.mark_waiting(3)  # preempted: it returns to its own place
    assert policy.order(session, 0) == -3
    session.unmark_waiting(3)
    assert policy.order(session, 0) == -7
    session.unmark_waiting(7)
    assert policy.order(session, 0) == -50.0 and not session.waiting


def bunches(rng):
    """Arrivals of conversations in bunches, so that most of them wait."""
    at_s, found = 0.0, []
    for _ in range(8):
        at_s += rng.choice((0.005, 0.02, 0.05))
        found += [(at_s + 1e-6 * place, name) for place, name in enumerate(rng.sample("abcdefgh", rng.randint(2, 7)))]
    return found


def served(policy, chance, cpu_blocks):
    rng = random.Random(chance)
    arrivals = bunches(rng)
    engine = make_engine(18, cpu_blocks, policy=policy, max_batch_requests=2)
    assert isinstance(engine.clock, VirtualClock)
    turns = {}
    for number, (at_s, name) in enumerate(arrivals):
        while engine.busy and engine.clock.now_s() < at_s:
            turns |= {e.request_id: e.turn for e in engine.step(round(at_s * 1e9)) if e.turn is not None}
            if not engine.progressed:
                break
        if engine.clock.now_s() < at_s:
            engine.clock.advance_to(round(at_s * 1e9))
        following = next((later for later, other in arrivals[number + 1 :] if other == name), None)
        asked = request(number, name, rng.randint(2, 9), rng.randint(1, 5), turn=number, next_use_s=following)
        asked.intended_s = at_s
        engine.say(asked)
    turns |= run(engine)
    assert len(turns) == len(arrivals)
    return list(turns.values())


def hits(turns):
    return sum((turn.gpu_hit_tokens or 0) + (turn.cpu_hit_tokens or 0) for turn in turns)


@pytest.mark.parametrize("cpu_blocks", [0, 12])
def test_it_finds_more_than_before_on_random_bunches(cpu_blocks):
    now = before = most = 0
    for chance in range(12):
        turns = served(Belady, chance, cpu_blocks)
        bound = offline_bound(turns, (18 + cpu_blocks) * 4)
        assert bound is not None and hits(turns) <= bound.hit_tokens
        now, most = now + hits(turns), most + bound.hit_tokens
        before += hits(served(ByTheUseBehindTheQueue, chance, cpu_blocks))
    print(f"{cpu_blocks} CPU blocks: found {now} tokens, {before} before, bound {most}")
    assert before < now
