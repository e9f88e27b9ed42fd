from __future__ import annotations

import pytest

from analysis.load import goodput
from analysis.sweep import open_source
from pensieve.lab.results.store import ResultsStore
from tests.analysis.sweeps import answered, fill, flat
from tests.results.trials import MEMORY

GOOD = {"1.0": 0.8, "4.0": 3.0}
BAD = {"1.0": 0.7, "4.0": 0.5}


def judged(store, goodputs, seeds=(0, 1)):
    def metrics(at, seed):
        rate = at["workload.request_rate"]
        return {"goodput_req_s": goodputs[at["baseline"]][rate] + 0.1 * seed, "throughput_req_s": float(rate) * 0.9}

    axes = {"workload.request_rate": list(GOOD), "baseline": list(goodputs)}
    return fill(store, axes, lambda at, seed: [answered("a", 1, 5.0)], metrics, seeds=seeds, slo={"slo.ttft_ms": "200"})


def test_goodput_stands_over_the_offered_rate_with_the_objective_in_the_small_print(store, drawn, tmp_path):
    goodput.draw(judged(store, {"pensieve": GOOD, "stateless": BAD}), tmp_path)
    lines = drawn["goodput"].lines
    assert not drawn["goodput"].clipped
    assert flat(lines["pensieve"]) == pytest.approx([1.0, 0.85, 4.0, 3.05])
    assert flat(lines["pensieve/all"]) == pytest.approx([1.0, 0.9, 4.0, 3.6])
    note = drawn["goodput"].caption
    assert "first token within 200 ms; dotted" in note
    assert "n = 2, no interval" in note
    assert not drawn["goodput"].intervals


def test_the_offered_rate_is_drawn_where_there_was_one(store, drawn, tmp_path):
    source = judged(store, {"pensieve": GOOD, "stateless": BAD})
    assert "offered" not in drawn_lines(source, drawn, tmp_path)
    for job in source.jobs:
        rate = float(job.last.config["workload"]["request_rate"])
        store.set_trial(job.last.id, engine={"workload": {**job.last.engine["workload"], "request_rate_per_s": rate}})
    assert flat(drawn_lines(open_source(store), drawn, tmp_path)["offered"]) == [1.0, 1.0, 4.0, 4.0]
    assert not drawn["goodput"].clipped


def drawn_lines(source, drawn, folder):
    goodput.draw(source, folder)
    return drawn["goodput"].lines


def test_five_seeds_give_an_interval(store, drawn, tmp_path):
    goodput.draw(judged(store, {"pensieve": GOOD}, seeds=range(5)), tmp_path)
    for (low, high), (_, value) in zip(
        drawn["goodput"].intervals["pensieve/interval"], drawn["goodput"].lines["pensieve"], strict=True
    ):
        assert low < value < high


def test_swapping_two_baselines_in_the_database_swaps_the_drawn_data(drawn, tmp_path):
    def picture(goodputs):
        goodput.draw(judged(ResultsStore(MEMORY), goodputs), tmp_path)
        return drawn["goodput"].lines

    straight = picture({"pensieve": GOOD, "stateless": BAD})
    swapped = picture({"pensieve": BAD, "stateless": GOOD})
    assert (straight["pensieve"], straight["stateless"]) == (swapped["stateless"], swapped["pensieve"])
    assert straight["pensieve"] != straight["stateless"]


def test_without_an_objective_it_does_not_apply(store):
    axes = {"workload.request_rate": ["1.0", "4.0"], "baseline": ["pensieve"]}
    assert not goodput.applies(fill(store, axes, lambda at, seed: [answered("a", 1, 5.0)], summary=True))
