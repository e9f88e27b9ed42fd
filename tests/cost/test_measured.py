"""Costs from measured kernels, against the published measurements and against arithmetic of their own."""

import csv
import itertools
import math
import statistics
from dataclasses import replace

import pytest

from pensieve.core.plan import NO_DECODES, Decodes
from pensieve.errors import ConfigError
from pensieve.lab.compose.conf import read_option
from pensieve.lab.compose.model_files import ModelConfig
from pensieve.lab.compose.plan import find_device, hardware_spec
from pensieve.lab.compose.settings import HardwareConfig
from pensieve.sim.kernel_tables import AttentionGrid, nearest, read, tables_of
from pensieve.sim.measured import (
    FIT,
    AttentionFit,
    Batch,
    FittedAttention,
    MeasuredAttention,
    MeasuredCost,
    graph_size,
    shape_of,
)  # fmt: skip
from pensieve.sim.tables import derive
from pensieve.sim.worker import simulated_cost
from pensieve.specs import HardwareSpec, ModelSpec
from tests.shared_data import shared

CELL = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def model_of(name: str, dtype: str = "bfloat16") -> ModelSpec:
    described = ModelConfig.model_validate(read_option("model", name))
    return ModelSpec.from_architecture(name, described.architecture, dtype)


def machine_of(hardware: str, **changed: object) -> HardwareSpec:
    config = HardwareConfig.model_validate({**read_option("hardware", hardware), **changed})
    return hardware_spec(config, find_device(config))


def cost_of(hardware: str, model: str = "llama3_1_8b", **changed: object) -> MeasuredCost:
    return MeasuredCost(model_of(model), machine_of(hardware, **changed), 32)


def raw(path: str) -> list[dict[str, str]]:
    with shared(f"gpu_profiles/{path}").open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def test_the_shipped_tables_are_the_published_measurements(tmp_path):
    made = derive.derive(shared("gpu_profiles"), tmp_path)
    assert len(made) > 20
    for path in made:
        shipped = derive.HERE / path.relative_to(tmp_path)
        assert path.read_bytes() == shipped.read_bytes(), shipped
        assert path.stat().st_size < 40_000


def test_a_decode_of_a_measured_size_takes_what_its_kernels_were_measured_to_take():
    place = "llmservingsim/RTX4090/meta-llama/Llama-3.1-8B/tp1"
    layers = {row["layer"]: float(row["time_us"]) for row in raw(f"{place}/dense.csv") if row["tokens"] == "32"}
    heads = [float(row["time_us"]) for row in raw(f"{place}/per_sequence.csv") if row["sequences"] == "32"]
    attention = next(
        float(row["time_us"])
        for row in raw(f"{place}/attention.csv")
        if [row[name] for name in CELL] == ["0", "0", "32", "1024"]
    )
    once = layers.pop("embedding") + layers.pop("final_layernorm")
    each = sum(layers.values()) + layers["layernorm"] + attention  # two norms a layer
    expected = 1e-6 * (32 * each + once + sum(heads))
    cost = cost_of("sim_rtx4090")
    assert cost.iteration_s([(1024, 1025)] * 32, 32) == pytest.approx(expected, rel=1e-3)
    assert cost.extrapolated() == {}


@pytest.mark.parametrize(
    ("table", "place"),
    [
        ("rtxpro6000/llama3_8b_tp1", "RTXPRO6000/meta-llama/Llama-3.1-8B/tp1"),
        ("rtxpro6000/qwen3_32b_tp2", "RTXPRO6000/Qwen/Qwen3-32B/tp2"),
    ],
)
def test_cells_that_were_left_out_of_the_tables_are_met_by_interpolation(table, place):
    grid = next(each.attention for each in tables_of("rtxpro6000") if each.name == table)
    errors, decodes = [], []
    for row in raw(f"llmservingsim/{place}/attention.csv"):
        cell = [int(row[name]) for name in CELL]
        if any(size & (size - 1) for size in cell) and grid.covers(*cell):
            error = abs(grid.at(*cell) * 1e6 / float(row["time_us"]) - 1)
            errors.append(error)
            if not cell[0]:
                decodes.append(error)
    assert len(errors) > 10_000 and len(decodes) > 50
    assert statistics.median(errors) < 0.03 and statistics.median(decodes) < 0.01
    assert sorted(errors)[int(0.9 * len(errors))] < 0.09


