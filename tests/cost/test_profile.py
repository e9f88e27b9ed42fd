import json
import random
from dataclasses import replace

import pytest

from pensieve.errors import WorkerError
from pensieve.lab.compose.conf import options
from pensieve.serve.books.books import predicted_s
from pensieve.serve.systems.profiling import profile_of
from pensieve.sim.profile import WHOLE, Profile, fit, measure
from pensieve.sim.roofline import Roofline
from pensieve.sim.worker import SimulatedWorker, VirtualClock
from tests.cost.test_measured import machine_of, model_of
from tests.simulated import MACHINE, MODEL

OVERHEAD, LINEAR, QUADRATIC = 4e-3, 1e-4, 2e-8  # seconds: a step, a token, a pair of tokens
CONTEXTS = [1 << power for power in range(5, 16)]  # 32 to 32K
BY_PROFILE = {"sim_profile", "sim_paired"}
SIMULATED = sorted(name for name in options("hardware") if name.startswith("sim_") and name not in BY_PROFILE)


def polynomial(start: int, stop: int) -> float:
    return OVERHEAD + LINEAR * (stop - start) + QUADRATIC * (stop**2 - start**2)


def roofline_of(hardware: str, model: str = "llama3_8b") -> Roofline:
    return Roofline(model_of(model), replace(machine_of(hardware), terms={}), 32)  # also of one that was measured


@pytest.mark.parametrize("most", [16, 1024, 4096])
@pytest.mark.parametrize("hardware", SIMULATED)
def test_what_is_measured_gives_it_too_in_iterations_as_large_as_memory_was_rehearsed_for(
    hardware: str, most: int
) -> None:
    roofline = roofline_of(hardware, "llama3_8b" if most < 4096 else "opt_13b")
    asked: list[tuple[int, int]] = []

    def iteration(start: int, stop: int) -> float:
        asked.append((start, stop))
        return 0.001 * roofline.iteration_s([(start, stop)], 1)  # so fast that time cuts nothing short

    profile = measure(iteration, 32, 40_000, {}, most=most)
    assert max(stop for _, stop in asked) == 32768
    assert max(stop - start for start, stop in asked) == min(most, WHOLE)
    for context in CONTEXTS if most > 16 else ():  # with iterations of one length, the line has no slope to see
        expected = 0.001 * roofline.recompute_s(context)
        assert profile.recompute_s(context) == pytest.approx(expected, rel=0.1), context
    assert profile.recompute_s(8192) > profile.recompute_s(1024) > 0


def test_iterations_that_all_read_the_weights_are_met() -> None:
    """None of them tells what a token costs, and none is missed for that."""
    starts, lengths = (512, 0, 128, 0, 512, 0, 0, 2048, 128), (4, 4, 8, 16, 16, 16, 32, 32, 32)
    runs = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    for order in (runs, sorted(runs)):
        found = fit([(*run, 0.0273) for run in order])
        assert [found.iteration_s(*run) for run in runs] == pytest.approx([0.0273] * len(runs), rel=1e-9)


@pytest.mark.parametrize("quadratic", [QUADRATIC, 100 * QUADRATIC])
def test_attention_is_not_read_as_a_hinge(quadratic: float) -> None:
    """The other way round: a curve that bends by attention alone, slightly and from the first lengths on."""
    profile = Profile(32, {length: LINEAR * length + quadratic * length**2 for length in CONTEXTS}, 0.0, {})
    assert profile.terms.attention_s == pytest.approx(quadratic, rel=1e-3)
    assert profile.terms.linear_s == pytest.approx(LINEAR, rel=1e-3)
    assert profile.weights_s() <= 32 * LINEAR * 1.001, "no length that was measured lies below the hinge"
    alike = Profile(32, {}, 0.0, {}, {context: 0.016 + 1e-8 * context for context in CONTEXTS}, tail_tokens=16)
    assert alike.terms.linear_s == pytest.approx(0.001, rel=0.1), (
        "of iterations as long as each other no part is constant"
    )


