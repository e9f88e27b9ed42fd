"""What each conversation holds of each tier adds up to what the tiers have given away, to the block and the nanosecond."""

import random
from array import array
from collections import Counter
from functools import partial

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import Moved, StartReport
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Fork, tokens_of
from pensieve.core.session import HashChain, Session
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.restore import RestoringCache
from pensieve.plugins.caches.shared import SharedCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.plugins.tiers.disk import DiskTier
from pensieve.serve.books.books import Books
from pensieve.serve.books.holding import EARLIER, TIERS, Held
from pensieve.sim.worker import VirtualClock
from tests.invariants import check_cache
from tests.simulated import make_engine, request
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


def moment(engine, ns):
    assert isinstance(engine.clock, VirtualClock)
    engine.clock.advance_to(ns)
    engine.facts.at(ns)


def test_a_shared_block_is_paid_by_who_ran_with_it_last():
    """Eight tokens are two blocks; b begins as a did, so it takes those over, and its own third."""
    engine = make_engine(cache=PrefixCache, gpu_blocks=16)
    cache, said = engine.cache, array("i", range(1, 9))
    engine.facts.count_holding()
    a, b = cache.open("a", 0.0), cache.open("b", 0.0)
    cache.admit(a, 0, said, 0.0)
    cache.advance(a, ((0, 8),))
    moment(engine, 10)
    cache.release(a, 0.0)  # the third block, reserved for its reply, goes
    moment(engine, 30)
    cache.admit(b, 0, array("i", [*said, 50]), 0.0)
    moment(engine, 100)
    cache.release(b, 0.0)
    moment(engine, 1000)
    assert held(engine) == {("a", "gpu"): Held(3 * 10 + 2 * 20, 2 * 20), ("b", "gpu"): Held(3 * 70 + 2 * 900, 2 * 900)}


def test_kv_that_a_fork_takes_is_paid_by_the_child():
    engine = make_engine(gpu_blocks=16)
    engine.facts.count_holding()
    engine.say(request(0, "parent", 8, 2))
    while engine.busy:
        engine.step(None)
    at_ns = engine.clock.now_ns()
    before = held(engine)["parent", "gpu"]
    moment(engine, at_ns + 1000)
    engine.say(request(1, "child", 3, 1, fork=Fork("parent", 8, takes_kv=True)))
    check_cache(engine.cache)
    moment(engine, at_ns + 3000)
    found = held(engine)
    # Three blocks of nine positions; the two whole ones that both have in common change hands, less the last token's.
    moved = found["child", "gpu"].block_ns // 2000
    assert moved >= 1
    assert found["parent", "gpu"].block_ns == before.block_ns + 3 * 3000 - moved * 2000


def test_chunks_of_an_earlier_run_are_paid_by_nobody_until_they_are_read():
    books, said = Books(2), tokens_of([1, 2, 3, 4, 5])
    one, two = HashChain(2, "").upto(said, 4)
    tier = DiskTier(4)
    tier.begin(StartReport(0.0, 0.0, below_kept={one: 1, two: 2}), 2, 4, Priced(), {})
    tier.report_to(books)
    books.count_holding()
    session = Session("a", 0, 0.0, 0.0)
    books.opened(session)
    session.begin(said, 4)
    session.chunks.add(2)
    books.at(50)
    tier.read(session, [(0, 1)], ticket=1)
    books.at(80)
    tier.finish([Moved(1, ok=False, gone=(one, two))])
    books.at(1000)
    assert books.holdings() == {(EARLIER, "disk"): Held(50 + 80, 50 + 80), ("a", "disk"): Held(30, 30)}