MEASURED = [table for card in ("rtx4090", "rtxpro6000") for table in tables_of(card)]
AXES = range(len(CELL))


@pytest.mark.parametrize("table", MEASURED, ids=lambda table: table.name)
def test_more_decodes_than_were_measured_beside_a_chunk_go_on_as_the_last_ones(table):
    """128 decodes beside a chunk were measured: a grid without them is asked for them (doubling 64 is off by 27 to 32 %).
    Cells that nobody measured are no faster than the card's peaks allow; and from the batch before, time grows at most 1.3
    times as much as decodes do (between measured cells up to 2.4 times)."""
    content = read(f"{table.name}.json.gz")["attention"]
    cells = dict(zip(itertools.product(*(content[name] for name in CELL)), content["us"], strict=True))
    left = [None if chunk and decodes > 64 else us for (chunk, _, decodes, _), us in cells.items()]
    hidden = AttentionGrid({**content, "us": left})
    known = {cell: us for cell, us in cells.items() if cell[0] and cell[2] == 128 and us is not None}
    errors = [abs(1e6 * hidden.at(*cell) / us - 1) for cell, us in known.items()]
    assert len(errors) > 1000 and statistics.median(errors) < 0.15
    assert not any(hidden.covers(*cell) for cell in known)
    grid, decodes = table.attention, table.attention._axes[2]
    priced = MeasuredAttention(table, table.shape, cost_of(f"sim_{table.name.partition('/')[0]}").hardware)
    beside = itertools.product(*(range(1 if axis != 1 else 0, len(grid._axes[axis])) for axis in AXES))
    seconds = {key: math.exp(grid._log(key)) for key in beside}
    assert len(grid._filled) == 1056
    for c, k, n, d in grid._filled:
        roofline = priced._work(table.shape, *(grid._axes[axis][at] for axis, at in enumerate((c, k, n, d))))
        assert seconds[c, k, n, d] > roofline, (c, k, n, d)
        growth = seconds[c, k, n, d] / seconds[c, k, n - 1, d]
        assert growth < 1.3 * decodes[n] / decodes[n - 1], (c, k, n, d)


def test_a_shape_that_was_measured_is_not_scaled_and_another_one_is():
    cost = cost_of("sim_rtx4090")
    assert cost.describe()["terms"]["projections"]["scaled_from"] is None
    wider = cost_of("sim_rtx4090", "llama2_13b")
    assert wider.describe()["terms"]["projections"]["scaled_from"]["hidden"] == 4096
    ratio = wider.weights_s() / cost.weights_s()  # reading the weights is what a single token takes
    assert ratio == pytest.approx(model_of("llama2_13b").parameters / model_of("llama3_1_8b").parameters, rel=0.1)
    assert wider.iteration_s([(0, 512)], 1) > cost.iteration_s([(0, 512)], 1)
    smaller = cost_of("sim_rtx4090", "opt_125m")
    assert smaller.iteration_s([(0, 512)], 1) < cost.iteration_s([(0, 512)], 1) / 10
    degrees = [nearest("rtxpro6000", shape_of(model_of("qwen3_32b"), gpus)).name for gpus in (1, 2)]
    assert degrees == ["rtxpro6000/qwen3_32b_tp1", "rtxpro6000/qwen3_32b_tp2"]


def test_what_was_not_measured_is_flagged_with_how_often_and_how_far():
    cost = cost_of("sim_rtxpro6000")
    cost.iteration_s([(16_383, 16_384)] * 4 + [(0, 1024)], 5)
    assert cost.extrapolated() == {}
    inside = cost.iteration_s([(16_384, 16_385)], 1)
    beyond = cost.iteration_s([(65_536, 65_537)], 1)
    cost.iteration_s([(0, 4096)], 1)
    flagged = cost.extrapolated()
    assert flagged["attention"] == {"iterations": 2, "of": 4, "furthest": pytest.approx(4, rel=0.1)}
    assert flagged["projections"] == {"iterations": 1, "of": 4, "furthest": 2.0}
    kv = 65_536 * model_of("llama3_1_8b").kv_bytes_per_token
    assert beyond > inside and beyond > kv / 1.597e12, "no kernel reads faster than the memory"


