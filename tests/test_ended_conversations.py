"""Conversations that are over are forgotten as soon as nothing of them is in the cache, and nobody else notices."""

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.engine import MemoryLimits
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.lab.replay import replay
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.serve.systems.inline_system import InlineSystem
from pensieve.sim.worker import SimulatedWorker, VirtualClock
from tests.invariants import check_cache
from tests.scripted import context
from tests.simulated import MACHINE, MODEL
from tests.workload.dry import sharegpt_workload

CACHES = {
    "pensieve": TwoTierCache,
    "prefix": PrefixCache,
    "vllm offload": VllmOffload,
    "slots": lambda **parts: SlotCache(**parts, n_slots=3),
    "stateless": StatelessCache,
}
CONVERSATIONS = 40


def system_of(cache, cpu_blocks=200, limits=None):
    clock = VirtualClock()
    system = InlineSystem(
        model=MODEL,
        hardware=MACHINE,
        worker=SimulatedWorker(MODEL, MACHINE, clock, 16),
        clock=clock,
        cache=CACHES[cache],
        policy=RetentionValue,
        scheduler=SchedulerSettings(max_batch_tokens=256),
        gpu_blocks=300,
        cpu_blocks=cpu_blocks,
        chunk_tokens=16,
        limits=limits,
    )
    system.start()
    system.watch_content()
    system.count_holding()
    return system


def served(system):
    workload = sharegpt_workload(
        context(max_context=1200), conversations=CONVERSATIONS, request_rate=20.0, think_time_s=1.0
    )
    turns = replay(system, workload).turns
    counters = {name: count for name, count in system.counters().items() if "schedule" not in name}
    return [repr(turn) for turn in turns], counters, list(system.holdings().items())


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("limits", [MemoryLimits(tokens=8_000), MemoryLimits(ttl_s=3.0), MemoryLimits(tokens=10**9)])
def test_limits_of_memory_decide_as_before(cache, limits, monkeypatch):
    """Who is forgotten by them, and when, depends on all that are idle, those that are over among them."""
    forgetting, keeping = system_of(cache, limits=limits), system_of(cache, limits=limits)
    monkeypatch.setattr(keeping, "ended", lambda session: None)
    forgot, kept = served(forgetting), served(keeping)
    assert forgot == kept
    forgotten = forgot[1]["forgotten_sessions"]
    assert (forgotten > 0) == (limits.tokens != 10**9)
    check_cache(forgetting.engine.cache)
    left, everyone = (len(system.engine.cache.sessions) for system in (forgetting, keeping))
    assert left < CONVERSATIONS / 2
    assert forgotten or everyone > CONVERSATIONS
