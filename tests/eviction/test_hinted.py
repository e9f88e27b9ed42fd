"""Policies that read hints: who goes first, what a broken promise is worth, and how often a noisy hint is wrong."""

import pytest

from pensieve.core.cache.heaps import HeapIndex
from pensieve.core.policies.base import EvictionPolicy
from pensieve.core.request import Hint
from pensieve.core.session import Session, View
from pensieve.plugins.policies.hinted import Hinted, OracleHint
from tests.simulated import policy_context


def idle(number: int, last_active_s: float, hint: Hint | None = None, next_use_s: float | None = None) -> Session:
    return Session(f"s{number}", number, 0.0, last_active_s, hint=hint, next_use_s=next_use_s, turns=number % 7)


def evicted(policy: EvictionPolicy, sessions: list[Session], now_s: float) -> list[int]:
    """The numbers of the conversations in the order of eviction (that the index keeps it: tests/cache/test_victims.py)."""
    index = HeapIndex(policy, View.DIRTY)
    return [session.number for session in sorted(sessions, key=lambda session: index.as_victim(session.leaf, 0, now_s))]


def test_who_will_be_back_goes_last_until_it_is_overdue() -> None:
    soon, late = Hint(expected_s=60.0), Hint(expected_s=61.0)
    sessions = [
        idle(1, 0.0, soon),
        idle(2, 10.0, late),
        idle(3, 20.0),
        idle(4, 30.0, soon),
        idle(5, 40.0, Hint("tool_use")),
    ]
    policy = Hinted(policy_context())
    assert evicted(policy, sessions, 60.0) == [2, 3, 5, 1, 4], "to the second"
    assert evicted(policy, sessions, 61.0) == [1, 2, 3, 5, 4], "the first broke its word"
    assert evicted(policy, sessions, 91.0) == [1, 2, 3, 4, 5], "nobody's word stands: least recently used"


@pytest.mark.parametrize("error_pct", [0, 40, 100])
def test_a_noisy_hint_is_wrong_as_often_as_it_says_about_either_answer(error_pct: float) -> None:
    noisy = OracleHint(policy_context(), error_pct=error_pct)
    for returns in (True, False):
        sessions = [idle(n, 99.0, next_use_s=159.0 if returns else None) for n in range(4000)]
        wrong = [noisy.soon(session) is not returns for session in sessions]
        assert sum(wrong) / 4000 == pytest.approx(error_pct / 100, abs=0.025)