def test_prompts_and_decodes_of_unequal_length():
    """Several prompts take less than one of as many tokens, and more than the longest. Decodes of unequal length take longer
    than equal ones only where that was measured."""
    even, uneven = [(1000, 1001)] * 16, [(100, 101)] * 15 + [(14_500, 14_501)]
    for hardware, slower in (("sim_rtxpro6000", True), ("sim_rtx4090", False)):
        cost = cost_of(hardware)
        several = cost.iteration_s([(0, 512)] * 4, 4)
        assert cost.iteration_s([(0, 512)], 4) < several < cost.iteration_s([(0, 2048)], 4)
        ratio = cost.iteration_s(uneven, 16) / cost.iteration_s(even, 16)
        assert (ratio > 1.01) is slower, hardware


def test_an_all_reduce_is_taken_from_its_table_twice_a_layer_and_once_more():
    terms = {**read_option("hardware", "sim_a100_80g")["terms"], "all_reduce": "link"}
    two = cost_of("sim_a100_80g", "llama2_70b", gpus=2)
    free = cost_of("sim_a100_80g", "llama2_70b", gpus=2, terms=terms, link_bw=1e30)
    reduced = two.iteration_s([(0, 2048)], 1) - free.iteration_s([(0, 2048)], 1)
    moved, devices = 2 * 2048 * 8192, ("2", "2")  # bytes of the hidden states; two devices of one machine
    times = {
        int(row["size"]): 1e-3 * float(row["time_stats.all_reduce.median"])
        for row in raw("vidur/network/a100_dgx/all_reduce.csv")
        if (row["num_workers"], row["devices_per_node"]) == devices
    }
    near = min(times, key=lambda size: abs(size - moved))
    assert reduced / (2 * 80 + 1) == pytest.approx(times[near], rel=0.1)
    with pytest.raises(ConfigError, match="not with 3"):
        cost_of("sim_a100_80g", "llama2_70b", gpus=3)


@pytest.mark.parametrize(("projections", "attention"), [("a100", "fitted"), ("roofline", "roofline")])
def test_an_all_reduce_over_a_link_takes_its_latency_and_its_bytes(projections, attention):
    terms = {"projections": projections, "attention": attention, "all_reduce": "link"}
    slow = machine_of("sim_a100_80g", gpus=4, link_latency_s=20e-6, link_bw=20e9, terms=terms)
    free = replace(slow, link_latency_s=0.0, link_bw=1e30)
    model, rows = model_of("opt_66b"), [(0, 2048)]
    taken, without = (simulated_cost(model, spec, 32).iteration_s(rows, 1) for spec in (slow, free))
    times = 2 * 64 + (projections == "a100")  # the tables' models reduce their embeddings too
    moved = 2048 * 9216 * 2  # bytes; each of four devices sends and receives 6 / 4 of them
    assert taken - without == pytest.approx(times * (20e-6 + 1.5 * moved / 20e9))


def fitted_error(fit: AttentionFit, decodes_only: bool) -> float:
    """The mean logarithmic error over cells of both cards, each of which weighs the same."""
    each = []
    for table in (one for one in MEASURED if one.name.endswith("/llama3_8b_tp1")):
        content, errors = read(f"{table.name}.json.gz")["attention"], []
        fitted = FittedAttention(table.shape, machine_of(f"sim_{table.name.partition('/')[0]}"), fit)
        cells = zip(itertools.product(*(content[name] for name in CELL)), content["us"], strict=True)
        for (chunk, kv, decodes, decode_kv), us in itertools.islice(cells, None, None, 7):
            if us is not None and not (decodes_only and chunk):
                runs = [(kv, kv + chunk)] if chunk else []
                batch = Batch.of([*runs, *[(decode_kv, decode_kv + 1)] * decodes], None)
                errors.append(abs(math.log(fitted.seconds(batch)[0] * 1e6 / us)))
        each.append(statistics.mean(errors))
    return statistics.mean(each)


