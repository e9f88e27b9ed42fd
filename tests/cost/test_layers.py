"""Layers of a kind: those with a window compute and read less, counted one by one; of those with experts a batch reads what
it touches, and a token computes what it passes. And how much of a load saturates a machine."""

import math
from dataclasses import replace

import pytest

from pensieve.lab.compose.build import stateless_capacity
from pensieve.lab.compose.plan import plan_trial
from pensieve.sim.measured import MeasuredCost
from pensieve.sim.roofline import Roofline, attended_pairs
from pensieve.specs import Experts, HardwareSpec, ModelSpec
from tests.composed import checked
from tests.cost.test_measured import machine_of, model_of
from tests.simulated import MACHINE, MODEL

GEMMA = "gemma2_27b_it"  # every other layer of 46 has a window of 4,096


def test_pairs_are_those_that_a_mask_leaves():
    for window in (None, 1, 3, 5, 100):
        for start in range(9):
            for stop in range(start, 12):
                left = sum(
                    1
                    for query in range(start, stop)
                    for at in range(query + 1)
                    if window is None or at > query - window
                )
                assert attended_pairs(start, stop, window) == left


@pytest.mark.parametrize(
    ("model_type", "fields", "windowed"),
    [
        ("mistral", {}, 6),
        ("llama", {"layer_types": 3 * ["full_attention", "sliding_attention"]}, 3),
        ("gemma3_text", {}, 5),
        ("gemma3_text", {"sliding_window_pattern": 2}, 3),
        ("gemma2", {}, 3),
        ("cohere2", {}, 5),
        ("cohere2", {"sliding_window_pattern": 3}, 4),
        ("qwen2", {"use_sliding_window": False}, 0),
        ("qwen2", {"use_sliding_window": True}, 0),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, 4),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 6),
    ],
)
def test_windows_that_no_list_names_are_those_of_transformers(model_type, fields, windowed):
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 9, "sliding_window": 40}
    given = {**sizes, "max_position_embeddings": 99, **fields}
    spec = ModelSpec.from_architecture("x", {**given, "model_type": model_type})
    assert spec.windowed_layers == windowed
    theirs = getattr(AutoConfig.for_model(model_type, **given), "layer_types", None)
    assert theirs is None or windowed == theirs.count("sliding_attention")


def half_windowed(window: int) -> ModelSpec:
    kinds = MODEL.layers // 2 * ["sliding_attention"] + (MODEL.layers - MODEL.layers // 2) * ["full_attention"]
    return replace(MODEL, sliding_window=window, architecture={"layer_types": kinds})


def test_a_roofline_reads_what_each_layer_reads():
    model, window = half_windowed(50), 50
    # Memory decides: arithmetic is free.
    machine = replace(MACHINE, flops=1e30)
    cost, everything = Roofline(model, machine, 4), Roofline(MODEL, machine, 4)
    rows = [(300, 301), (47, 48), (700, 720)]
    read = [(301, 50), (48, 48), (720, 69)]  # positions, by a layer without a window and one with
    tokens = 1 + 1 + 20
    a_layer = model.kv_bytes_per_token / model.layers / (machine.memory_bw * machine.memory_efficiency)
    windowed = model.windowed_layers
    expected = sum(a_layer * (windowed * inside + (model.layers - windowed) * all_) for all_, inside in read)
    expected += tokens * model.layers * a_layer  # that are written
    linear = everything.iteration_s([(0, 1)] * tokens, 3) - 2 * tokens * model.layers * a_layer
    assert cost.iteration_s(rows, 3) == pytest.approx(linear + expected)
    within = [(start, stop) for start, stop in rows if stop <= window]
    assert cost.iteration_s(within, 1) == pytest.approx(everything.iteration_s(within, 1), rel=1e-12)


def test_a_chunk_far_beyond_the_window_costs_no_more_in_layers_that_have_it():
    every = Roofline(replace(MODEL, sliding_window=50), MACHINE, 4)
    half, none = Roofline(half_windowed(50), MACHINE, 4), Roofline(MODEL, MACHINE, 4)
    assert every.recompute_s(48) == none.recompute_s(48) == half.recompute_s(48)
    assert every.recompute_s(800) == every.recompute_s(100) > every.recompute_s(48)
    share = half.model.windowed_layers / MODEL.layers
    grown = none.recompute_s(800) - none.recompute_s(100)
    assert half.recompute_s(800) - half.recompute_s(100) == pytest.approx((1 - share) * grown)


