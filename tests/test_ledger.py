"""Why prompt tokens had no KV: every miss has a cause, and the lines of a turn add up to its misses and its time."""

import random
from array import array

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.request import History, Length, Request, Sampling
from pensieve.plugins.caches.prefix import PrefixCache
from pensieve.plugins.caches.slots import SlotCache
from pensieve.plugins.caches.stateless import StatelessCache
from pensieve.plugins.caches.vllm_offload import VllmOffload
from pensieve.serve.books.books import MOST_EVICTORS, PositionPrices, ledger_of
from pensieve.serve.record import Loss, Missed
from tests.baselines.systems import inline
from tests.invariants import check_cache

KINDS = {
    "pensieve": TwoTierCache,
    "prefix_cache": PrefixCache,
    "vllm_offload": VllmOffload,
    "llama_slots": SlotCache,
    "stateless": StatelessCache,
}


class Talk:
    """Conversations with one system; each turn's ledger is held against its record."""

    def __init__(self, kind="pensieve", **parts):
        self.system = inline(cache=KINDS[kind], **parts)
        self.system.start()
        self.number = 0

    def ask(self, session, prompt, output=3, **fields):
        self.number += 1
        asked = Request(self.number, session, 0, array("i", prompt), Length(output), Sampling(), **fields)
        turn = self.system.ask(asked)
        check_cache(self.system.engine.cache)
        hits = turn.gpu_hit_tokens + turn.cpu_hit_tokens + turn.shared_hit_tokens
        assert sum(miss.tokens for miss in turn.misses) == turn.prompt_tokens - hits
        assert sum(miss.ms for miss in turn.misses) == pytest.approx(turn.ttft_ms)
        assert all(miss.tokens > 0 and miss.ms >= 0 for miss in turn.misses)
        assert not turn.missed
        return turn


def causes(turn):
    found = {}
    for miss in turn.misses:
        found[miss.cause] = found.get(miss.cause, 0) + miss.tokens
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_lines_of_every_turn_add_up_under_pressure(kind):
    """Random conversations in little room, some edited, some told to be long."""
    rng = random.Random(4)
    talk = Talk(kind, gpu_blocks=80 if kind == "llama_slots" else 40, cpu_blocks=20)
    held = {}
    for _ in range(60):
        name = rng.choice("abcdefg")
        prompt = held.get(name, [])
        if len(prompt) > 25:
            prompt = prompt[: rng.choice([0, 10, len(prompt)])]
        prompt = [*prompt, *(rng.randrange(200) for _ in range(rng.randrange(1, 9)))]
        turn = talk.ask(name, prompt)
        held[name] = [*prompt, *turn.token_ids]
        evicted = [miss for miss in turn.misses if miss.cause == "evicted"]
        assert sum(miss.tokens for miss in turn.misses if miss.cause in ("evicted", "never_stored")) == (
            turn.recomputed_tokens
        )
        assert all(miss.evicted_by for miss in evicted)
        assert all(0 <= miss.evicted_s <= turn.admitted_s for miss in evicted)


@pytest.mark.parametrize(("lost", "cause"), [("kept", "expired"), ("restarted", "restarted")])
def test_what_the_server_remembers_and_the_engine_does_not(lost, cause):
    talk = Talk()
    turn = talk.ask("a", range(40), history=History(30, lost))
    assert causes(turn) == {cause: 30, "new": 10}
    known = talk.ask("a", [*range(40), *turn.token_ids, 9], history=History(42, lost))
    assert cause not in causes(known), "the engine knows better"


class Dear:
    """Position n costs n."""

    def recompute_s(self, context_tokens):
        return float(context_tokens)


def test_milliseconds_follow_the_price_of_each_position():
    missed = (Missed(0, 4, "evicted", Loss("x", 1.0)), Missed(4, 8, "new"))
    early, late = ledger_of(missed, 30.0, PositionPrices(Dear(), 4))
    assert (early.ms, late.ms) == (pytest.approx(10.0), pytest.approx(20.0))
    assert (early.evicted_by, early.evicted_s, late.evicted_by) == ("x", 1.0, None)


def test_many_evictors_are_named_as_far_as_there_is_room():
    missed = [Missed(i, i + 1, "evicted", Loss(f"s{i}", float(i))) for i in range(20)]
    lines = ledger_of(missed, 20.0, PositionPrices(Dear(), 4))
    assert len(lines) == MOST_EVICTORS + 1
    assert sum(line.tokens for line in lines) == 20
    assert sum(line.ms for line in lines) == pytest.approx(20.0)
