"""vLLM's CPU tier behind its prefix cache: what is found where, what is stored, and what goes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.policies.lru import Lru as LruPolicy
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Length, Request, tokens_of
from pensieve.core.session import Session
from pensieve.plugins.caches.cpu_tier import FromTail, Use
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.plugins.policies.learned_return import LearnedReturn
from pensieve.serve.record import TurnRecord
from tests.simulated import TalkingEngine, make_engine, policy_context, run


def engine_of(gpu_blocks: int = 16, cpu_blocks: int = 32, policy: Any = None, **options: Any) -> TalkingEngine:
    return make_engine(gpu_blocks, cpu_blocks, cache=partial(VllmOffload, **options), policy=policy)


def cache_of(engine: TalkingEngine) -> VllmOffload:
    assert isinstance(engine.cache, VllmOffload)
    return engine.cache


def say(engine: TalkingEngine, session: str, tokens: Iterable[int], output: int = 1, **fields: Any) -> TurnRecord:
    """Ask for these tokens, and wait until all copies are done."""
    number = engine._arrived + 1
    engine.submit(Request(number, session, number, tokens_of(tokens), Length(output), **fields))
    turn = run(engine)[number]
    while engine.step(None) or engine.progressed:
        pass
    engine.cache.check()
    return turn


def hits(turn: TurnRecord) -> tuple[int | None, int | None, int | None]:
    return turn.gpu_hit_tokens, turn.cpu_hit_tokens, turn.shared_hit_tokens


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(90) for _ in range(length)]


def test_a_prompt_is_found_on_the_device_and_then_behind_it() -> None:
    engine = engine_of()
    first = text(1, 18)
    say(engine, "a", first)
    say(engine, "b", text(2, 56))  # of the first four blocks, the device keeps two
    places = engine.cache.places(engine.cache.sessions["a"])
    assert places == "BBCC-"
    again = say(engine, "a", [*first, 5, 6])
    assert hits(again) == (8, 8, 0) and again.recomputed_tokens == 2
    other = say(engine, "c", [*first[:16], 1, 2, 3])
    assert hits(other) == (0, 0, 16), "what another conversation said is new to this one, wherever it is found"


def test_the_last_token_is_computed_even_where_all_of_the_prompt_is_found() -> None:
    engine = engine_of()
    first = text(1, 16)
    say(engine, "a", first)
    say(engine, "b", text(2, 63))
    turn = say(engine, "a", first)
    assert hits(turn) == (0, 15, 0) and turn.recomputed_tokens == 0 and turn.new_tokens == 1


def test_chunks_of_several_blocks_are_stored_and_found_as_a_whole() -> None:
    first = text(1, 36)  # three chunks
    for length, places, found in ((48, "BBBBCCCCC-", (16, 20, 0)), (36, "BBBBBBBCC-", (28, 0, 0))):
        engine = engine_of(blocks_per_chunk=3, cpu_blocks=32)
        assert engine.cache.cpu_blocks == 30
        say(engine, "a", first)
        say(engine, "b", text(2, length))
        assert engine.cache.places(engine.cache.sessions["a"]) == places
        turn = say(engine, "a", [*first, 1])
        assert hits(turn) == found, "a load may begin within a chunk, and is not made for less than one"


def test_a_prompt_that_the_cpu_tier_has_no_room_for_is_not_stored_at_all() -> None:
    engine = engine_of(cpu_blocks=6)
    say(engine, "a", text(1, 20))
    assert engine.cache.cpu_blocks_used == 5
    say(engine, "b", text(2, 32))
    assert engine.cache.cpu_blocks_used == 5 and engine.cache.counters.swapped_out_blocks == 5


def test_tenants_find_nothing_of_each_other() -> None:
    """The same prompt of another tenant finds, and is charged for, as much as one that was never said."""
    engine = engine_of(gpu_blocks=24, cpu_blocks=64)
    prompt = text(1, 16)
    say(engine, "a", prompt, tenant="one")
    for session, tenant in (("b", "two"), ("c", "")):
        assert hits(say(engine, session, prompt, tenant=tenant)) == (0, 0, 0)
    say(engine, "x", text(2, 92))
    for session, tenant, found in (("d", "one", 15), ("e", "three", 0)):
        turn = say(engine, session, prompt, tenant=tenant)
        assert turn.shared_hit_tokens == found and turn.cpu_hit_tokens == 0


def test_what_is_forgotten_is_gone_from_both_tiers_also_while_it_is_copied() -> None:
    engine = engine_of()
    engine.submit(Request(1, "a", 1, tokens_of(text(1, 16)), Length(1)))
    finished: list[Any] = []
    while not finished:
        finished = [event for event in engine.step(None) if event.turn is not None]
    assert cache_of(engine)._copies, "the store is decided, and not done"
    engine.forget("a")
    while engine.step(None) or engine.progressed:
        engine.cache.check()
    assert (engine.cache.cpu_blocks_used, engine.cache.gpu_blocks_used) == (0, 0)
    assert hits(say(engine, "b", text(1, 16))) == (0, 0, 0)


# -- orders -----------------------------------------------------------------------------------------------------------


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def session_of(number: int, last_active_s: float = 0.0) -> Session:
    return Session(f"s{number}", number, 0.0, last_active_s)


@pytest.mark.parametrize("policy", [RetentionValue, LruPolicy, partial(LearnedReturn, guarded=False)])
@pytest.mark.parametrize("seed", range(12))
def test_an_eviction_policy_gives_up_the_least_tail(policy: Any, seed: int) -> None:
    """Against a look at every session's last chunk, one victim at a time."""
    rng = random.Random(seed)
    made: EvictionPolicy = policy(policy_context())
    order = FromTail(made)
    owner: dict[bytes, tuple[Session, int]] = {}
    sessions = [session_of(number) for number in range(6)]
    names, now_s = 0, 0.0

    def best(spared: set[bytes], at_s: float) -> bytes | None:
        ranks: dict[int, tuple[Any, ...]] = {}
        last: dict[int, tuple[int, bytes]] = {}
        for name, (session, index) in sorted(owner.items(), key=lambda one: one[1][1]):
            score = made.score(made.bucket(session, index), made.order(session, index), at_s)
            ranks[session.number] = score, session.last_active_s, session.number
            if name not in spared:
                last[session.number] = index, name
        return last[min(last, key=ranks.__getitem__)][1] if last else None

    for _ in range(120):
        now_s += rng.random() * 3
        session = rng.choice(sessions)
        kind = rng.random()
        if kind < 0.5:
            session.turns += 1
            session.tokens = tokens_of(range(4 * rng.randint(1, 9)))
            if made.observe is not None:
                made.observe(session, now_s)
            session.last_active_s = now_s
            if made.rest is not None:
                made.rest(session, now_s)
            order.changed(session)
            found = rng.sample(sorted(owner), min(len(owner), rng.randint(0, 2)))
            added = {}
            taken = Counter(index for one, index in owner.values() if one is session)
            for index in range(rng.randint(0, 5)):
                if not taken[index]:
                    names += 1
                    added[key(names)] = index
                    order.insert(key(names), session, index)
                    owner[key(names)] = session, index
            places = Counter(owner[name][1] for name in found) + taken + Counter(added.values())
            found = [name for name in found if places[owner[name][1]] == 1]
            offered = {name: owner[name][1] for name in found} | added
            for name in found:
                owner[name] = session, owner[name][1]
            order.used(session, Use(0, offered, set(found), set(added)))
        elif kind < 0.6 and owner:
            name = rng.choice(sorted(owner))
            del owner[name]
            order.remove(name)
        else:
            spared = set(rng.sample(sorted(owner), min(len(owner), rng.randint(0, 3))))
            count = rng.randint(1, 4)
            got = order.choose(count, set(owner).difference(spared).__contains__, now_s)
            if got is None:
                assert len(owner) - len(spared) < count
            else:
                for name in got:
                    assert name == best(spared, now_s)
                    del owner[name]
        assert set(order.keys()) == set(owner)
