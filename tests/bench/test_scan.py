from __future__ import annotations

import pytest

from pensieve.lab.bench.scan import ENOUGH, hit_rate


@pytest.mark.parametrize("live", [1.8, pytest.param(3.7, marks=pytest.mark.slow)])
def test_recency_collapses_in_strict_turn_and_adaptive_retention_does_not(live: float) -> None:
    assert hit_rate("retention_value", live, in_turn=True) < 0.02
    assert hit_rate("adaptive_retention", live, in_turn=True) >= ENOUGH[live]


@pytest.mark.slow
@pytest.mark.parametrize("live", [1.8, 3.7])
def test_learning_when_they_return_resists_the_scan_too(live: float) -> None:
    assert hit_rate("learned_return", live, in_turn=True) >= ENOUGH[live]


def test_where_recency_is_as_good_as_any_it_costs_at_most_two_points() -> None:
    assert hit_rate("adaptive_retention", 1.8, in_turn=False) >= hit_rate("retention_value", 1.8, in_turn=False) - 0.02
