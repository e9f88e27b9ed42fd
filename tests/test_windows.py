"""Plans that are repeated, and decodes without rows, give bit by bit what a plan of rows for each iteration gives."""

import random
from functools import partial

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.engine import MemoryLimits
from pensieve.core.plan import CPU
from pensieve.core.policies.lru import Lru
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.plugins.policies.learned_return import LearnedReturn
from pensieve.sim.worker import VirtualClock
from tests.invariants import check_cache
from tests.simulated import make_engine, request

CASES = {
    "two tiers": {"cache": TwoTierCache, "policy": RetentionValue},
    "a policy that learns": {"cache": TwoTierCache, "policy": LearnedReturn},
    "a policy with ages": {
        "cache": TwoTierCache,
        "policy": partial(LearnedReturn, guarded=False),
        "gaps": [0, 1, 1000, 30_000],
    },
    "gpu only": {"cache": TwoTierCache, "cpu_blocks": 0},
    "prefix cache": {"cache": PrefixCache},
    "vllm offload, by policy": {"cache": partial(VllmOffload, order="eviction", blocks_per_chunk=2), "policy": Lru},
    "slots": {"cache": SlotCache},
    "stateless": {"cache": StatelessCache},
    "two tiers, no copies ahead": {
        "cache": TwoTierCache,
        "longest": 60,
        "copy_ahead": "never",
        "gpu_blocks": 24,
        "cpu_blocks": 48,
        "swap_out_start": 0.5,
        "swap_out_stop": 0.6,
        "max_batch_requests": 2,
    },
    "two tiers, short memory": {"cache": TwoTierCache, "limits": MemoryLimits(0.05, 400)},
}


def drive(seed, monkeypatch, windows, longest=16, gaps=(0, 1, 1000), **options):
    """Arrivals at random times, some close together and some far apart: gaps of up to 100 us times one of `gaps`. Returns
    everything that was seen, and the plans."""
    rng = random.Random(seed)
    blocks = rng.choice([24, 40, 96])
    settings = {
        "gpu_blocks": blocks,
        "cpu_blocks": rng.choice([8, 48]),
        "max_batch_tokens": rng.choice([8, 24]),
        **options,
    }
    engine = make_engine(computes=not windows, **settings)
    launched = []
    launch = engine.worker.launch
    monkeypatch.setattr(engine.worker, "launch", lambda plan: (launched.append(plan), launch(plan))[1])
    at_ns, seen, ends, turns = 0, [], 0, dict.fromkeys("abcde", 0)
    clock = engine.clock
    assert isinstance(clock, VirtualClock)
    for number in range(24):
        at_ns += rng.choice(gaps) * rng.randrange(100_000)
        ends += run_until(engine, clock, at_ns, seen)
        name = rng.choice("abcde")
        turns[name] += 1
        engine.say(request(number, name, rng.randrange(1, longest), rng.randrange(1, 40), turns[name]))
        if number % 7 == 6:
            engine.cancel(number - 1, "cancelled")
    run_until(engine, clock, None, seen)
    return seen, launched, engine


def run_until(engine, clock, until_ns, seen):
    while until_ns is None or clock.now_ns() < until_ns:
        if until_ns is None and not engine.busy:
            break
        before = clock.now_ns()
        events = engine.step(until_ns)
        if engine.scheduler.forward is None or not engine.counts_windows or not engine.scheduler.forward.members:
            check_cache(engine.cache)  # else sessions have blocks for tokens that they are still to be told of
        for event in events:
            seen.append((event.kind, event.request_id, event.at_s, event.token, event.tokens))
            if event.turn is not None:
                seen.append(told(event.turn))
        if not events and clock.now_ns() == before and not engine.progressed:
            assert until_ns is not None
            expiry = engine.sessions.next_expiry_ns
            clock.advance_to(until_ns if expiry is None else min(until_ns, expiry))
    return len(seen)


def told(turn):
    return tuple(
        value.tobytes() if hasattr(value, "tobytes") else value
        for name in turn.__dataclass_fields__
        for value in [getattr(turn, name)]
    )


def assert_equal(seed, monkeypatch, **options):
    """With and without windows; returns both lists of plans."""
    with_windows, plans, engine = drive(seed, monkeypatch, True, **options)
    single, iterations, plain = drive(seed, monkeypatch, False, **options)
    assert with_windows == single, seed
    assert engine.clock.now_ns() == plain.clock.now_ns()
    assert engine.facts.counts.steps == plain.facts.counts.steps == len(iterations)
    assert engine.facts.counts.compute_ns == plain.facts.counts.compute_ns
    assert engine.facts.counts.predicted_ns == plain.facts.counts.predicted_ns
    assert engine.scheduler.counters == plain.scheduler.counters
    assert engine.cache.counters == plain.cache.counters
    return plans, iterations


@pytest.mark.parametrize("case", CASES)
def test_windows_change_nothing(case, monkeypatch):
    plans, iterations = assert_equal(1, monkeypatch, **CASES[case])
    assert len(iterations) - len(plans) > 15, "windows were opened at all"


@pytest.mark.parametrize("case", ["two tiers", "gpu only", "prefix cache"])
def test_a_window_holds_a_prefill_while_others_wait_and_copies_are_under_way(case, monkeypatch):
    """Prompts of up to 120 tokens, eight or 24 an iteration, in a cache that they overrun."""
    prefills = copying = 0
    for seed in (10, 12):
        plans, _ = assert_equal(seed, monkeypatch, longest=120, swap_out_start=0.5, swap_out_stop=0.9, **CASES[case])
        repeated = [plan for plan in plans if plan.repeat > 1]
        prefills += sum(bool(plan.rows) and plan.rows[-1].sample is None for plan in repeated)
        copying += sum(any(move.target == CPU for move in plan.moves) for plan in repeated)
    assert prefills >= 4
    assert copying > 1 or case != "two tiers"


def test_a_window_takes_the_last_block(monkeypatch):
    """One request in a cache that it fills up: all that it decodes is one plan, but the first iteration."""
    engine = make_engine(computes=False, gpu_blocks=8, cpu_blocks=0, chunk_tokens=4)
    launched, launch = [], engine.worker.launch
    monkeypatch.setattr(engine.worker, "launch", lambda plan: (launched.append(plan), launch(plan))[1])
    engine.say(request(1, "a", 5, 27))
    run_until(engine, engine.clock, None, [])
    assert (engine.facts.counts.steps, len(launched)) == (27, 1)
