from __future__ import annotations

import csv
import json
from collections.abc import Mapping

import pytest
from sqlalchemy import text

from analysis import figures, prefix, style
from analysis.prefix import (
    batch_size_confound,
    cache_architecture,
    cascade,
    invalidation_cost,
    invalidation_table,
    prefix_overview,
    ttft_vs_recomputed,
)
from analysis.sweep import open_source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from tests.analysis.prefixes import CACHED, FAST, NOTHING, SLOW, colours, marks, prefix_sweep, swapped
from tests.results.trials import MEMORY

BATCHES = {"scheduler.max_batch_tokens": ("64", "512")}
STRAIGHT = {"pensieve": FAST, "gpu_only": FAST, "stateless": SLOW}
SWAPPED = {"pensieve": SLOW, "gpu_only": FAST, "stateless": FAST}
FIGURES = (invalidation_cost, ttft_vs_recomputed, cache_architecture, cascade, prefix_overview, invalidation_table)


def drawings(module, drawn, tmp_path, costs, **sweep) -> dict[str, dict]:
    """File stem -> marks, drawn from a database of its own; of a table its cells, by line and head."""
    drawn.clear()
    cached = {name: NOTHING if cost is SLOW else CACHED for name, cost in costs.items()}
    made = module.draw(prefix_sweep(ResultsStore(MEMORY), costs, cached=cached, **sweep), tmp_path)
    cells = {
        one.text.stem: {f"{row}/{head}": cell for row, line in enumerate(one.table) for head, cell in line.items()}
        for one in made
        if one.png is None
    }
    return {**cells, **{stem: marks(found.figure) for stem, found in drawn.items()}}


