from __future__ import annotations

import pytest

from pensieve.bench.prediction import Turn, all_hit_ratio, turn_s
from pensieve.cost.roofline import Roofline
from pensieve.specs import HardwareSpec, ModelSpec
from tests.worker.torch.driver import tiny_spec

MACHINE = HardwareSpec("sim", True, flops=1e12, memory_bw=1e9)


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
