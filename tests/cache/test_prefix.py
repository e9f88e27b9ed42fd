"""Prefix caching: full blocks by content, shared, least recently used; and llama-server's slots."""

from __future__ import annotations

import pytest

from pensieve.core.engine import MemoryLimits
from pensieve.core.request import Length, Request, tokens_of
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from tests.simulated import make_engine, request, run


def asked(number: int, session: str, tokens: list[int], output: int = 2) -> Request:
    return Request(number, session, 1, tokens_of(tokens), Length(output))


def test_least_recently_used_blocks_go_and_of_a_prompt_the_last_first() -> None:
    engine = make_engine(cache=PrefixCache, gpu_blocks=8)
    engine.say(asked(1, "a", list(range(12))))
    run(engine)
    engine.say(asked(2, "b", list(range(50, 70))))
    run(engine)
    assert engine.cache.counters.evicted_chunks == 1
    engine.say(asked(3, "c", [*range(12), 99]))
    assert run(engine)[3].shared_hit_tokens == 8, "the prefix outlived the last block"


def test_a_slot_is_chosen_by_its_prefix_then_by_age_and_a_difference_overwrites_the_rest() -> None:
    engine = make_engine(cache=lambda **sizes: SlotCache(n_slots=2, **sizes), gpu_blocks=16)
    assert engine.cache.request_blocks == 8
    for number, name in ((1, "a"), (2, "b")):
        engine.say(asked(number, name, [number * 20 + i for i in range(10)]))
        run(engine)
    engine.say(request(3, "a", tokens=3, output=2, turn=2))
    turn = run(engine)[3]
    assert (turn.history_tokens, turn.gpu_hit_tokens) == (11, 11), "a slot keeps single tokens, not blocks"
    engine.say(asked(4, "c", [*range(40, 46), 5, 6, 7]))
    turn = run(engine)[4]
    assert (turn.gpu_hit_tokens, turn.shared_hit_tokens) == (0, 6), "b's slot matched best"
    engine.say(request(5, "b", tokens=2, output=2, turn=2))
    assert run(engine)[5].gpu_hit_tokens == 6, "and b lost what came after"
    engine.say(asked(6, "d", [1] * 33, output=2))
    turn = run(engine)[6]
    assert turn.status == "refused"
    assert "32" in (turn.error or "")


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("make", [PrefixCache, VllmOffload])
def test_a_conversation_keeps_what_it_shares_with_one_that_is_forgotten(make, first) -> None:
    """Whoever of the two used it last. What nobody else used is gone."""
    engine = make_engine(cache=make, gpu_blocks=24, cpu_blocks=16)
    said = {"a": [*range(16), *[50] * 8], "b": [*range(16), 60]}
    for number, name in enumerate(sorted(said, reverse=first == "b")):
        engine.say(asked(number, name, said[name]))
        run(engine)
    engine.forget("a")
    engine.say(asked(8, "b", [*said["b"], 7, 7, 7]))
    engine.say(asked(9, "c", [*said["a"], 7, 7, 7]))
    turns = run(engine)
    assert turns[8].gpu_hit_tokens == 16 and turns[9].shared_hit_tokens == 16


@pytest.mark.parametrize("make", [PrefixCache, VllmOffload])
def test_a_limit_of_memory_takes_nothing_that_another_conversation_used_since(make) -> None:
    """Four conversations begin alike. The one idle longest is forgotten; the others used since what they share with it."""
    engine = make_engine(cache=make, gpu_blocks=16, cpu_blocks=16, limits=MemoryLimits(tokens=70))
    found = []
    for number in range(4):
        engine.say(asked(number, "abcd"[number], [*range(16), *range(30 + 10 * number, 40 + 10 * number)]))
        found.append(run(engine)[number].shared_hit_tokens)
    assert len(engine.cache.sessions) < 4, "the limit was met"
    assert found == [0, 16, 16, 16]