def rows_of(tmp_path, stem: str) -> list[Mapping[str, str]]:
    with (tmp_path / f"{stem}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("module", FIGURES, ids=lambda module: module.name)
def test_swapping_two_baselines_in_the_database_swaps_the_drawn_data(module, drawn, tmp_path):
    straight = drawings(module, drawn, tmp_path, STRAIGHT)
    changed = drawings(module, drawn, tmp_path, SWAPPED)
    assert straight.keys() == changed.keys()
    for stem, before in straight.items():
        after = changed[stem]
        if module is cascade:  # a part of the picture a baseline
            before, after = ({key.partition(":")[2]: mark for key, mark in one.items()} for one in (before, after))
        assert before != after
        if module is invalidation_table:  # its marks are named by line: 0 pensieve, 1 gpu_only, 2 stateless
            names = {key for key in before if key.endswith("engine")}
            expected = swapped(before, "0/", "2/") | {name: before[name] for name in names}
            assert after == expected
        else:
            after.pop(f"0:line/{prefix.ALL}", None), before.pop(f"0:line/{prefix.ALL}", None)
            assert after == swapped(before, "pensieve", "stateless")


@pytest.mark.parametrize("module", [*FIGURES[:3], prefix_overview, batch_size_confound], ids=lambda module: module.name)
def test_a_baseline_has_its_colour_everywhere(module, drawn, tmp_path):
    drawings(module, drawn, tmp_path, STRAIGHT, extra=BATCHES if module is batch_size_confound else None)
    for found in drawn.values():
        for gid, ink in colours(found.figure).items():
            name = gid.split("/")[0]
            if name in STRAIGHT and module is not ttft_vs_recomputed:
                assert ink == style.colour(name).upper(), gid
        if module is ttft_vs_recomputed:
            inks = {
                line.get_gid(): line.get_markeredgecolor() for axes in found.figure.axes for line in axes.get_lines()
            }
            assert all(inks[name] == style.colour(name) for name in STRAIGHT)


def test_the_cost_of_a_miss_is_drawn_for_every_split(drawn, tmp_path):
    [(stem, found)] = drawings(invalidation_cost, drawn, tmp_path, {"pensieve": FAST}, seeds=range(5)).items()
    # medians over rounds at 1.0, 1.1, 1.2 times, half of them 2 ms later, seeds at 1 to 1.04
    assert found["0:pensieve/512/256/hit"][1] == pytest.approx(12.0, abs=0.6)
    assert found["0:pensieve/512/256/miss"][1] == pytest.approx(34.0, abs=1.2)
    assert found["1:pensieve/256/512/miss"][1] == pytest.approx(67.0, abs=2.4)
    rows = rows_of(tmp_path, stem)
    assert [(row["blocks"], row["query"]) for row in rows] == [
        ("512/256", "hit"), ("512/256", "miss"), ("256/512", "hit"), ("256/512", "miss"),
    ]  # fmt: skip
    assert rows[1]["n"] == "30" and rows[1]["n_seeds"] == "5"
    assert float(rows[1]["ci_low"]) <= float(rows[1]["ttft_ms_median"]) <= float(rows[1]["ci_high"])
    assert float(rows[1]["degradation_pct"]) == pytest.approx(183.3, abs=1)
    assert any(text.startswith("miss") and "(+184 %)" in text for text in drawn[stem].texts)


def test_the_line_goes_through_all_queries_and_the_csv_has_both(drawn, tmp_path):
    [(stem, found)] = drawings(
        ttft_vs_recomputed, drawn, tmp_path, STRAIGHT, blocks=("512/256",), seeds=range(5)
    ).items()
    rows = rows_of(tmp_path, stem)
    lines = {row["baseline"]: row for row in rows if row["kind"] == "line"}
    points = [row for row in rows if row["kind"] == "point"]
    assert set(lines) == {"all", *STRAIGHT}
    assert len(points) == 3 * 2 * 30  # baselines, hit and miss, rounds and streams and seeds: 30
    for axis in ("recomputed_tokens", "ttft_ms"):
        assert all(row[axis] for row in points)
    drawn_line = found["0:line/all"]
    slope, intercept = (float(lines["all"][name]) for name in ("slope_ms_per_token", "intercept_ms"))
    for x, y in drawn_line:
        assert y == pytest.approx(intercept + slope * x)
    assert float(lines["all"]["slope_ci_low"]) <= slope <= float(lines["all"]["slope_ci_high"])
    assert 0 < float(lines["all"]["r_squared"]) < 1
    assert any("ms per 1,000 tokens" in text and "R²" in text for text in drawn[stem].texts)


def test_an_engine_that_does_not_say_what_it_recomputed_cannot_be_regressed(store, tmp_path):
    source = prefix_sweep(store, {"pensieve": FAST, "vllm_http": FAST})
    with store.database.writing() as connection:
        ids = ",".join(str(trial.id) for trial in source.trials if trial.baseline == "vllm_http")
        connection.exec_driver_sql(f"UPDATE turn SET recomputed_tokens = NULL WHERE trial_id IN ({ids})")
    with pytest.raises(MissingSeries, match=r"vllm_http does not report.*--baselines pensieve"):
        ttft_vs_recomputed.draw(source, tmp_path)
    assert ttft_vs_recomputed.draw(open_source(store, wanted=["pensieve"]), tmp_path)


def test_an_engine_of_ones_own_joins_the_degradation_by_its_name(drawn, tmp_path):
    [found] = drawings(cache_architecture, drawn, tmp_path, {"pensieve": FAST, "sglang": SLOW}).values()
    assert found["0:pensieve/512/256"][1] == pytest.approx(183.3, abs=1)
    left, width = found["0:sglang/512/256"]
    assert left + width == pytest.approx(-49.0, abs=1.0)  # a miss costs half: nothing was found of the hit either


def test_the_cascade_stacks_what_was_cached_recomputed_and_new(drawn, tmp_path):
    found = drawings(cascade, drawn, tmp_path, STRAIGHT)
    assert set(found) == {"cascade-workload.blocks-512_256", "cascade-workload.blocks-256_512"}
    one = found["cascade-workload.blocks-512_256"]
    assert one["0:pensieve/warmup/new"] == (0.0, 768.0)
    assert one["0:pensieve/miss/recomputed"] == (0.0, 256.0)
    assert one["0:pensieve/miss/new"] == (256.0, 20.0)
    assert one["0:pensieve/rewarm_miss/recomputed"] == (0.0, 767.0)
    assert one["0:pensieve/rewarm_hit/GPU hit"] == (0.0, 767.0)
    assert one["2:stateless/rewarm_hit/recomputed"] == (0.0, 767.0)
    rows = rows_of(tmp_path, "cascade-workload.blocks-512_256")
    again = next(row for row in rows if (row["baseline"], row["step"]) == ("pensieve", "rewarm_miss"))
    assert float(again["ttft_ms_median"]) == pytest.approx(66.0, abs=1.0)


def test_what_the_cascade_calls_cached_may_come_from_disk(drawn, store, tmp_path):
    """The same history, found on disk in place of the GPU, is as much cached."""
    source = prefix_sweep(store, {"pensieve": FAST}, blocks=("512/256",))
    with store.database.writing() as connection:
        connection.execute(text("UPDATE turn SET disk_hit_tokens = gpu_hit_tokens, gpu_hit_tokens = 0"))
    cascade.draw(source, tmp_path)
    [stem] = [name for name in drawn if name.startswith("cascade")]
    cached = {row["step"]: float(row["cached_tokens"]) for row in rows_of(tmp_path, stem)}
    assert cached["rewarm_hit"] == 767.0


def test_an_engine_without_counts_is_named_in_the_cascade(drawn, store, tmp_path):
    source = prefix_sweep(store, {"pensieve": FAST, "vllm_http": FAST}, blocks=("512/256",))
    with store.database.writing() as connection:
        ids = ",".join(str(trial.id) for trial in source.trials if trial.baseline == "vllm_http")
        connection.exec_driver_sql(f"UPDATE turn SET gpu_hit_tokens = NULL WHERE trial_id IN ({ids})")
    cascade.draw(source, tmp_path)
    [found] = drawn.values()
    assert not any("vllm_http/miss" in key for key in marks(found.figure))
    assert sum(text.startswith("not reported") for text in found.texts) == len(prefix.STAGES)


def test_the_overview_has_first_token_with_overhead_decoding_and_warmup(drawn, tmp_path):
    found = drawings(prefix_overview, drawn, tmp_path, {"pensieve": FAST}, blocks=("512/256",))
    [one] = found.values()
    assert set(one) >= {f"0:pensieve/{name}" for name in ("hit_ttft_ms", "miss_ttft_ms", "stream_overhead_ms")}
    assert one["0:pensieve/stream_overhead_ms"][1] == pytest.approx(2.0, abs=1e-6)
    for kind, rewarm in (("hit", 11.0), ("miss", 66.0)):
        assert one[f"1:pensieve/throughput_{kind}_tok_s"][1] == pytest.approx(500 / 1.1, rel=0.02)
        assert one[f"2:pensieve/rewarm_{kind}_ms"][1] == pytest.approx(rewarm, rel=0.02)


def test_the_table_says_the_same_as_the_overview(drawn, tmp_path, capsys, monkeypatch):
    for module in (prefix_overview, invalidation_table):
        drawings(module, drawn, tmp_path, STRAIGHT, blocks=("512/256",))
    key = ("baseline", "quantity", "value", "ci_low", "ci_high", "n")
    first, second = (
        [[row[name] for name in key] for row in rows_of(tmp_path, stem)]
        for stem in ("prefix_overview", "invalidation_table")
    )
    assert first == second and len(first) == 23  # stateless has no degradation


def test_the_table_is_printed_before_its_files_are_named(tmp_path, monkeypatch, capsys, drawn):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    from pensieve.lab.results.store import open_store

    prefix_sweep(open_store(tmp_path), STRAIGHT, blocks=("512/256",))
    assert figures.main(["invalidation_table"]) == 0
    printed = capsys.readouterr().out
    for word in ("pensieve", "gpu_only", "stateless", "dation (%)", "tokens/s", "n = 24 conversations, 2 seeds"):
        assert word in " ".join(printed.split()), word
    assert printed.index("stateless") < printed.index("invalidation_table.md")


def test_batch_sizes_stand_in_order_and_the_effect_is_paired(drawn, tmp_path):
    extra = {"scheduler.max_batch_tokens": ("512", "64")}
    [(stem, found)] = drawings(
        batch_size_confound, drawn, tmp_path, STRAIGHT, blocks=("512/256",), extra=extra, seeds=range(5)
    ).items()
    assert [x for x, _ in found["0:pensieve"]] == [64.0, 512.0]
    rows = rows_of(tmp_path, stem)
    assert all(float(row["largest_over_smallest"]) == pytest.approx(1.0) for row in rows)
    assert "512 over 64" in drawn[stem].caption and "pensieve 1.00 [1.00, 1.00]" in drawn[stem].caption


def test_swapping_baselines_swaps_the_lines_over_the_batch(drawn, tmp_path):
    extra = {"extra": BATCHES, "blocks": ("512/256",)}
    [before] = drawings(batch_size_confound, drawn, tmp_path, STRAIGHT, **extra).values()
    [after] = drawings(batch_size_confound, drawn, tmp_path, SWAPPED, **extra).values()
    assert after == swapped(before, "pensieve", "stateless") != before


def test_one_batch_size_is_not_enough_and_the_command_is_named(store):
    source = prefix_sweep(store, {"pensieve": FAST})
    assert not batch_size_confound.applies(source)
    assert "experiment=peers/prefix_invalidation_batch" in batch_size_confound.missing(source)


@pytest.mark.parametrize("module", [*FIGURES, batch_size_confound], ids=lambda module: module.name)
def test_a_missing_baseline_names_the_command_that_makes_it(module, store, tmp_path):
    prefix_sweep(store, {"pensieve": FAST}, extra=BATCHES, command="run.py experiment=peers/prefix_invalidation -m")
    with pytest.raises(
        MissingSeries, match=r"no completed trial of baseline vllm.*`python runners/run.py baseline=vllm -m`"
    ):
        module.draw(open_source(store, wanted=["pensieve", "vllm"]), tmp_path)


def test_a_figure_writes_four_files(store, tmp_path):
    [drawing] = cache_architecture.draw(prefix_sweep(store, {"pensieve": FAST}, blocks=("512/256",)), tmp_path)
    assert drawing.png.read_bytes().startswith(b"\x89PNG") and drawing.pdf.read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("module", FIGURES, ids=lambda module: module.name)
def test_every_sidecar_says_what_the_figure_stands_on(module, drawn, store, tmp_path):
    source = prefix_sweep(store, {"pensieve": FAST, "stateless": SLOW}, blocks=("512/256",))
    [drawing] = module.draw(source, tmp_path)
    said = json.loads(drawing.sidecar.read_text())
    assert said["trials"] == sorted(trial.id for trial in source.trials)
    assert (said["seeds"], said["conversations"], said["cache_state"]) == ([0, 1], 24, ["cold"])


def test_an_engine_that_keeps_nothing_has_no_degradation(store, drawn, tmp_path):
    """A miss is the shorter prompt: without a cache it took less than a hit, and that read as "-68 %"."""
    cached = {"pensieve": CACHED, "stateless": NOTHING}
    source = prefix_sweep(store, {"pensieve": FAST, "stateless": SLOW}, blocks=("512/256",), cached=cached)
    invalidation_cost.draw(source, tmp_path)
    texts = " ".join(text for one in drawn.values() for text in one.texts)
    assert "(no hits)" in texts and "+183 %" in texts and "−" not in texts
    [drawing] = invalidation_table.draw(source, tmp_path)
    cells = {line["engine"]: line["degra-\ndation (%)"] for line in drawing.table}
    assert cells["stateless"] == "–" and cells["pensieve"].startswith("183")
