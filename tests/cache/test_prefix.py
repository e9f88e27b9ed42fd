"""Prefix caching: full blocks by content, shared, least recently used; and llama-server's slots."""

from __future__ import annotations

import pytest

from pensieve.core.engine import MemoryLimits
from pensieve.core.request import Length, Request, tokens_of
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from tests.simulated import make_engine, run


def asked(number: int, session: str, tokens: list[int], output: int = 2) -> Request:
    return Request(number, session, 1, tokens_of(tokens), Length(output))


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