@pytest.mark.parametrize("hardware", ["sim_h100", "sim_rtx4090"])
def test_measured_kernels_are_asked_for_each_kind_of_layer(hardware):
    gemma, machine = model_of(GEMMA), machine_of(hardware)
    assert (gemma.layers, gemma.windowed_layers) == (46, 23)

    def cost(kind: str | None) -> MeasuredCost:
        listed = {} if kind is None else {"layer_types": gemma.layers * [kind]}
        return MeasuredCost(replace(gemma, architecture=listed), machine, 32)

    every, half, none = cost("sliding_attention"), cost(None), cost("full_attention")
    short = [(4000, 4001), (1000, 1512)]
    assert every.iteration_s(short, 2) == half.iteration_s(short, 2) == none.iteration_s(short, 2)
    for rows in ([(8000, 8001)] * 3, [(6000, 6512)], [(8000, 8001), (7000, 7200)]):
        assert every.iteration_s(rows, 2) < half.iteration_s(rows, 2) < none.iteration_s(rows, 2)
        mean = (every.iteration_s(rows, 2) + none.iteration_s(rows, 2)) / 2
        assert half.iteration_s(rows, 2) == pytest.approx(mean, rel=1e-9)
    far, further = ([(start, start + 1)] * 8 for start in (5000, 8000))
    assert every.iteration_s(far, 8) == every.iteration_s(further, 8) == none.iteration_s([(4095, 4096)] * 8, 8)
    assert every.recompute_s(5000) == pytest.approx(every.recompute_s(8192))
    assert every.recompute_s(8192) < half.recompute_s(8192) < none.recompute_s(8192)


# -- experts ----------------------------------------------------------------------------------------------------------------

LARGE = HardwareSpec(name="m", simulated=True, flops=1e15, memory_bw=3e12, h2d_bw=5e10, d2h_bw=5e10)
DENSE = ModelSpec.from_architecture(
    "x", plan_trial(checked("model=mixtral_8x7b", "hardware=sim_h100")).model.architecture, "bfloat16"
)


def seconds(model: ModelSpec, tokens: int) -> float:
    """Of a prefill of so many tokens."""
    return Roofline(model, LARGE, 32).iteration_s([(0, tokens)], 1)


def with_experts(count: int, active: int, width: int) -> ModelSpec:
    return replace(DENSE, experts=Experts(count, active, width, 0, DENSE.layers))


def test_few_tokens_read_few_experts_many_read_all_and_each_computes_those_it_passes() -> None:
    mixtral, whole = with_experts(8, 2, 14336), with_experts(8, 8, 14336)
    every = mixtral.read_parameters(10**6)
    read = {rows: mixtral.read_parameters(rows) for rows in (1, 64)}
    assert read[1] == pytest.approx(every * 2 / 8, abs=0.03 * every) and read[64] > 0.999 * every
    for rows, parameters in read.items():
        decode = Roofline(mixtral, LARGE, 32).iteration_s([(8, 9)] * rows, 0)
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


# -- capacity ---------------------------------------------------------------------------------------------------------------


class Cost:
    """An iteration takes a millisecond for each position that it computes, and 10 ms."""

    def iteration_s(self, runs, sampled):
        return 0.01 + 0.001 * sum(stop - start for start, stop in runs)


HELD = (10 * (10 + 5) + 100 * (10 + 50)) / 110
"""The long reply holds its KV ten times as long: (1 x 15 + 10 x 60) tokens x iterations over 11 iterations."""


@pytest.mark.parametrize(
    ("lengths", "bounds", "expected"),
    [
        ([(90, 10)], {"kv_tokens": 950}, 1 / 0.11),  # 10 of 90 + 10 / 2 tokens fit; 10 decodes, 90 positions, one ends
        ([(90, 10)] * 7, {"kv_tokens": 950}, 1 / 0.11),  # means, however many they are of
        ([(90, 10)], {"requests": 10}, 1 / 0.11),
        ([(90, 10)], {"positions": 100}, 1 / 0.11),
        ([(9, 10)], {"requests": 10}, 1 / 0.029),  # history that need not be computed
        ([(10, 10), (10, 100)], {"kv_tokens": round(6 * HELD)}, 6 * 2 / 110 / (0.01 + 0.001 * (6 + round(6 * 20 / 110)))),
    ],
)  # fmt: skip
def test_what_bounds_the_batch_bounds_the_capacity(lengths, bounds, expected):
    free = {"kv_tokens": 10**6, "requests": 10**6, "positions": 10**6}
    assert stateless_capacity(Cost(), lengths, **(free | bounds)) == pytest.approx(expected)