@pytest.mark.parametrize("term", ["floor_s", "decode_floor_s", "compute", "serial", "memory"])
def test_no_other_term_of_the_fitted_attention_meets_measured_cells_better(term):
    """Of all tables the fit is the least; on a seventh of the cells of two, nothing a third away is better."""
    alone = term in ("decode_floor_s", "memory")
    best = fitted_error(FIT, alone)
    assert best < (0.15 if alone else 0.35)
    assert all(fitted_error(FIT._replace(**{term: getattr(FIT, term) * by}), alone) > best for by in (0.67, 1.5))


@pytest.mark.parametrize(
    ("hardware", "model"), [("sim_a100_80g", "opt_13b"), ("sim_h100", "llama3_8b"), ("sim_rtxpro6000", "llama3_8b")]
)
def test_a_longer_context_and_a_chunk_beside_decodes_spare_nothing(hardware, model):
    """Of OPT-13B, whose every query head has KV of its own, 34 decodes took longer alone than with seven positions more."""
    cost, decodes = cost_of(hardware, model), [(1300, 1301)] * 34
    alone = cost.iteration_s(decodes, 34)
    for chunk in (2, 7, 64, 180, 1024):
        assert cost.iteration_s([*decodes, (700, 700 + chunk)], 34) >= alone
    costs = [cost.recompute_s(context) for context in range(32, 16_384, 320)]
    assert costs == sorted(costs) and costs[-1] > costs[0] > 0


@pytest.mark.parametrize(("decodes", "floor_ms"), [(1, 3.15), (64, 4.92), (128, 6.71)])
def test_a_decode_step_of_a_simulated_h200_is_near_what_reading_takes(decodes: int, floor_ms: float) -> None:
    """15.0 GB of weights and 128 KiB of KV a token at the data sheet's 4.8 TB/s, contexts of 1,024; we read at 88 % of it."""
    cost = simulated_cost(model_of("llama3_8b"), machine_of("sim_h200"), 32)
    taken_ms = 1e3 * cost.iteration_s([(1023, 1024)] * decodes, decodes)
    assert floor_ms < taken_ms < 1.2 * floor_ms


@pytest.mark.parametrize(
    ("hardware", "model", "gpus"),
    [
        ("sim_h100", "llama3_8b", 1),
        ("sim_h100", "llama2_70b", 4),
        ("sim_h100", "gemma2_27b_it", 1),
        ("sim_rtx4090", "llama3_8b", 1),
    ],
)
def test_the_iterations_that_follow_take_to_the_bit_what_each_alone_does(hardware: str, model: str, gpus: int) -> None:
    cost, alone = (cost_of(hardware, model, gpus=gpus) for _ in range(2))
    most = cost._kernels.most_tokens
    for runs, beside in (
        ([], Decodes(3, 700 + 13 + 4090, 4090)),
        ([(32, 64)], Decodes(1, 700, 700)),
        ([(5, 6)] * (most + 1), NO_DECODES),
    ):
        sampled = len(runs) + beside.requests
        following = cost.following_s(runs, sampled, beside, 59)
        assert (following is None) == (sampled > most or hardware == "sim_rtx4090" or model == "gemma2_27b_it")
        for further, seconds in enumerate(() if following is None else following, start=1):
            later = [(start + further * (stop - start), stop + further * (stop - start)) for start, stop in runs]
            decodes = Decodes(beside.requests, beside.before + further * beside.requests, beside.longest + further)
            assert seconds == alone.iteration_s(later, sampled, decodes)
            cost.ran(1)
    cost.iteration_s(runs, most + 1)
    alone.iteration_s(runs, most + 1)
    assert cost.extrapolated() == alone.extrapolated() != {}, "who counts iterations counts these too"


def test_batches_are_padded_to_the_sizes_that_vllm_captures_and_an_iteration_with_a_prompt_has_graphs_in_pieces():
    captured = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    for tokens in range(1, 513):
        assert graph_size(tokens) == next(size for size in captured if size >= tokens)
    assert graph_size(513) == 513
    plain = cost_of("sim_rtxpro6000")
    captured = MeasuredCost(plain.model, replace(plain.hardware, graph_sizes=True), 32)
    decodes = [(100, 101)] * 8
    assert captured.iteration_s(decodes, 8) == plain.iteration_s(decodes, 8)  # 8 is a size that was captured
    prompt = [*decodes, (0, 1016)]  # and 1,024 is none
    assert captured.iteration_s(prompt, 9) == pytest.approx(plain.iteration_s(prompt, 9) + 2e-3)
