from __future__ import annotations

import random

import pytest

from pensieve.cost.profile import Profile, measure
from pensieve.cost.roofline import Roofline
from tests.simulated import MACHINE, MODEL

OVERHEAD, LINEAR, QUADRATIC = 4e-3, 1e-4, 2e-8  # seconds: a step, a token, a pair of tokens


def prefill(tokens: int) -> float:
    return OVERHEAD + LINEAR * tokens + QUADRATIC * tokens**2


def test_cost_recovers_the_marginal_chunk_from_the_prefill_curve() -> None:
    profile = measure(prefill, 32, 2048, {})
    for context in (512, 1024, 1400):
        exact = prefill(context) - prefill(context - 32)
        assert profile.recompute_s(context) == pytest.approx(exact, rel=1e-3)
    assert profile.recompute_s(32) < profile.recompute_s(1024) < profile.recompute_s(1536) < profile.recompute_s(3000)


def test_noise_leaves_a_positive_non_decreasing_cost() -> None:
    rng = random.Random(0)
    for _ in range(50):
        noisy = Profile(
            32, {length: prefill(length) * rng.uniform(1, 3) for length in (128, 256, 512, 1024, 2048)}, 0.0, {}
        )
        costs = [noisy.recompute_s(context) for context in range(32, 4096, 32)]
        assert costs == sorted(costs)
        assert costs[0] > 0
        at_1024 = prefill(1024) - prefill(992)
        assert at_1024 / 2 < noisy.recompute_s(1024) < 4 * at_1024


def test_roofline_is_bound_by_weights_at_decode_and_by_arithmetic_at_prefill() -> None:
    roofline = Roofline(MODEL, MACHINE, 4)
    decode = roofline.iteration_s([(100, 101)], 1) - MACHINE.step_overhead_s
    weights = (MODEL.layers * MODEL.layer_parameters + MODEL.vocab * MODEL.hidden) * MODEL.dtype_bytes
    assert decode >= weights / MACHINE.memory_bw
    assert roofline.iteration_s([(100, 101)] * 8, 8) < 8 * roofline.iteration_s([(100, 101)], 1)
    prefill_s = roofline.iteration_s([(0, 1000)], 1)
    assert prefill_s >= 1000 * MODEL.linear_flops_per_token / MACHINE.flops
    assert roofline.recompute_s(2000) > roofline.recompute_s(100)
    assert roofline.load_s() == pytest.approx(4 * MODEL.kv_bytes_per_token / MACHINE.h2d_bw)
