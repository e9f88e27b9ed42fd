from __future__ import annotations

import pytest

from analysis import conversations
from analysis.conversations import hotness, speedup
from analysis.load import hotness_load
from analysis.sweep import open_source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from tests.analysis.sweeps import answered, fill
from tests.results.trials import MEMORY

STATELESS = {"hot": 40.0, "warm": 40.0, "cold": 40.0}
OURS = {"hot": 10.0, "warm": 20.0, "cold": 40.0}
OTHER = {"hot": 20.0, "warm": 40.0, "cold": 80.0}


def users(store, ttft, **columns):
    def turns(at, seed):
        times = ttft[at["baseline"]]
        return [
            answered(f"{label}-{user}", number, times[label] * (1 + user) * number, label=label)
            for label in times
            for user in range(3)
            for number in (1, 2)
        ]

    return fill(store, {"baseline": list(ttft)}, turns, summary=True, **columns)


def test_the_speed_up_of_each_class_is_paired_with_stateless(store, drawn, tmp_path):
    hotness.draw(users(store, {"pensieve": OURS, "stateless": STATELESS}, seeds=range(5)), tmp_path)
    picture = drawn["hotness"]
    assert not picture.clipped
    assert [y for _, y in picture.lines["pensieve"]] == pytest.approx([4.0, 2.0, 1.0])
    assert picture.ticks == ["hot users", "warm users", "cold users"]
    assert len(picture.intervals["pensieve/interval"]) == 3
    assert {"pensieve", "stateless"} <= set(picture.texts)
    [points] = [line for line in picture.figure.axes[0].get_lines() if line.get_gid() == "pensieve"]
    assert points.get_linewidth() == 0, "nothing lies between hot and warm users"


def test_swapping_two_baselines_in_the_database_swaps_the_drawn_data(drawn, tmp_path):
    def picture(ttft):
        hotness.draw(users(ResultsStore(MEMORY), ttft), tmp_path)
        return {name: [y for _, y in points] for name, points in drawn["hotness"].lines.items()}

    straight = picture({"pensieve": OURS, "gpu_only": OTHER, "stateless": STATELESS})
    swapped = picture({"pensieve": OTHER, "gpu_only": OURS, "stateless": STATELESS})
    assert (straight["pensieve"], straight["gpu_only"]) == (swapped["gpu_only"], swapped["pensieve"])
    assert straight["pensieve"] == pytest.approx([4.0, 2.0, 1.0])
    assert straight["gpu_only"] == pytest.approx([2.0, 1.0, 0.5])


def test_the_table_gives_turns_and_the_average_and_a_dash_where_there_is_no_such_turn(store, drawn, tmp_path):
    ttft = {"pensieve": [40.0, 30.0, 20.0, 20.0, 20.0], "stateless": [40.0, 60.0, 80.0, 80.0, 80.0]}

    def turns(at, seed):
        return [answered(s, i + 1, ms * (1 + seed)) for s in "ab" for i, ms in enumerate(ttft[at["baseline"]])]

    source = fill(store, {"baseline": list(ttft)}, turns, summary=True)
    [(_, found)] = conversations.read_speedup(source)
    assert {at: None if one is None else pytest.approx(one.ratio) for at, one in found["pensieve"].items()} == {
        "turn 1": 1.0,
        "turn 5": 4.0,
        "turn 10": None,
        "average": 340 / 130,
    }
    [drawing] = speedup.draw(source, tmp_path)
    assert drawing.png is None and not drawn, "a table is no picture"
    cells = drawing.text.read_text(encoding="utf-8").split(" | ")
    assert {"1.00", "4.00", "–", "2.62"} <= {text.split(" ")[0] for text in cells}


def test_swapping_two_baselines_in_the_database_swaps_the_lines_of_the_table(drawn, tmp_path):
    def lines(ttft):
        def turns(at, seed):
            return [answered(s, i + 1, ms) for s in "ab" for i, ms in enumerate(ttft[at["baseline"]])]

        store = ResultsStore(MEMORY)
        [drawing] = speedup.draw(fill(store, {"baseline": list(ttft)}, turns), tmp_path)
        return {
            name: [row.split(",")[1:3] for row in drawing.csv.read_text().splitlines() if row.startswith(name)]
            for name in ("pensieve", "gpu_only")
        }

    quick, slow, none = [10.0, 10.0], [20.0, 15.0], [40.0, 60.0]
    straight = lines({"pensieve": quick, "gpu_only": slow, "stateless": none})
    swapped = lines({"pensieve": slow, "gpu_only": quick, "stateless": none})
    assert (straight["pensieve"], straight["gpu_only"]) == (swapped["gpu_only"], swapped["pensieve"])
    assert straight["pensieve"] != straight["gpu_only"]


def test_without_stateless_neither_applies(store):
    source = users(store, {"pensieve": OURS, "gpu_only": OTHER})
    assert not hotness.applies(source)
    assert not speedup.applies(source)


def test_conversations_that_no_two_baselines_share_are_missing(store):
    def turns(at, seed):
        return [answered(at["baseline"], number, 5.0, label="hot") for number in (1, 2)]

    source = fill(store, {"baseline": ["pensieve", "stateless"]}, turns, summary=True)
    for read in (conversations.read_hotness, conversations.read_speedup):
        with pytest.raises(MissingSeries, match=r"shares with stateless; run `run.py -m`"):
            list(read(open_source(store, source.sweep.id)))


def spaced(store, ttft):
    def turns(at, seed):
        slower = float(at["workload.request_interval"])
        return [
            answered(f"{c}-{u}", n, ttft[at["baseline"]][c] / slower, label=c)
            for c in OURS
            for u in "ab"
            for n in (1, 2)
        ]

    axes = {"workload.request_interval": ["0.5", "1.0"], "baseline": list(ttft)}
    return fill(store, axes, turns, summary=True)


def test_each_class_has_its_row_over_the_load(store, drawn, tmp_path):
    source = spaced(store, {"pensieve": OURS, "stateless": STATELESS})
    assert hotness_load.applies(source)
    hotness_load.draw(source, tmp_path)
    assert not drawn["hotness_load"].clipped
    rows = {
        axes.get_ylabel(): {line.get_gid(): list(line.get_ydata()) for line in axes.get_lines() if line.get_gid()}
        for axes in drawn["hotness_load"].figure.axes
    }
    assert rows == {
        "hot users": {"pensieve": [20.0, 10.0], "stateless": [80.0, 40.0]},
        "warm users": {"pensieve": [40.0, 20.0], "stateless": [80.0, 40.0]},
        "cold users": {"pensieve": [80.0, 40.0], "stateless": [80.0, 40.0]},
    }


def test_swapping_two_baselines_in_the_database_swaps_the_rows_over_the_load(drawn, tmp_path):
    def first_row(ttft):
        hotness_load.draw(spaced(ResultsStore(MEMORY), ttft), tmp_path)
        return {line.get_gid(): list(line.get_ydata()) for line in drawn["hotness_load"].figure.axes[0].get_lines()}

    straight = first_row({"pensieve": OURS, "stateless": STATELESS})
    swapped = first_row({"pensieve": STATELESS, "stateless": OURS})
    assert (straight["pensieve"], straight["stateless"]) == (swapped["stateless"], swapped["pensieve"])
    assert straight["pensieve"] != straight["stateless"]