@pytest.mark.parametrize("hardware", ["sim_h100", "sim_gtx1650"])
def test_noise_of_the_measurements_does_not_carry_into_the_marginal_chunk(hardware: str) -> None:
    """Up to 20 % on each of them; the slope between two of them would be off by several times that."""
    roofline, rng = roofline_of(hardware), random.Random(1)

    def iteration(start: int, stop: int) -> float:
        return 0.001 * rng.uniform(1, 1.2) * roofline.iteration_s([(start, stop)], 1)

    for _ in range(20):
        noisy = measure(iteration, 32, 32768, {})
        costs = [1000 * noisy.recompute_s(context) for context in range(32, 32769, 32)]
        assert costs == sorted(costs)
        for context in CONTEXTS:
            assert costs[context // 32 - 1] == pytest.approx(roofline.recompute_s(context), rel=0.2), context


def test_an_iteration_shorter_than_the_hinge_is_predicted_with_the_weights_it_reads() -> None:
    roofline = roofline_of("sim_h100")
    measured = {length: roofline.iteration_s([(0, length)], 1) for length in CONTEXTS}
    for cost in (roofline, Profile(32, measured, roofline.load_s(), {})):
        for start, stop in ((0, 64), (0, 128), (2048, 2176), (16384, 16512), (8192, 8704)):
            expected = roofline.iteration_s([(start, stop)], 1)
            assert predicted_s(cost, [(start, stop)], 32) == pytest.approx(expected, rel=0.12), (cost, start, stop)


def test_a_worker_is_profiled_through_its_plans() -> None:
    roofline = roofline_of("sim_h100")
    clock = VirtualClock()
    worker = SimulatedWorker(roofline.model, roofline.hardware, clock, 32)
    worker.start(2000, 2000)
    profile = profile_of(worker, clock, 32, 64_000, 8192, 2000, {"worker": "simulated"}, 4096)
    assert [*profile.prefill_s, *profile.tail_s] == [context for context in CONTEXTS if context <= 8192]
    for context in CONTEXTS:
        assert profile.recompute_s(context) == pytest.approx(roofline.recompute_s(context), rel=0.1), context
    assert profile.load_s() == pytest.approx(roofline.load_s(), rel=0.1)
    assert json.loads(json.dumps(profile.describe()))["terms"]["linear_s"] > 0
    assert clock.now_s() < 2
    for how in ({}, {"model_load_s": 2.5, "model_reused": False}, {"model_load_s": 2.5, "model_reused": True}):
        again = profile_of(worker, clock, 32, 40_000, 8192, 2000, {"worker": "simulated", **how}, 4096)
        assert again is profile, "baselines of a sweep decide by the same costs"
    small = profile_of(worker, clock, 32, 3000, 8192, 90, {"worker": "simulated"}, 4096)
    assert list(small.tail_s) == [2048]


def test_a_slow_machine_is_profiled_in_bounded_time() -> None:
    spent: list[float] = []

    def slow(start: int, stop: int) -> float:
        spent.append(20 * polynomial(start, stop))
        return spent[-1]

    profile = measure(slow, 32, 32768, {})
    assert sum(spent) < 8
    assert max(profile.prefill_s) == 1024 and max(profile.tail_s) == 2048
    slowest = measure(lambda start, stop: 10.0 * stop, 32, 32768, {})
    assert list(slowest.prefill_s) == [32, 64, 128], "fewer tell nothing"


def test_a_context_that_fails_ends_the_profile_and_a_prefill_that_fails_is_an_error() -> None:
    def no_memory(start: int, stop: int) -> float:
        if stop > 4096:
            raise WorkerError("The device ran out of memory.")
        return polynomial(start, stop)

    profile = measure(no_memory, 32, 32768, {})
    assert max(profile.tail_s) == 4096
    assert profile.recompute_s(4096) == pytest.approx(polynomial(0, 4096) - polynomial(0, 4064), rel=1e-3)

    def broken(start: int, stop: int) -> float:
        raise WorkerError("The step failed on the device.")

    with pytest.raises(WorkerError, match="failed on the device"):
        measure(broken, 32, 32768, {})


def test_roofline_is_bound_by_weights_at_decode_and_by_arithmetic_at_prefill() -> None:
    roofline = Roofline(MODEL, MACHINE, 4)
    decode = roofline.iteration_s([(100, 101)], 1) - MACHINE.step_overhead_s
    weights = (MODEL.read_parameters(1) + MODEL.vocab * MODEL.hidden) * MODEL.dtype_bytes
    assert decode >= weights / MACHINE.memory_bw
    assert roofline.weights_s() == pytest.approx(weights / MACHINE.memory_bw)
    assert roofline.iteration_s([(100, 101)] * 8, 8) < 8 * roofline.iteration_s([(100, 101)], 1)
    prefill_s = roofline.iteration_s([(0, 1000)], 1)
    assert prefill_s >= 1000 * MODEL.linear_flops_per_token / MACHINE.flops
    assert roofline.recompute_s(2000) > roofline.recompute_s(100)
    assert roofline.load_s() == pytest.approx(4 * MODEL.kv_bytes_per_token / MACHINE.h2d_bw)


@pytest.mark.parametrize(("size", "rate"), [(32 * 1024, 5e9), (32 * 1024 * 1024, 48e9)])
def test_pieces_of_32_kib_come_at_five_gb_a_second_and_large_ones_at_the_links_rate(size: int, rate: float) -> None:
    """What was published for an H100, from which the 5.9 us are."""
    model = replace(MODEL, layers=1, kv_heads=1, head_dim=1)
    cost = Roofline(model, replace(MACHINE, h2d_bw=48e9, fragment_s=5.9e-6), size // model.kv_bytes_per_token)
    assert size / cost.transfer_s(1, to_gpu=True) == pytest.approx(rate, rel=0.01)


def test_a_short_iteration_that_took_longer_than_a_long_one_is_noise() -> None:
    disturbed = measure(lambda start, stop: polynomial(start, stop) * (20 if stop == 64 else 1), 32, 2048, {})
    assert disturbed.prefill_s[64] == disturbed.prefill_s[128] == polynomial(0, 128)
    assert list(disturbed.prefill_s.values()) == sorted(disturbed.prefill_s.values())
