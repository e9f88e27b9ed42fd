"""A conversation that begins as another one did: who has the KV of what they share, in each cache manager."""

from __future__ import annotations

from array import array

import pytest

from pensieve.core.request import Fork, Length, Request, Sampling
from pensieve.core.scheduler.active_request import noise_key
from tests.baselines.systems import inline


def ask(system, number, session, prompt, **fields):
    request = Request(number, session, 0, array("i", prompt), Length(4), Sampling(), **fields)
    turn = system.ask(request)
    system.engine.cache.check()
    return turn


HISTORY = list(range(1, 101))
SHARED = len(HISTORY) - 1  # the KV of a conversation's last token counts as not computed
SIZE = 4  # tokens of a chunk in these systems


def first_turn(**parts):
    system = inline(**parts)
    system.start()
    turn = ask(system, 1, "parent", HISTORY)
    return system, HISTORY + list(turn.token_ids)


def kinds():
    from pensieve.core.cache.two_tier import TwoTierCache
    from pensieve.plugins.caches.prefix import PrefixCache
    from pensieve.plugins.caches.slots import SlotCache

    return {"pensieve": TwoTierCache, "prefix_cache": PrefixCache, "llama_slots": SlotCache}


@pytest.mark.parametrize("kind", ["pensieve", "prefix_cache", "llama_slots"])
def test_a_fork_that_takes_kv_computes_only_what_is_new(kind):
    system, held = first_turn(cache=kinds()[kind])
    turn = ask(system, 2, "child", [*HISTORY, 7, 8], fork=Fork("parent", len(HISTORY), takes_kv=True))
    assert turn.history_tokens == SHARED
    assert turn.gpu_hit_tokens >= SHARED - SIZE
    back = ask(system, 3, "parent", [*held, 9])
    assert back.history_tokens == len(held) - 1
    if kind == "pensieve":  # the blocks went with the child: the parent computes them again from its tokens
        assert back.recomputed_tokens == SHARED // SIZE * SIZE
    if kind == "prefix_cache":  # full blocks are shared
        assert back.recomputed_tokens < 2 * SIZE


@pytest.mark.parametrize("kind", ["prefix_cache", "llama_slots"])
def test_tenants_share_nothing(kind):
    """The same prompt: found by the same tenant, and not by another one."""
    system, _ = first_turn(cache=kinds()[kind])
    same = ask(system, 2, "same", HISTORY)
    assert same.shared_hit_tokens >= len(HISTORY) - SIZE
    other = ask(system, 3, "other", HISTORY, tenant="b")
    assert other.shared_hit_tokens == 0
    again = ask(system, 4, "again", HISTORY, tenant="b")
    assert again.shared_hit_tokens >= len(HISTORY) - SIZE


def test_anonymous_noise_is_the_same_in_every_conversation():
    named, anonymous = Sampling(1.0, seed=3), Sampling(1.0, seed=3, anonymous=True)
    assert noise_key(named, "a", 1) != noise_key(named, "b", 1)
    assert noise_key(anonymous, "a", 1) == noise_key(anonymous, "b", 2)
    assert noise_key(anonymous, "a", 1) != noise_key(Sampling(1.0, seed=4, anonymous=True), "a", 1)
