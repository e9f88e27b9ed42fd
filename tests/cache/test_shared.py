"""Equal beginnings of conversations are kept once: who finds what, what it costs, and what goes with whom."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.lru import Lru
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.request import Forced, Fork, Length, Request
from pensieve.plugins.caches.shared import SharedCache
from pensieve.serve.record import TurnRecord
from tests.invariants import check_cache
from tests.simulated import TalkingEngine, make_engine, run

SYSTEM = array("i", range(1, 41))  # ten chunks of four


def asking(number: int, session: str, prompt: array[int], output: int = 3, **fields: Any) -> Request:
    return Request(number, session, 1, prompt, Length(output), **fields)


def own(number: int) -> array[int]:
    return array("i", (50 + (number * step) % 40 for step in range(6)))


def engine_of(**fields: Any) -> TalkingEngine:
    return make_engine(**{"gpu_blocks": 64, "cpu_blocks": 0, "cache": SharedCache, **fields})


def turn(engine: TalkingEngine, request: Request) -> TurnRecord:
    engine.submit(request)
    return run(engine)[request.id]


def hits(record: TurnRecord) -> tuple[int | None, ...]:
    return record.gpu_hit_tokens, record.cpu_hit_tokens, record.recomputed_tokens, record.shared_hit_tokens


def test_two_that_are_answered_alike_keep_one_copy() -> None:
    """Each has its own while both run; the second to stop gives up what the first one has."""
    engine, prompt = engine_of(max_batch_tokens=64), SYSTEM + own(1)
    reply = array("i", range(20, 40))
    for number, name in enumerate("ab", 1):
        engine.submit(replace(asking(number, name, prompt), output=Forced(reply)))
    run(engine)
    sessions = engine.cache.sessions
    assert sessions["a"].tokens == sessions["b"].tokens and len(sessions["a"].tokens) == 66
    assert sessions["a"].stems()[-1].stop == sessions["b"].stems()[-1].stop == 16
    assert engine.cache.gpu_blocks_used == 16 + 2, "the last chunk, partly filled, is each one's own"


def test_tenants_find_nothing_of_each_other() -> None:
    """Every number of a tenant's turn is what it is where the other one has asked something else, or nothing: not found by
    hits, by blocks, or by the time to first token, to the last digit."""
    seen = []
    for theirs in (SYSTEM + own(1), array("i", range(40, 86)), None):
        engine = engine_of()
        if theirs is not None:
            turn(engine, asking(1, "a", theirs, tenant="one"))
        used = engine.cache.gpu_blocks_used
        record = turn(engine, asking(2, "b", SYSTEM + own(2), tenant="two", intended_s=engine.clock.now_s()))
        assert hits(record) == (0, 0, 0, 0) and record.ttft_ms is not None and record.latency_ms is not None
        seen.append(
            (
                round(record.ttft_ms, 6),  # nanoseconds
                round(record.latency_ms, 6),
                engine.cache.gpu_blocks_used - used,
                engine.cache.places(engine.cache.sessions["b"]),
            )
        )
    assert seen[0] == seen[1] == seen[2]


def test_nobody_behind_a_prompt_that_waits_for_another_is_later() -> None:
    """It waits for what the first computes; requests come first, first served, so those behind it wait too."""
    late: list[dict[int, float]] = []
    long = array("i", (1 + place * 7 % 250 for place in range(3000)))
    for cache in (TwoTierCache, SharedCache):
        engine = engine_of(cache=cache, gpu_blocks=2000, max_batch_tokens=256)
        for number, prompt in enumerate([long + own(1), long + own(2), *(own(number) for number in range(3, 8))]):
            engine.submit(asking(number, str(number), prompt))
        late.append({number: record.ttft_ms or 0.0 for number, record in run(engine).items()})
    assert all(late[1][number] <= late[0][number] for number in late[0])
    assert late[1][6] < late[0][6] / 1.5


@pytest.mark.parametrize("seed", range(8))
def test_conversations_at_random_keep_every_invariant(seed: int) -> None:
    """Two letters, so that beginnings are often alike; forks, edits, cancelled turns; tiers of every size, copies late."""
    rng = random.Random(seed)
    engine = make_engine(
        rng.randint(16, 50),
        rng.choice((0, 3, 12, 40)),
        cache=SharedCache,
        policy=rng.choice((Lru, RetentionValue)),
        late=random.Random(seed) if rng.random() < 0.4 else None,
        depth=rng.choice((1, 2)),
        copy_ahead=rng.choice(("paper", "spare", "never")),
        max_batch_tokens=rng.choice((3, 10, 64)),
        max_batch_requests=rng.choice((1, 3, 8)),
        holding=True,
    )

    def said(most: int) -> array[int]:
        return array("i", (rng.randrange(2) for _ in range(rng.randint(1, most))))

    texts, asked, sessions = [said(40) for _ in range(2)], 0, engine.cache.sessions
    for _ in range(120):
        action, name = rng.random(), rng.choice("abcdef")
        known, fork = sessions.get(name), None
        if action < 0.4:
            if known is None and sessions and rng.random() < 0.4:
                parent = rng.choice(list(sessions.values()))
                kept = int(len(parent.tokens) * rng.random())
                fork, prompt = Fork(parent.name, kept, rng.random() < 0.5), parent.tokens[:kept] + said(5)
            elif known is None or rng.random() < 0.2:
                prompt = rng.choice(texts)[: rng.randint(1, 30)] + said(6)
            else:
                prompt = known.tokens[: int(len(known.tokens) * rng.choice((1, 1, 1, rng.random())))] + said(9)
            asked += 1
            tenant = name if name == "f" else ""
            engine.submit(asking(asked, name, prompt, rng.randint(1, 12), fork=fork, tenant=tenant))
        elif action < 0.45:
            engine.forget(name)
        elif action < 0.5:
            engine.sessions.ended(name)
        elif action < 0.55:
            engine.cancel(asked - rng.randint(0, 3), "cancelled")
        else:
            for record in [event.turn for _ in range(rng.randint(1, 6)) for event in engine.step(None) if event.turn]:
                found = [record.gpu_hit_tokens, record.cpu_hit_tokens, record.recomputed_tokens]
                assert None in found or sum(map(int, found)) == record.history_tokens
        check_cache(engine.cache)
    run(engine)
    engine.forget(None)
    assert engine.cache.gpu_blocks_used == engine.cache.cpu_blocks_used == 0 or engine.cache.tiers.copies.open_moves
