from __future__ import annotations

import pytest

from pensieve.bench.curve import MARGIN, Point, Reached, at_latency, common_latency

SLOW = [Point(1, 10.0, 8.0), Point(2, 15.0, 20.0)]
FAST = [Point(1, 11.0, 4.0), Point(2, 20.0, 6.0)]


def test_the_latency_is_one_that_every_system_keeps_to() -> None:
    assert common_latency({"slow": SLOW, "fast": FAST}) == MARGIN * 8.0


def test_between_two_loads_it_is_linear() -> None:
    assert at_latency(SLOW, 14.0) == Reached(12.5, "")
    assert at_latency(SLOW, 8.0) == Reached(10.0, "")


def test_beyond_the_loads_it_is_only_bounded() -> None:
    assert at_latency(FAST, 10.0) == Reached(20.0, ">=")
    assert at_latency(SLOW, 7.0) == Reached(10.0, "<=")


@pytest.mark.parametrize("order", [1, -1])
def test_a_curve_that_dips_is_left_where_it_crosses_last(order: int) -> None:
    points = [Point(1, 10.0, 12.0), Point(2, 18.0, 9.0), Point(3, 20.0, 14.0)][::order]
    assert at_latency(points, 10.0) == Reached(pytest.approx(18.4), "")  # type: ignore[arg-type]
