"""An iteration of a model with experts: its batch reads the experts it touches, and a token computes those it passes."""

import math
from dataclasses import replace

import pytest

from pensieve.lab.compose.plan import plan_trial
from pensieve.sim.measured import MeasuredCost
from pensieve.sim.roofline import Roofline
from pensieve.specs import Experts, HardwareSpec, ModelSpec
from tests.composed import checked

MACHINE = HardwareSpec(name="m", simulated=True, flops=1e15, memory_bw=3e12, h2d_bw=5e10, d2h_bw=5e10)
DENSE = ModelSpec.from_architecture(
    "x", plan_trial(checked("model=mixtral_8x7b", "hardware=sim_h100")).model.architecture, "bfloat16"
)


def seconds(model: ModelSpec, tokens: int) -> float:
    """Of a prefill of so many tokens."""
    return Roofline(model, MACHINE, 32).iteration_s([(0, tokens)], 1)


def with_experts(count: int, active: int, width: int) -> ModelSpec:
    return replace(DENSE, experts=Experts(count, active, width, 0, DENSE.layers))


def test_few_tokens_read_few_experts_many_read_all_and_each_computes_those_it_passes() -> None:
    mixtral, whole = with_experts(8, 2, 14336), with_experts(8, 8, 14336)
    every = mixtral.read_parameters(10**6)
    read = {rows: mixtral.read_parameters(rows) for rows in (1, 64)}
    assert read[1] == pytest.approx(every * 2 / 8, abs=0.03 * every) and read[64] > 0.999 * every
    for rows, parameters in read.items():
        decode = Roofline(mixtral, MACHINE, 32).iteration_s([(8, 9)] * rows, 0)
        assert decode == pytest.approx(2 * parameters / 3e12, rel=0.01)
    for tokens in (1, 64, 4096):
        one, four = (seconds(with_experts(n, n, 14336 // n), tokens) for n in (1, 4))
        assert four == pytest.approx(one, rel=2e-3)  # but for the router
    attention = 8192 * 8193 // 2 * mixtral.attention_flops_per_pair + mixtral.head_flops
    flops = [8192 * model.linear_flops_per_token + attention for model in (mixtral, whole)]
    assert seconds(mixtral, 8192) / seconds(whole, 8192) == pytest.approx(flops[0] / flops[1], rel=0.002)


@pytest.mark.parametrize(("rows", "most"), [(1, 0.40), (256, 1.05)])
def test_on_measured_kernels_a_decode_reads_what_its_batch_touches(rows: int, most: float) -> None:
    """Against all experts for every token; and one expert that is the whole MLP costs what the dense model does."""
    hardware = plan_trial(checked("model=mixtral_8x7b", "hardware=sim_h100")).hardware

    def decode(model: ModelSpec) -> float:
        return MeasuredCost(model, hardware, 32).iteration_s([(8, 9)] * rows, 0)

    mixtral, whole = with_experts(8, 2, 14336), with_experts(8, 8, 14336)
    assert decode(mixtral) < most * decode(whole)
    assert rows == 1 or decode(mixtral) > 0.5 * decode(whole)
    one, dense = decode(with_experts(1, 1, 14336)), decode(replace(DENSE, experts=None))
    assert dense <= one <= dense + DENSE.layers * 4e-6


# Microseconds of one layer's experts of Qwen3-30B-A3B on an RTX PRO 6000, by tokens and by experts that they touch. Source:
# moe.csv of LLMServingSim 2.0 (MIT, 2026-08-21), vLLM 0.19. No cost model read it.
MEASURED = {
    1: {8: 50.2},
    2: {8: 56.2, 16: 135.0},
    4: {16: 135.2, 32: 234.3},
    8: {32: 225.6, 64: 423.1},
    16: {64: 424.1, 128: 817.6},
    32: {64: 429.3, 128: 822.1},
    64: {64: 432.7, 128: 827.8},
    128: {64: 456.7, 128: 849.3},
    256: {128: 874.6},
    512: {128: 912.0},
    1024: {128: 970.4},
    2048: {128: 1066.6},
}


def test_experts_take_what_was_measured_on_a_card() -> None:
    cost = plan_trial(checked("model=qwen3_30b_a3b", "hardware=sim_rtxpro6000"))
    priced = MeasuredCost(cost.model, cost.hardware, 32)
    experts = cost.model.experts
    assert experts is not None
    errors = {}
    for tokens, cells in MEASURED.items():
        touched = round(experts.touched(tokens), 1)
        fewer, more = max(a for a in cells if a <= touched), min((a for a in cells if a >= touched), default=max(cells))
        share = math.log(touched / fewer) / math.log(more / fewer) if more > fewer else 0.0
        measured = cells[fewer] ** (1 - share) * cells[more] ** share
        errors[tokens] = 1e6 * priced._kernels._routed_s(tokens, experts) / measured - 1
    assert max(map(abs, errors.values())) < 0.18, errors
    assert sorted(map(abs, errors.values()))[len(errors) // 2] < 0.06, errors
