"""Caches by content: what one tenant said is not found by another. And whose noise is whose."""

from __future__ import annotations

from array import array

import pytest

from pensieve.core.request import Length, Request, Sampling
from pensieve.core.scheduler.active_request import noise_key
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.shared import SharedCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from tests.simulated import make_engine, run


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
