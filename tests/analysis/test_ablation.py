from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml

from analysis import caches
from analysis.registry import FIGURES
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from tests.analysis.sweeps import answered, fill
from tests.results.trials import MEMORY

CONF = Path(__file__).resolve().parents[2] / "conf" / "experiment" / "paper"
KNOWN = {one.name: one for one in caches.ABLATIONS}
GOOD, BAD = (60, 30, 10.0), (20, 10, 25.0)  # GPU hit, CPU hit, TTFT


def swept(store, name, values, baselines=("pensieve",), metrics=None):
    """values: value of the axis (or baseline) -> what its trials came to."""
    axis = KNOWN[name].axis

    def found(at):
        return values[at[axis] if axis else at["baseline"]]

    def turns(at, seed):
        gpu, cpu, ttft = found(at)
        return [
            answered(
                s,
                number,
                ttft,
                history=100 * (number - 1),
                gpu=gpu * (number - 1),
                cpu=cpu * (number - 1),
                latency_ms=4 * ttft,
            )
            for s in "ab"
            for number in (1, 2)
        ]

    def measured(at, seed):
        ttft = found(at)[2]
        return {
            "throughput_output_tok_s": 1e3 / ttft,
            "h2d_bytes_per_token": 1e6 * ttft,
            "d2h_bytes_per_token": 2e6 * ttft,
        }

    axes = {axis: list(values), "baseline": list(baselines)} if axis else {"baseline": list(values)}
    return fill(store, axes, turns, metrics or measured, summary=True)


