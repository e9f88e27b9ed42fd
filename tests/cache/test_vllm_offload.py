"""vLLM's CPU tier behind its prefix cache: what is found where, what is stored, and what goes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from typing import Any

from pensieve.core.request import Length, Request, tokens_of
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.serve.record import TurnRecord
from tests.simulated import TalkingEngine, make_engine, run


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
