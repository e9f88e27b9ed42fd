from __future__ import annotations

import csv

import pytest

from analysis import style
from analysis.load import throughput_latency
from analysis.sweep import open_source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from tests.analysis.sweeps import answered, fill, flat
from tests.results.trials import MEMORY

QUICK, SLOW = (10.0, 11.0, 40.0), (20.0, 30.0, 90.0)  # ms a token of three conversations
RATES = {"1.0": 0.9, "4.0": 2.5}


def loaded(
    store,
    per_token,
    metrics=lambda at, seed: {"throughput_req_s": RATES[at["workload.request_rate"]] + seed},
    **columns,
):
    def turns(at, seed):
        worse = float(at["workload.request_rate"])
        values = enumerate(per_token[at["baseline"]])
        return [answered(f"s{index}", 1, 5.0, tokens=4, latency_ms=4 * ms * worse) for index, ms in values]

    return fill(store, {"workload.request_rate": list(RATES), "baseline": list(per_token)}, turns, metrics, **columns)


def lines(figure, row):
    return {
        str(line.get_gid()): [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]
        for line in figure.axes[row].get_lines()
        if line.get_gid()
    }


def test_mean_and_p90_stand_over_the_achieved_rate(store, drawn, tmp_path):
    [drawing] = throughput_latency.draw(loaded(store, {"pensieve": QUICK, "stateless": SLOW}), tmp_path)
    figure = drawn["throughput_latency"].figure
    assert not drawn["throughput_latency"].clipped
    mean, p90 = lines(figure, 0), lines(figure, 1)
    assert flat(mean["pensieve"]) == pytest.approx([1.4, 61 / 3, 3.0, 4 * 61 / 3])  # rates: mean of seeds 0 and 1
    assert flat(p90["pensieve"]) == pytest.approx([1.4, 40.0, 3.0, 160.0])
    assert flat(p90["stateless"]) == pytest.approx([1.4, 90.0, 3.0, 360.0])
    assert "achieved rate (requests/s)" in drawn["throughput_latency"].texts
    with drawing.csv.open(newline="") as file:
        first = next(csv.DictReader(file))
    assert (first["workload.request_rate"], float(first["achieved_req_s"]), first["n"]) == ("1.0", 1.4, "6")


def test_what_was_achieved_stands_over_what_was_offered(store, drawn, tmp_path):
    source = loaded(store, {"pensieve": QUICK, "stateless": SLOW})
    assert "all offered" not in lines_of_last(throughput_latency.draw(source, tmp_path), drawn)
    for job in source.jobs:  # of two seeds, one is offered 0.2 a second more
        offered = float(job.last.config["workload"]["request_rate"]) + 0.2 * job.last.seed
        engine = {"workload": {**job.last.engine["workload"], "request_rate_per_s": offered}}
        store.set_trial(job.last.id, engine=engine)
    [drawing] = throughput_latency.draw(open_source(store), tmp_path)
    last = lines_of_last([drawing], drawn)
    assert not drawn["throughput_latency"].clipped
    assert flat(last["pensieve"]) == pytest.approx([1.1, 1.4, 4.1, 3.0])
    assert flat(last["all offered"]) == pytest.approx([0.0, 0.0, 4.1, 4.1])
    with drawing.csv.open(newline="") as file:
        assert float(next(csv.DictReader(file))["offered_req_s"]) == pytest.approx(1.1)
    assert "before the offered rate was reached" not in drawing.caption
    store.set_trial(source.jobs[0].last.id, flags={"not_steady": "The start-up left out is too short."})
    [drawing] = throughput_latency.draw(open_source(store), tmp_path)
    assert "the window of some trials began before the offered rate was reached" in drawing.caption


def lines_of_last(drawings, drawn):
    assert drawings
    return lines(drawn["throughput_latency"].figure, -1)


def test_swapping_two_baselines_in_the_database_swaps_the_drawn_data(drawn, tmp_path):
    def picture(per_token):
        throughput_latency.draw(loaded(ResultsStore(MEMORY), per_token, seeds=range(5)), tmp_path)
        return drawn["throughput_latency"]

    straight = picture({"pensieve": QUICK, "stateless": SLOW})
    swapped = picture({"pensieve": SLOW, "stateless": QUICK})
    for row in (0, 1):
        one, other = lines(straight.figure, row), lines(swapped.figure, row)
        assert (one["pensieve"], one["stateless"]) == (other["stateless"], other["pensieve"])
        assert one["pensieve"] != one["stateless"]
    assert straight.intervals["pensieve/interval"] == swapped.intervals["stateless/interval"]
    for name in ("pensieve", "stateless"):
        assert straight.colours[name] == swapped.colours[name] == style.colour(name).upper()


def test_a_rate_that_was_never_measured_is_missing(store, tmp_path):
    source = loaded(
        store,
        {"pensieve": QUICK},
        lambda at, seed: {"throughput_req_s": 1.0} if at["workload.request_rate"] == "1.0" else {},
    )
    with pytest.raises(
        MissingSeries, match=r"throughput and latency of pensieve with workload.request_rate=4.0; run `run"
    ):
        throughput_latency.draw(source, tmp_path)


def test_it_is_for_sweeps_over_a_load(store):
    source = fill(store, {"baseline": ["pensieve"]}, lambda at, seed: [answered("a", 1, 5.0)], summary=True)
    assert not throughput_latency.applies(source)
