"""What each conversation holds of each tier adds up to what the tiers have given away, to the block and the nanosecond."""

import random
from collections import Counter
from functools import partial

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import StartReport
from pensieve.core.policies.lru import Lru
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.restore import RestoringCache
from pensieve.plugins.caches.shared import SharedCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.plugins.tiers.disk import DiskTier
from pensieve.serve.books.holding import TIERS, Held
from pensieve.sim.worker import VirtualClock
from tests.invariants import check_cache
from tests.simulated import make_engine
from tests.test_bound_of_managers import Dear, trace


def positions_s(cost, start, stop, chunk_tokens):
    """What PositionPrices says, chunk by chunk."""
    ends = range((start // chunk_tokens + 1) * chunk_tokens, stop + chunk_tokens, chunk_tokens)
    return sum(cost.recompute_s(end) * (min(stop, end) - max(start, end - chunk_tokens)) / chunk_tokens for end in ends)


MANAGERS = {
    "pensieve": {"cache": TwoTierCache, "gpu_blocks": 12, "cpu_blocks": 8},
    "pensieve, hybrid": {"cache": partial(RestoringCache, restore="hybrid"), "gpu_blocks": 14, "cpu_blocks": 12},
    "pensieve, no copies ahead": {"cache": TwoTierCache, "gpu_blocks": 12, "cpu_blocks": 8, "copy_ahead": "never"},
    "pensieve, one step ahead": {"cache": TwoTierCache, "gpu_blocks": 12, "cpu_blocks": 8, "depth": 2},
    "pensieve, late copies": {"cache": TwoTierCache, "gpu_blocks": 12, "cpu_blocks": 8, "late": True},
    "pensieve, disk": {"cache": TwoTierCache, "gpu_blocks": 12, "cpu_blocks": 4, "disk_blocks": 20},
    "gpu_only": {"cache": TwoTierCache, "gpu_blocks": 12, "cpu_blocks": 0},
    "stateless": {"cache": StatelessCache, "gpu_blocks": 12},
    "prefix_cache": {"cache": PrefixCache, "gpu_blocks": 12},
    "pensieve_shared": {"cache": SharedCache, "gpu_blocks": 12, "cpu_blocks": 8},
    "vllm_offload": {"cache": VllmOffload, "gpu_blocks": 12, "cpu_blocks": 8},
    "llama_slots": {"cache": partial(SlotCache, n_slots=2), "gpu_blocks": 24},
}


class Priced(Dear):
    """Loads take half of what computing does."""

    def step_s(self):
        return 1.0

    def weights_s(self):
        return 0.0

    def load_s(self):
        return 4.0


def engine_of(name, rng):
    parts = {"chunk_tokens": 2, "max_batch_tokens": 8, "cost": Dear(), "policy": Lru, **MANAGERS[name]}
    disk_blocks = parts.pop("disk_blocks", 0)
    if parts.pop("late", False):
        parts["late"] = rng
    engine = make_engine(below_bw=1e9, **parts)
    below = {}
    if disk_blocks:
        kept = {bytes([number]) * 32: number for number in range(3)}
        below = {"below": DiskTier(disk_blocks), "report": StartReport(0.0, 0.0, below_load_s=1e-9, below_kept=kept)}
    engine.cache.begin(cost=Priced(), layers=4, batch_tokens=8, **below)
    engine.facts.count_holding()
    return engine


def used(cache):
    """Blocks that are not free, as the pools themselves count them."""
    if isinstance(cache, SlotCache):
        return {"gpu": sum(len(slot.blocks) for slot in cache.slots if slot.last is not None), "cpu": 0, "disk": 0}
    return {"gpu": cache.gpu_blocks_used, "cpu": cache.cpu_blocks_used, "disk": cache.below.used}


class Watch:
    """Integrates what is used, by tier and by conversation, each time the clock is about to move: no account is asked."""

    def __init__(self, engine):
        self.engine = engine
        self.whole = Counter()
        self.own = Counter()
        self.idle = Counter()
        assert isinstance(engine.clock, VirtualClock)
        engine.clock.on_advance = self.advance

    def advance(self, ns):
        cache, passed = self.engine.cache, ns - self.engine.clock.now_ns()
        check_cache(cache)
        for tier, blocks in used(cache).items():
            self.whole[tier] += blocks * passed
        payers = self.engine.facts.holding._payers
        sessions = cache.sessions.values() if isinstance(cache, TwoTierCache) else ()
        for session, node in [(one, node) for one in sessions for node in one.nodes() if node.session is one]:
            for tier, column in (("gpu", node.chunks.gpu), ("cpu", node.chunks.cpu)):
                assert {payers[tier][block] for block in column if block >= 0} <= {session.number}, "another pays"
                block_ns = sum(block >= 0 for block in column) * passed
                self.own[session.name, tier] += block_ns
                self.idle[session.name, tier] += 0 if node.running else block_ns


def held(engine):
    engine.facts.at(engine.clock.now_ns())
    return engine.facts.holdings()


@pytest.mark.parametrize("name", MANAGERS)
def test_accounts_add_up_to_what_the_tiers_gave_away_and_seconds_to_the_whole_history(name):
    """Random conversations that share openings, are edited, cancelled and forgotten, in little room."""
    seen, tokens = Counter(), Counter()
    for chance in range(14):
        rng = random.Random(chance)
        engine = engine_of(name, rng)
        watch = Watch(engine)
        for said in trace(rng, engine, turns=14):
            check_seconds(said.record, tokens)
        found = held(engine)
        for tier in ("gpu", "cpu", "disk"):
            assert sum(one.block_ns for (_, which), one in found.items() if which == tier) == watch.whole[tier]
            seen[tier] += watch.whole[tier]
        assert all(0 <= one.idle_block_ns <= one.block_ns for one in found.values())
        # A block in quarantine has left its chunk and not its account; without copies and plans in flight there is none.
        for (session, tier), block_ns in watch.own.items():
            one = found.get((session, tier), Held(0, 0))
            if name in ("gpu_only", "stateless", "pensieve, no copies ahead"):
                assert one.idle_block_ns >= watch.idle[session, tier]
            assert one.block_ns >= block_ns
        if name in ("gpu_only", "stateless"):
            assert {key: one.block_ns for key, one in found.items()} == {k: v for k, v in watch.own.items() if v}
            assert {k: one.idle_block_ns for k, one in found.items()} == {k: watch.idle[k] for k in found}
    tiers = {"gpu"} | ({"cpu"} if name.startswith(("pensieve", "vllm_offload")) else set())
    tiers |= {"disk"} if "disk" in name else set()
    assert {tier for tier in seen if seen[tier]} == tiers
    assert {tier for tier in TIERS if tokens[tier]} == (set() if name == "stateless" else tiers)
    assert (tokens["again"] > 0) == (name == "pensieve, hybrid")


def check_seconds(turn, tokens):
    """What was found and what was missed are the whole history in seconds. tokens: what is found on each tier, in all."""
    if turn.history_tokens is None:
        assert turn.saved_s is None
        return
    shared = turn.shared_hit_tokens or 0  # on either tier
    whole = positions_s(Dear(), 0, turn.history_tokens + shared, 2)
    loaded = not turn.cpu_recomputed_tokens
    tokens["again"] += turn.cpu_recomputed_tokens
    if loaded:
        assert sum(turn.saved_s) + turn.recomputed_s == pytest.approx(whole)
    else:
        assert sum(turn.saved_s) + turn.recomputed_s < whole
    hits = (turn.gpu_hit_tokens, turn.cpu_hit_tokens, turn.disk_hit_tokens)
    for tier, seconds, count in zip(TIERS, turn.saved_s, hits, strict=True):
        assert seconds > 0 or not count or not loaded
        assert count or shared or not seconds
        tokens[tier] += count or 0
