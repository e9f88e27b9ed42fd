"""Layers that attend to a window only: what they compute and read, counted one by one."""

from dataclasses import replace

import pytest

from pensieve.sim.measured import MeasuredCost
from pensieve.sim.roofline import Roofline, attended_pairs
from pensieve.specs import ModelSpec
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
        ("llama", {"sliding_window": None}, 0),
        ("llama", {"layer_types": 3 * ["full_attention", "sliding_attention"]}, 3),
        ("gemma3_text", {}, 5),
        ("gemma3_text", {"sliding_window_pattern": 2}, 3),
        ("gemma3_text", {"sliding_window_pattern": 4}, 5),
        ("gemma2", {}, 3),
        ("cohere2", {}, 5),
        ("cohere2", {"sliding_window_pattern": 3}, 4),
        ("qwen2", {"use_sliding_window": False}, 0),
        ("qwen2", {"use_sliding_window": True}, 0),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, 4),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 6),
        ("qwen3", {"use_sliding_window": False, "max_window_layers": 0}, 0),
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
