from __future__ import annotations

import csv

import pytest

from analysis.load import paper_throughput
from analysis.sweep import open_source
from pensieve.errors import MissingSeries
from tests.analysis.sweeps import answered, fill

AXIS = "workload.relative_rate"
TWO = {"pensieve": 3.0, "stateless": 2.0}
CAPACITY = {"pensieve": 3.0, "stateless": 2.0, "prefix_cache": 2.5}
LIMIT = 120.0  # OPT-13B on ShareGPT: 1.36 times vLLM at this latency


def swept(store, capacity=CAPACITY, seeds=range(5), loads=("1.0", "2.0", "4.0", "6.0"), **columns):
    """Latency grows with the load as a system's capacity says; what is achieved is half the load."""

    def metrics(at, seed):
        load, most = float(at[AXIS]), capacity[at["baseline"]] * (1 + seed / 100)
        return {
            "throughput_req_s": load / 2,
            "normalized_latency_ms_p90": 100.0 * load / most,
            "normalized_latency_ms_mean": 80.0 * load / most,
        }

    given = {"model": "opt_13b", "workload": "sharegpt", "hardware": "sim_a100_80g", "device": "sim_a100_80g"}
    axes = {AXIS: list(loads), "baseline": list(capacity)}
    source = fill(
        store, axes, lambda at, seed: [answered("a", 1, 5.0)], metrics, seeds=seeds,
        **{**given, "simulated": True, "device_count": 1, **columns},
    )  # fmt: skip
    for job in source.jobs:
        config = job.last.config
        store.set_trial(job.last.id, config={**config, "cache": {"name": "paper", "gpu": "40GB", "cpu": "220GB"}})
    return type(source)(store, source.sweep)


def rows(drawing):
    with drawing.csv.open(newline="") as file:
        return {(row["baseline"], row["statistic"]): row for row in csv.DictReader(file)}


def test_each_system_at_the_papers_latency_with_ratio_and_difference(store, tmp_path):
    [drawing] = paper_throughput.draw(swept(store), tmp_path)
    found = rows(drawing)
    for name, most in CAPACITY.items():
        for statistic, at in (("p90", 100.0), ("mean", 80.0)):
            load = LIMIT / at * most * 1.02  # of the middle seed
            assert float(found[name, statistic]["requests_per_s"]) == pytest.approx(load / 2)
    ours = found["pensieve", "p90"]
    assert float(ours["over_stateless"]) == pytest.approx(1.5)
    assert float(ours["ratio_ci_low"]) == pytest.approx(1.5)
    assert (float(ours["paper"]), float(ours["difference_pct"])) == (1.36, pytest.approx(100 * (1.5 / 1.36 - 1)))
    assert found["prefix_cache", "p90"]["paper"] == ""  # the paper has no ratio of it
    line = next(line for line in drawing.table if (line["system"], line["latency"]) == ("pensieve", "p90"))
    assert (line["the paper\nover vLLM"], line["difference"]) == ("1.36", "+10 %")
    assert "Simulated." in drawing.caption and "docs/paper.md" not in drawing.caption
    assert {line["seeds that\nreached it"] for line in drawing.table} == {"5 of 5"}
    assert "may be of different seeds" not in drawing.caption


def test_swapped_systems_swap_their_numbers_and_a_large_difference_is_said(store, tmp_path):
    swapped = {"pensieve": 2.0, "stateless": 3.0}
    [drawing] = paper_throughput.draw(swept(store, swapped), tmp_path)
    assert float(rows(drawing)["pensieve", "p90"]["over_stateless"]) == pytest.approx(2 / 3)
    assert "wants an explanation (docs/paper.md)" in drawing.caption


def test_a_system_that_stays_within_the_latency_has_no_number(store, tmp_path):
    [drawing] = paper_throughput.draw(swept(store, {"pensieve": 100.0, "stateless": 2.0}), tmp_path)
    ours = rows(drawing)["pensieve", "p90"]
    assert (ours["requests_per_s"], ours["over_stateless"], ours["difference_pct"]) == ("", "", "")


@pytest.mark.parametrize("changed", [{"model": "llama3_8b"}, {"workload": "chat"}, {"device_count": 2}])
def test_it_is_for_what_the_paper_ran(store, changed):
    assert not paper_throughput.applies(swept(store, seeds=(0,), **changed))


def test_conversations_that_the_context_cuts_are_said_first(store, tmp_path):
    cut = {"conversations": 10, "conversations_cut_by_context": 3}
    [drawing] = paper_throughput.draw(swept(store, TWO, seeds=(0,), engine={"workload": cut}), tmp_path)
    assert "cuts the load: 3 of 10 conversations end early. Choose" in drawing.caption
    assert drawing.caption.index("cuts the load") < drawing.caption.index("Simulated.")


def test_sweeps_with_loads_of_each_systems_own_are_read_as_one(store, tmp_path):
    """The same numbers as from one sweep with all loads, where each was run around its crossing."""
    [whole] = paper_throughput.draw(swept(store, TWO, seeds=(0, 1)), tmp_path / "whole")
    one = swept(store, {"pensieve": 3.0}, seeds=(0, 1), loads=["2.0", "4.0", "6.0"], command="one")
    two = swept(store, {"stateless": 2.0}, seeds=(0, 1), loads=["2.0", "4.0"], command="two")
    with pytest.raises(MissingSeries, match="none of vllm"):
        list(paper_throughput.plots(one))
    source = open_source(store, one.sweep.id, also=[two.sweep.id])
    assert len(source.jobs) == len(one.jobs) + len(two.jobs) == source.sweep.n_expected
    [drawing] = paper_throughput.draw(source, tmp_path / "both")
    every, both = rows(whole), rows(drawing)
    assert set(both) == {(name, statistic) for name in ("pensieve", "stateless") for statistic in ("p90", "mean")}
    for key, row in both.items():
        for column in ("requests_per_s", "n_seeds", "over_stateless", "difference_pct"):
            assert row[column] == every[key][column]
    assert "stateless (workload.relative_rate=6.0)" in drawing.caption
    assert len(open_source(store, one.sweep.id, also=[one.sweep.id]).jobs) == len(one.jobs), "a trial counts once"


def test_seeds_that_did_not_reach_the_latency_are_counted_and_in_no_ratio(store, tmp_path):
    """Of two seeds the second is five times as fast here, and within the limit at all loads."""
    source = swept(store, TWO, seeds=(0, 400))
    [drawing] = paper_throughput.draw(source, tmp_path)
    line = next(line for line in drawing.table if (line["system"], line["latency"]) == ("pensieve", "p90"))
    other = next(line for line in drawing.table if (line["system"], line["latency"]) == ("stateless", "p90"))
    assert (line["seeds that\nreached it"], other["seeds that\nreached it"]) == ("1 of 2", "1 of 2")
    assert float(rows(drawing)["pensieve", "p90"]["over_stateless"]) == pytest.approx(1.5)
    assert "may be of different seeds" in drawing.caption
