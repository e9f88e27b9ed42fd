from __future__ import annotations

import pytest

from pensieve.lab.bench.serve import MARGIN, Point, Reached, Turn, all_hit_ratio, at_latency, common_latency, turn_s
from pensieve.sim.roofline import Roofline
from pensieve.specs import HardwareSpec, ModelSpec
from tests.worker.torch.driver import tiny_spec

MACHINE = HardwareSpec("sim", True, flops=1e12, memory_bw=1e9)
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


def roofline(spec: ModelSpec | None = None) -> Roofline:
    return Roofline(spec or tiny_spec("llama"), MACHINE, 32)


def test_without_history_keeping_it_gains_nothing() -> None:
    assert all_hit_ratio(roofline(), [Turn(0, 40, 8)], batch=4) == 1.0


def test_a_prompt_and_its_decode_steps_add_up() -> None:
    line, turn = roofline(), Turn(100, 20, 10)
    step = line.iteration_s([(125, 126)] * 2, 2)
    assert turn_s(line, [turn], 2, keeps=True) == pytest.approx(line.iteration_s([(100, 120)], 1) + 10 * step / 2)
    assert turn_s(line, [turn], 2, keeps=False) == pytest.approx(line.iteration_s([(0, 120)], 1) + 10 * step / 2)


def test_longer_histories_gain_more() -> None:
    line = roofline()
    assert all_hit_ratio(line, [Turn(4000, 20, 10)], 8) > all_hit_ratio(line, [Turn(400, 20, 10)], 8) > 1.0