VALUES = {
    "ablation_eviction": ("lru", "fifo"),
    "ablation_scheduler": ("unified", "split"),
    "ablation_chunk": ("8", "128"),
    "ablation_swap_out": ("0.0", "0.25"),
    "ablation_cpu_size": ("0 tokens", "768 tokens"),
    "ablation_gpu_cache": ("pensieve", "gpu_only"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_swapping_two_values_in_the_database_swaps_the_drawn_data(name, drawn, tmp_path):
    one, other = VALUES[name]

    def picture(values):
        source = swept(ResultsStore(MEMORY), name, values)
        if name == "ablation_cpu_size":  # drawn as the engine had it
            for job in source.jobs:
                source.store.set_trial(job.last.id, cpu_tokens=int(job.last.config["cache"]["cpu"].split()[0]))
            source = Source(source.store, source.sweep)
        [drawing] = FIGURES[name].draw(source, tmp_path)
        with drawing.csv.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return drawn[name], rows

    straight, rows = picture({one: GOOD, other: BAD})
    assert not straight.clipped
    swapped, rows_swapped = picture({one: BAD, other: GOOD})
    top, bottom = [tick.get_text() for tick in straight.figure.axes[0].get_yticklabels()]
    widths = [
        {
            (str(bar.get_gid()), round(bar.get_x(), 6)): round(bar.get_width(), 6)
            for axes in shown.figure.axes
            for bar in axes.patches
        }
        for shown in (straight, swapped)
    ]
    measures = [measure.name for measure in KNOWN[name].measures if measure.name != "history"]
    for measure in measures:
        first, second = (widths[0][f"{label}/{measure}", 0.0] for label in (top, bottom))
        assert (first, second) == tuple(widths[1][f"{label}/{measure}", 0.0] for label in (bottom, top))
        assert first != second
    if caches.HITS in KNOWN[name].measures:
        assert widths[0][f"{top}/GPU hit", 0.0] == widths[1][f"{bottom}/GPU hit", 0.0] == 60.0
        assert rows[0]["gpu_hit_pct"] == rows_swapped[1]["gpu_hit_pct"] == "60.0"


def test_every_overlay_of_an_ablation_has_its_figure_and_its_axis():
    overlays = {path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("ablation_*.yaml")}
    assert overlays.keys() == KNOWN.keys()
    assert set(KNOWN) <= set(FIGURES)
    for name, overlay in overlays.items():
        axes = overlay["hydra"]["sweeper"]["params"]
        assert KNOWN[name].axis is None or KNOWN[name].axis in axes
        assert "pensieve" in axes["baseline"]


def test_bytes_copied_are_both_ways(store, drawn, tmp_path):
    FIGURES["ablation_chunk"].draw(swept(store, "ablation_chunk", {"8": GOOD, "32": BAD}), tmp_path)
    [bar] = [
        bar
        for axes in drawn["ablation_chunk"].figure.axes
        for bar in axes.patches
        if bar.get_gid() == "8 tokens/copied_mb_per_token"
    ]
    assert bar.get_width() == pytest.approx(30.0)  # 10 in, 20 out


def test_a_value_that_records_no_measure_is_missing(store, tmp_path):
    source = swept(
        store, "ablation_chunk", {"8": GOOD, "32": BAD}, metrics=lambda at, seed: {"h2d_bytes_per_token": 1.0}
    )
    for job in source.jobs:
        job.metrics.pop(("d2h_bytes_per_token", ""), None)
    with pytest.raises(MissingSeries, match=r"copied_mb_per_token of pensieve with cache.chunk_tokens=8; run"):
        FIGURES["ablation_chunk"].draw(source, tmp_path)


def test_several_baselines_are_told_apart(store, drawn, tmp_path):
    values = {"lru": GOOD, "fifo": BAD}
    FIGURES["ablation_eviction"].draw(swept(store, "ablation_eviction", values, ("pensieve", "stateless")), tmp_path)
    ticks = [tick.get_text() for tick in drawn["ablation_eviction"].figure.axes[0].get_yticklabels()]
    assert ticks == ["pensieve, lru", "pensieve, fifo", "stateless, lru", "stateless, fifo"]


def test_the_bound_stands_beside_the_hits_of_each_policy(store, drawn, tmp_path):
    def metrics(at, seed):
        return {"bound_hit_rate": {"lru": 0.9, "fifo": 0.8}[at["eviction"]] + 0.02 * seed}

    source = swept(store, "ablation_eviction", {"lru": GOOD, "fifo": BAD}, metrics=metrics)
    [drawing] = FIGURES["ablation_eviction"].draw(source, tmp_path)
    lines = drawn["ablation_eviction"].lines
    assert lines["lru/bound"] == [(pytest.approx(91.0), 0.0)]
    assert lines["fifo/bound"] == [(pytest.approx(81.0), 1.0)]
    assert not drawn["ablation_eviction"].clipped
    assert "offline bound" in drawn["ablation_eviction"].texts and "offline bound" in drawn["ablation_eviction"].caption
    with drawing.csv.open(newline="") as file:
        assert [float(row["bound_hit_pct"]) for row in csv.DictReader(file)] == pytest.approx([91.0, 81.0])


def test_without_a_bound_the_ablation_has_none(store, drawn, tmp_path):
    FIGURES["ablation_eviction"].draw(swept(store, "ablation_eviction", {"lru": GOOD, "fifo": BAD}), tmp_path)
    assert "offline bound" not in drawn["ablation_eviction"].texts
    assert not any(gid.endswith("/bound") for gid in drawn["ablation_eviction"].lines)


def test_the_caption_says_by_how_much_the_papers_policy_trails(store, drawn, tmp_path):
    """Of 100 tokens of history 30 are recomputed by the paper's, 10 by lru, 70 by fifo: 20 points more and 40 less."""
    values = {"retention_value": (40, 30, 10.0), "lru": (60, 30, 10.0), "fifo": (20, 10, 25.0)}
    [drawing] = FIGURES["ablation_eviction"].draw(swept(store, "ablation_eviction", values), tmp_path)
    said = "History recomputed, retention_value: 20.0 points higher than lru, 40.0 points lower than fifo"
    assert said in drawing.caption
    [drawing] = FIGURES["ablation_eviction"].draw(
        swept(ResultsStore(MEMORY), "ablation_eviction", {"lru": GOOD, "fifo": BAD}), tmp_path
    )
    assert "History recomputed" not in drawing.caption


def test_where_nothing_is_recomputed_the_axis_begins_at_zero(store, drawn, tmp_path):
    values = dict.fromkeys(("retention_value", "lru"), (70, 30, 10.0))
    [drawing] = FIGURES["ablation_eviction"].draw(swept(store, "ablation_eviction", values), tmp_path)
    assert drawn["ablation_eviction"].figure.axes[2].get_xlim() == (0.0, 1.0)
    assert "not told apart from lru (0.0 points" in drawing.caption
