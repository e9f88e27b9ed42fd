"""The value of hints, drawn: independent of the drawing code, by hand from the rates that went into the database."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from analysis.policies import value_of_hint
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from tests.analysis.sweeps import answered, fill
from tests.results.trials import MEMORY

RATES = {
    "lru": (30, 20),
    "stop_reason": (30, 15),
    "noisy_hint_40": (30, 22),
    "noisy_hint_5": (40, 28),
    "oracle_hint": (50, 20),
}
"""GPU and CPU hits of 100 tokens of history."""
BOUND = 0.9


def swept(rates: Any, bound: float = BOUND) -> Source:
    def turns(at: Any, seed: int) -> Any:
        gpu, cpu = rates[at["eviction"]]
        return [answered(name, turn, 5.0, history=100 * (turn - 1), gpu=gpu * (turn - 1), cpu=cpu * (turn - 1))
                for name in "ab" for turn in (1, 2)]  # fmt: skip

    axes = {"eviction": list(rates), "baseline": ["pensieve"]}
    return fill(ResultsStore(MEMORY), axes, turns, lambda at, seed: {"bound_hit_rate": bound}, summary=True)


def rows_of(source: Source, folder: Any) -> tuple[list[dict[str, str]], Any]:
    [drawing] = value_of_hint.draw(source, folder)
    with drawing.csv.open(newline="") as file:
        return list(csv.DictReader(file)), drawing


def test_the_gap_is_what_lies_between_lru_and_the_bound(tmp_path: Any, drawn: Any) -> None:
    source = swept(RATES)
    assert value_of_hint.applies(source)
    rows, drawing = rows_of(source, tmp_path)
    found = {row["eviction"]: (float(row["hit_pct"]), round(float(row["gap_closed_pct"]), 6)) for row in rows}
    assert found == {
        "lru": (50.0, 0.0),
        "stop_reason": (45.0, -12.5),  # 5 points below, of 40
        "noisy_hint_40": (52.0, 5.0),
        "noisy_hint_5": (68.0, 45.0),
        "oracle_hint": (70.0, 50.0),
    }
    assert [row["eviction"] for row in rows] == list(RATES), "from no hint to a perfect one"
    assert {float(row["bound_hit_pct"]) for row in rows} == {90.0}
    assert [line["gap closed (%)"] for line in drawing.table][1:3] == ["−12.5", "5.00"]
    shown = drawn["value_of_hint"]
    assert not shown.clipped
    widths = {
        str(bar.get_gid()): round(bar.get_width(), 6)
        for axes in shown.figure.axes
        for bar in axes.patches
        if bar.get_gid()
    }
    assert widths["“soon”, always right/gap"] == 50.0 and widths["stop reason, a priority/gap"] == -12.5


def test_the_intervals_of_the_gap_are_drawn_to_their_ends(tmp_path: Any, drawn: Any) -> None:
    """Of one seed, over conversations that differ: the whiskers are longer than the bars."""

    def turns(at: Any, seed: int) -> Any:
        found = {"lru": (30, 30), "ttl": (55, 15), "oracle_hint": (80, 20)}[at["eviction"]]
        return [answered(name, turn, 5.0, history=100 * (turn - 1), gpu=found[place % 2] * (turn - 1))
                for place, name in enumerate("abcdefgh") for turn in (1, 2)]  # fmt: skip

    axes = {"eviction": ["lru", "ttl", "oracle_hint"], "baseline": ["pensieve"]}
    source = fill(ResultsStore(MEMORY), axes, turns, lambda at, seed: {"bound_hit_rate": 0.9}, seeds=(0,), summary=True)
    rows, _ = rows_of(source, tmp_path)
    ends = [float(row[name]) for row in rows if row["gap_ci_low"] for name in ("gap_ci_low", "gap_ci_high")]
    assert len(ends) == 6 and min(ends) < min(float(row["gap_closed_pct"]) for row in rows)
    low, high = drawn["value_of_hint"].figure.axes[1].get_xlim()
    assert low < min(ends) and max(ends) < high
    assert not drawn["value_of_hint"].clipped


def test_where_there_is_no_gap_none_is_closed(tmp_path: Any) -> None:
    rows, drawing = rows_of(swept({"lru": (60, 30), "ttl": (60, 30)}), tmp_path)
    assert [row["gap_closed_pct"] for row in rows] == ["", ""]
    assert drawing.table[0]["gap closed (%)"] == "–"


def test_it_needs_lru_beside_a_hint() -> None:
    assert not value_of_hint.applies(swept({"lru": (30, 20), "fifo": (1, 1)}))
    without = swept({"ttl": (30, 20), "oracle_hint": (40, 20)})
    assert not value_of_hint.applies(without)
    with pytest.raises(MissingSeries, match="eviction=lru"):
        list(value_of_hint.plots(without))
