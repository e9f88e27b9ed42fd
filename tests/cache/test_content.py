"""Caches by content, and what a user forgets: who finds what another conversation or tenant said, and what goes with whom."""

from array import array
from functools import partial
from typing import Any

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.engine import MemoryLimits
from pensieve.core.request import Length, Request, Sampling, tokens_of
from pensieve.core.scheduler.active_request import noise_key
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.shared import SharedCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from tests.invariants import check_cache
from tests.simulated import make_engine, policy_context, request, run


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


@pytest.mark.parametrize("cache", [PrefixCache, SlotCache, VllmOffload, SharedCache])
def test_tenants_share_nothing(cache):
    engine, found = make_engine(gpu_blocks=128, cache=cache), []
    for number, tenant in enumerate(("", "", "b", "b")):
        engine.submit(Request(number, f"{number}", 1, array("i", range(90)), Length(4), tenant=tenant))
        found.append(run(engine)[number].shared_hit_tokens)
    assert found[0] == found[2] == 0
    assert found[1] == found[3] >= 86


def test_anonymous_noise_is_the_same_in_every_conversation():
    named, anonymous = Sampling(1.0, seed=3), Sampling(1.0, seed=3, anonymous=True)
    assert noise_key(named, "a", 1) != noise_key(named, "b", 1)
    assert noise_key(anonymous, "a", 1) == noise_key(anonymous, "b", 2)
    assert noise_key(anonymous, "a", 1) != noise_key(Sampling(1.0, seed=4, anonymous=True), "a", 1)


# -- slots of llama-server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "slots"),
    [(None, 4), (8, 4), (12, 4), (13, 3), (24, 2), (60, 1), (1000, 1)],  # 16 blocks of 4 tokens, one to spare in each
)
def test_as_many_as_hold_the_longest_conversation(longest, slots):
    context = policy_context()
    cache = SlotCache(policy=None, chunk_tokens=4, gpu_blocks=context.gpu_blocks, longest_tokens=longest)
    assert cache.chosen == {"n_slots": slots, "slot_tokens": 16 // slots * 4}


@pytest.mark.parametrize(("length", "slot"), [(19, 1), (20, 0), (21, 0)])
def test_a_slot_whose_prefix_is_too_small_a_share_of_the_prompt_is_spared(length, slot):
    """Two slots: the first was used least recently, the second shares 2 tokens. Above a tenth, not at it, that one is
    taken."""
    engine = make_engine(cache=partial(SlotCache, n_slots=2), gpu_blocks=32)
    for number, first in ((1, 10), (2, 50)):
        engine.say(asked(number, f"s{number}", [first, first + 1, *range(80, 88)]))
        run(engine)
    engine.say(asked(3, "c", [50, 51, *[7] * (length - 2)]))
    turn = run(engine)[3]
    taken = [number for number, one in enumerate(engine.cache.slots) if list(one.tokens[2:4]) != [80, 81]]
    assert (taken, turn.shared_hit_tokens) == ([slot], 2 if slot else 0)


# -- what is forgotten ------------------------------------------------------------------------------------------------------

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
