"""A conversation that a user forgets is gone from what is held and from every count, in each manager."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.engine import MemoryLimits
from pensieve.core.request import Length, Request, tokens_of
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from tests.invariants import check_cache
from tests.simulated import make_engine, request, run

CACHES: dict[str, Any] = {
    "pensieve": TwoTierCache,
    "prefix_cache": PrefixCache,
    "vllm_offload": VllmOffload,
    "llama_slots": partial(SlotCache, n_slots=2),
    "stateless": StatelessCache,
}


@pytest.mark.parametrize("cache", CACHES)
def test_nothing_that_is_forgotten_or_edited_counts_as_evicted(cache: str) -> None:
    engine = make_engine(cache=CACHES[cache], gpu_blocks=64)
    for number, name in enumerate("ab", start=1):
        engine.say(request(number, name, tokens=20, output=4))
        run(engine)
    first = engine.cache.sessions.get("b").tokens[:10]  # type: ignore[union-attr]
    engine.submit(Request(3, "b", 2, first + tokens_of([90, 91]), Length(4)))
    run(engine)
    engine.forget("a")
    engine.forget(None)
    check_cache(engine.cache)
    counted = engine.cache.counters
    assert (counted.evicted_chunks, counted.dropped_chunks) == (0, 0)


def test_forgetting_the_beginning_of_a_slot_leaves_it_to_whose_it_is() -> None:
    """What b said is how a began: a's KV is not b's to forget."""
    engine = make_engine(cache=partial(SlotCache, n_slots=2), gpu_blocks=32)
    engine.say(request(1, "other", tokens=5, output=2))
    engine.say(request(2, "a", tokens=60, output=2))
    run(engine)
    said = engine.cache.sessions["a"].tokens
    engine.submit(Request(3, "b", 1, said[:5] + tokens_of([89] * 50), Length(1)))
    run(engine)
    engine.forget("b")
    assert engine.cache.places(engine.cache.sessions["a"]).startswith("GGGG")


@pytest.mark.parametrize("which", ["a", None])
@pytest.mark.parametrize("cache", CACHES)
def test_what_was_let_go_and_then_forgotten_makes_no_other_be_forgotten(cache: str, which: str | None) -> None:
    """a is over and out of the cache: its tokens count towards the limit, until it is forgotten."""
    engine = make_engine(cache=CACHES[cache], gpu_blocks=8, cpu_blocks=0, limits=MemoryLimits(tokens=80))
    engine.say(request(1, "a", tokens=12, output=2))
    run(engine)
    for number in (2, 3, 4):
        engine.say(request(number, f"other{number}", tokens=13, output=2))
        run(engine)
    engine.sessions.ended("a")
    assert engine.cache.sessions.get("a") is None, "let go: nothing of it is in the cache"
    engine.forget(which)
    for number in (5, 6) if which else (5, 6, 7, 8, 9):
        engine.say(request(number, f"more{number}", tokens=13, output=2))
        run(engine)
    engine.step(None)
    assert engine.facts.counts.forgotten_sessions == 0
