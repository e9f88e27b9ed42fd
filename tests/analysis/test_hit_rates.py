from __future__ import annotations

import csv

import pytest

from analysis.caches import hit_rates, shares, short
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import sweep_table
from tests.analysis.sweeps import answered, fill, flat
from tests.results.trials import MEMORY, turn

FOUND = {"pensieve": (50, 30), "gpu_only": (60, 0), "stateless": (0, 0)}
SIZES = {"2048 tokens": 0.5, "4096 tokens": 1.0}


def cached(store, found, sizes=(), metrics=lambda at, seed: {}):
    def turns(at, seed):
        gpu, cpu = found[at["baseline"]]
        share = SIZES[at["cache.gpu"]] if sizes else 1.0
        first = answered("a", 1, 5.0)
        return [first, *(answered(s, 2, 5.0, history=100, gpu=int(gpu * share), cpu=int(cpu * share)) for s in "ab")]

    axes = {"cache.gpu": list(sizes)} if sizes else {}
    return fill(store, {**axes, "baseline": list(found)}, turns, metrics, summary=True)


def test_the_parts_of_history_are_stacked_to_a_hundred(store, drawn, tmp_path):
    hit_rates.draw(cached(store, FOUND), tmp_path)
    bars = drawn["hit_rates"].bars
    assert bars["pensieve/GPU hit"] == [(0.0, 50.0)]
    assert bars["pensieve/CPU hit"] == [(50.0, 30.0)]
    assert bars["pensieve/recomputed"] == [(80.0, 20.0)]
    assert bars["stateless/recomputed"] == [(0.0, 100.0)]
    assert drawn["hit_rates"].ticks == ["pensieve", "gpu_only", "stateless"]


def test_stateless_keeps_nothing_so_its_zero_has_no_interval(store):
    def turns(at, seed):
        return [answered(name, 2, 5.0, history=100, gpu=0) for name in "abcdef"]

    source = fill(store, {"baseline": ["gpu_only", "stateless"]}, turns, seeds=range(5), summary=True)
    [panel] = source.panels()
    other, stateless = (shares(source, cell) for name in panel.baselines for cell in panel.of(name))
    assert other.hit.ci_high > 0
    assert (stateless.hit.value, stateless.hit.ci_high, stateless.gpu.ci_high) == (0, None, None)


def test_a_sweep_over_the_size_gets_a_bar_a_size_from_the_smallest_on(store, drawn, tmp_path):
    source = cached(store, FOUND, sizes=["4096 tokens", "2048 tokens"])
    for job in source.jobs:
        store.set_trial(job.last.id, gpu_tokens=int(job.last.config["cache"]["gpu"].split()[0]))
    [drawing] = hit_rates.draw(Source(store, source.sweep), tmp_path)
    bars = drawn["hit_rates"].bars
    assert bars["pensieve/GPU hit"] == [(0.0, 25.0), (0.0, 50.0)]
    assert bars["pensieve/CPU hit"] == [(25.0, 15.0), (50.0, 30.0)]
    assert drawn["hit_rates"].ticks == ["2.0k", "4.1k"] * 3
    assert not drawn["hit_rates"].clipped
    assert [axes.get_title(loc="left") for axes in drawn["hit_rates"].figure.axes] == list(FOUND)
    with drawing.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["baseline"], row["cache.gpu"], row["gpu_hit_pct"]) for row in rows[:2]] == [
        ("pensieve", "2048 tokens", "25.0"),
        ("pensieve", "4096 tokens", "50.0"),
    ]


def test_no_interval_in_the_table_reaches_beyond_none_and_all(store, tmp_path):
    """Of six conversations, of which one finds 72 of 100 tokens and the others none, or one 28 and the others all."""

    def turns(at, seed):
        one, others = (72, 0) if at["baseline"] == "gpu_only" else (28, 100)
        return [answered(name, 2, 5.0, history=100, gpu=one if name == "a" else others) for name in "abcdef"]

    source = fill(store, {"baseline": ["gpu_only", "pensieve"]}, turns, seeds=(0,), summary=True)
    [drawing] = hit_rates.draw(source, tmp_path)
    with drawing.csv.open(newline="") as file:
        rows = {row["baseline"]: row for row in csv.DictReader(file)}
    for part in ("gpu", "hit"):
        assert 0.0 <= float(rows["gpu_only"][f"{part}_ci_low"]) < 12.0
        assert (
            0.0
            <= float(rows["pensieve"][f"{part}_ci_low"])
            < 88.0
            < float(rows["pensieve"][f"{part}_ci_high"])
            <= 100.0
        )
        assert 12.0 < float(rows["gpu_only"][f"{part}_ci_high"]) <= 100.0


