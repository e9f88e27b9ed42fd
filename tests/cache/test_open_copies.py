"""Copies under way: what they cost does not grow with how many there are, and what is counted is what a recount finds."""

from __future__ import annotations

import random
from array import array

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import Moved
from pensieve.core.policies.lru import Lru
from pensieve.core.session import Session
from tests.calls import calls_of
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


def edit(cache: TwoTierCache, name: str, length: int) -> None:
    """As the engine leaves a conversation: its last token has no KV."""
    session = session_of(cache, name)
    cache.truncate(session, length, max(length - 1, 0))


def test_editing_a_conversation_under_way_costs_the_same_however_long_it_is() -> None:
    costs = []
    for chunks in (40, 400):
        cache, _ = under_way(chunks)
        costs.append(calls_of(lambda cache=cache, to=4 * chunks - 3: edit(cache, "a", to)))
        cache.check()
    assert costs[0] == costs[1]


def test_a_step_does_not_look_at_blocks_that_still_wait_for_their_copies() -> None:
    costs = []
    for chunks in (40, 400):
        cache, copies = under_way(chunks)
        cache.forget(session_of(cache, "a"))
        cache.plans(1, 1)
        assert cache.tiers.gpu.free == 1, "all the others are read by copies"
        cache.plans(1, 2)
        costs.append(calls_of(lambda cache=cache: cache.plans(2, 2)))
        cache.check()
        cache.finish(copies)
        cache.check()
        assert cache.tiers.gpu.free == cache.tiers.cpu.free == chunks + 1
    assert costs[0] == costs[1]


@pytest.mark.parametrize("seed", range(6))
def test_the_counts_hold_through_random_moves(seed: int) -> None:
    """Admissions, ends, edits, copies out and in that end late, out of order or fail, plans launched and collected."""
    rng = random.Random(seed)
    cache = cache_of(48)
    tickets: list[int] = []
    step = collected = -1
    for now in range(400):
        name = rng.choice("abcdef")
        session = cache.open(name, float(now))
        move = rng.choice(("turn", "turn", "out", "out", "end", "end", "fail", "edit", "forget", "plan", "plan"))
        if move == "turn" and not session.running:
            suffix = array("i", range(rng.randint(1, 20)))
            if cache.room.lacking(session, len(session.tokens), session.tokens + suffix) <= 0:
                admission = cache.admit(session, len(session.tokens), suffix, float(now))
                cache.advance(session, admission.work)
        elif move == "turn":
            cache.release(session, float(now))
        elif move == "out":
            cache.room.swap_out(rng.randint(1, 12), float(now), None)
        elif move in ("end", "fail") and tickets:
            ticket = tickets.pop(rng.randrange(len(tickets)))
            if move == "end":
                cache.finish([Moved(ticket)])
            else:
                for lost in cache.finish([Moved(ticket, ok=False)]).copied:
                    cache.release(lost, float(now))
                    cache.truncate(lost, 0)
        elif move == "edit" and not session.running:
            edit(cache, name, rng.randint(0, len(session.tokens)))
        elif move == "forget" and not session.running:
            cache.forget(session)
        elif move == "plan" and step == collected:
            step += 1
            cache.plans(step, step + 1)
        elif move == "plan":
            collected = step
            cache.plans(step + 1, step + 1)
        tickets += [move.ticket for move in cache.take_moves()]
        cache.check()
    cache.plans(step + 1, step + 1)
    cache.finish([Moved(ticket) for ticket in tickets])
    for name in list(cache.sessions):
        session = session_of(cache, name)
        if session.running:
            cache.release(session, 401.0)
        cache.forget(session)
    cache.check()
    assert cache.tiers.gpu.free == cache.tiers.cpu.free == 48, "every block came back"
