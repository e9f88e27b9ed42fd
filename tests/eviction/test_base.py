"""What a policy has to say, and what it gets for nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.policies.lru import Lru
from pensieve.core.session import Session
from pensieve.errors import ConfigError
from tests.simulated import make_engine, request, run


class Longest(EvictionPolicy):
    def order(self, session: Session, chunk: int) -> float:
        return -len(session.tokens)


def turns_under(policy: Any) -> list[tuple[Any, ...]]:
    """Random turns over tiers that hold a part of them: what each found, and what was lost so far."""
    rng, engine = random.Random(3), make_engine(20, 30, policy=policy)
    served = []
    for number in range(60):
        engine.say(request(number, rng.choice("abcdefgh"), rng.randint(1, 20), rng.randint(1, 5), turn=number))
        turn, dropped = run(engine)[number], engine.cache.counters.dropped_chunks
        served.append((turn.finished_s, turn.gpu_hit_tokens, turn.cpu_hit_tokens, dropped))
    assert served[-1][-1] > 0, "something was evicted"
    return served


def test_a_policy_is_one_method() -> None:
    assert turns_under(Longest) != turns_under(Lru)


def test_what_is_no_policy_is_refused_with_what_to_inherit() -> None:
    with pytest.raises(ConfigError, match=r"dict is no eviction policy.*subclass of pensieve\.core\.policies\.base"):
        TwoTierCache(policy={}, chunk_tokens=4, gpu_blocks=8, cpu_blocks=0)  # type: ignore[arg-type]