def test_swapping_two_baselines_in_the_database_swaps_the_drawn_data(drawn, tmp_path):
    def picture(found):
        hit_rates.draw(cached(ResultsStore(MEMORY), found), tmp_path)
        return drawn["hit_rates"].bars

    straight = picture(FOUND)
    swapped = picture({**FOUND, "pensieve": FOUND["gpu_only"], "gpu_only": FOUND["pensieve"]})
    for part in ("GPU hit", "CPU hit", "recomputed"):
        assert straight[f"pensieve/{part}"] == swapped[f"gpu_only/{part}"]
        assert straight[f"gpu_only/{part}"] == swapped[f"pensieve/{part}"]
        assert straight[f"stateless/{part}"] == swapped[f"stateless/{part}"]
    assert straight["pensieve/CPU hit"] != straight["gpu_only/CPU hit"]


def test_the_offline_bound_joins_where_it_is_recorded(store, drawn, tmp_path):
    source = cached(store, {"pensieve": (50, 30)}, list(SIZES), lambda at, seed: {"bound_hit_rate": 0.9})
    hit_rates.draw(source, tmp_path)
    assert flat(drawn["hit_rates"].lines["pensieve/bound"]) == pytest.approx([0, 90.0, 1, 90.0])
    figure = drawn["hit_rates"].figure
    assert "offline bound" in [text.get_text() for text in figure.legends[0].get_texts()], (
        "in the key, where no bar lies under it"
    )
    assert not drawn["hit_rates"].clipped


def test_the_offline_bounds_of_baselines_are_not_joined(store, drawn, tmp_path):
    """There is nothing between two baselines that a line could pass through."""
    hit_rates.draw(cached(store, FOUND, metrics=lambda at, seed: {"bound_hit_rate": 0.9}), tmp_path)
    [bound] = [
        line for axes in drawn["hit_rates"].figure.axes for line in axes.get_lines() if line.get_gid() == "/bound"
    ]
    assert bound.get_linewidth() == 0
    assert list(bound.get_ydata()) == pytest.approx([90.0] * (len(FOUND) - 1))  # stateless stores nothing


def test_without_a_bound_the_key_has_none(store, drawn, tmp_path):
    hit_rates.draw(cached(store, FOUND), tmp_path)
    assert "offline bound" not in drawn["hit_rates"].texts


def test_an_engine_that_does_not_say_what_it_found_is_marked(store, drawn, tmp_path):
    def turns(at, seed):
        if at["baseline"] == "pensieve":
            return [answered("a", 2, 5.0, history=100, gpu=100)]
        return [turn("a", 2, 5.0)]

    hit_rates.draw(fill(store, {"baseline": ["pensieve", "vllm_http"]}, turns), tmp_path)
    assert "vllm_http/GPU hit" not in drawn["hit_rates"].bars
    assert "not reported" in drawn["hit_rates"].texts


def test_without_any_history_there_is_nothing_to_draw(store, tmp_path):
    source = fill(store, {"baseline": ["pensieve"]}, lambda at, seed: [answered("a", 1, 5.0)])
    with pytest.raises(MissingSeries, match=r"turn with history .* run `run.py -m`"):
        hit_rates.draw(source, tmp_path)


def test_sizes_are_short_enough_to_stand_under_a_bar():
    assert [short(n) for n in (768, 2560, 10_240, 152_576, 2_000_000)] == [
        "768",
        "2.6k",
        "10k",
        "153k",
        "2.0M",
    ]


def test_a_sweep_over_something_else_has_figures_of_its_own(store):
    axes = {"eviction": ["lru", "fifo"], "baseline": ["pensieve"]}
    source = fill(store, axes, lambda at, seed: [answered("a", 2, 5.0, history=10, gpu=5)], summary=True)
    assert not hit_rates.applies(source)


def test_what_came_from_disk_is_a_part_of_its_own(tmp_path):
    """By hand: of 100 tokens of history 30, 20 and 40 on GPU, CPU and disk; a sweep without any has no such part."""

    def turns(disk):
        return lambda at, seed: [
            answered(name, turn, 5.0, history=100 * (turn - 1), gpu=30 * (turn - 1), cpu=20 * (turn - 1),
                     disk_hit_tokens=disk * (turn - 1))
            for name in "abc" for turn in (1, 2)
        ]  # fmt: skip

    for disk in (40, 0):
        store = ResultsStore(MEMORY)
        source = fill(store, {"baseline": ["pensieve"]}, turns(disk), summary=True)
        [drawing] = hit_rates.draw(source, tmp_path / str(disk))
        with drawing.csv.open(newline="") as file:
            [row] = csv.DictReader(file)
        found = {column: float(value) for column, value in row.items() if column.endswith("hit_pct") and value}
        assert found == {"gpu_hit_pct": 30, "cpu_hit_pct": 20, **({"disk_hit_pct": 40} if disk else {})}
        assert float(row["recomputed_pct"]) == 50 - disk
        text = sweep_table(store, source.sweep.id).text()
        assert ("disk" in text and "40.0" in text) is bool(disk)
