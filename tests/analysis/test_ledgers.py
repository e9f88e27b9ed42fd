"""Figures of both ledgers, held against sums by hand of the rows that went into the database."""

from __future__ import annotations

import csv
from collections import defaultdict
from typing import Any

import pytest

from analysis.ledgers import break_even, holding, holding_table, miss_causes
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.prices import Prices
from pensieve.lab.results.store import Holding, ResultsStore
from pensieve.serve.record import Miss
from tests.analysis.sweeps import answered, fill
from tests.results.trials import MEMORY

GIB = 2**30
HELD = {
    "pensieve": [
        Holding("a", "gpu", 6.0, 2.0, 5.0), Holding("a", "cpu", 10.0, 0.0, 10.0),
        Holding("b", "gpu", 4.0, 0.1, 4.0), Holding("b", "cpu", 30.0, 3.0, 30.0),
    ],
    "stateless": [Holding("a", "gpu", 1.0, 0.0, 0.0), Holding("b", "gpu", 2.0, 0.0, 0.0)],
}  # fmt: skip
PREFILL = {32: 0.5, 64: 1.5}

EVEN = Prices(gpu_hour=2.0, gpu_gib_hour=1.0, cpu_gib_hour=1.0)  # of two GPUs: a second is worth 4 GiB·s of either tier


def swept(
    held: Any = HELD, prices: Prices | None = None, seeds: tuple[int, ...] = (0, 1), axis: str = "baseline"
) -> Source:
    """A GPU tier of 4 GiB, and tokens of half a GiB; the second seed holds and saves twice as much."""
    axes = {axis: list(held)} if axis == "baseline" else {axis: list(held), "baseline": ["pensieve"]}

    def turns(at: Any, seed: int) -> Any:
        found = [answered(name, turn, 500.0 * turn, history=5) for name in "ab" for turn in (1, 2)]
        for turn in found:
            turn.misses = (Miss("new", 10, 300.0 * turn.turn), Miss("evicted", 5, 200.0 * turn.turn, "b", 1.0))
            if at[axis] == "stateless":
                turn.misses = (Miss("new", 10, 400.0), Miss("never_stored", 5, 500.0 * turn.turn - 400.0))
        warm = answered("w", 1, 900.0)
        warm.phase, warm.misses = "warmup", (Miss("new", 99, 900.0),)
        for ordinal, turn in enumerate((*found, warm)):
            turn.ordinal = ordinal
        return [*found, warm]

    store = ResultsStore(MEMORY)
    columns = {"gpu_bytes": 4 * GIB, "kv_bytes_per_token": GIB // 2, "device_count": 2}
    source = fill(store, axes, turns, seeds=seeds, summary=True, **columns)
    for trial in source.trials:
        own = [one._replace(**{name: (1 + trial.seed) * getattr(one, name) for name in ("gib_s", "saved_s", "idle_gib_s")})
               for one in held[getattr(trial, axis)]]  # fmt: skip
        store.add_holdings(trial.id, own)
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for one in own:
            for name, value in (
                ("held_gib_s", one.gib_s),
                ("held_idle_gib_s", one.idle_gib_s),
                ("saved_s", one.saved_s),
            ):
                sums[name, one.tier] += value
        store.add_metrics(trial.id, [MetricValue(name, value, tier) for (name, tier), value in sums.items()])
        store.add_metrics(trial.id, [MetricValue("prefill_s", value, str(tokens)) for tokens, value in PREFILL.items()])
    return Source(store, source.sweep, prices=prices or EVEN)


def rows_of(figure: Any, source: Source, folder: Any) -> list[dict[str, str]]:
    assert figure.applies(source)
    [drawing] = figure.draw(source, folder)
    with drawing.csv.open(newline="") as file:
        return list(csv.DictReader(file))


def test_misses_are_the_sums_of_their_lines_over_measured_turns(tmp_path: Any, drawn: Any) -> None:
    """Of a trial four measured turns of 500, 1000, 500 and 1000 ms: 3 s in all, of which 60 % for what was new."""
    rows = rows_of(miss_causes, swept(), tmp_path)
    found = {(row["baseline"], row["cause"]): (float(row["tokens"]), float(row["seconds"])) for row in rows}
    assert found == {
        ("pensieve", "new"): (40.0, pytest.approx(1.8)),
        ("pensieve", "evicted"): (20.0, pytest.approx(1.2)),
        ("stateless", "new"): (40.0, pytest.approx(1.6)),
        ("stateless", "never_stored"): (20.0, pytest.approx(1.4)),
    }
    assert {row["cause"]: row["evicted_most_by"] for row in rows}["evicted"] == "b:1.000"
    shown = drawn["miss_causes"]
    assert not shown.clipped
    widths = {str(bar.get_gid()): (bar.get_x(), bar.get_width()) for axes in shown.figure.axes for bar in axes.patches}
    assert widths["pensieve/seconds/evicted"] == (pytest.approx(1.8), pytest.approx(1.2))
    assert widths["stateless/tokens/never_stored"] == (pytest.approx(0.04), pytest.approx(0.02))


def test_every_conversation_and_tier_is_a_point_above_or_below_the_line(tmp_path: Any, drawn: Any) -> None:
    """A second is worth 4 GiB·s: a on GPU has saved 2 s with 5, b on GPU 0.1 with 4."""
    rows = rows_of(holding, swept(), tmp_path)
    assert len(rows) == 12
    back = {
        (row["trial"], row["session"], row["tier"]): row["paid_back"] for row in rows if row["baseline"] == "pensieve"
    }
    assert {key: float(value) for key, value in back.items() if key[0] == "1"} == {
        ("1", "a", "gpu"): 1.6, ("1", "a", "cpu"): 0.0, ("1", "b", "gpu"): 0.1, ("1", "b", "cpu"): 0.4,
    }  # fmt: skip
    assert {row["paid_back"] for row in rows if row["baseline"] == "stateless"} == {""}
    shown = drawn["holding"]
    assert not shown.clipped
    assert [(x, y / x) for x, y in shown.lines["pensieve/even"]] == [(4.0, 0.25), (60.0, 0.25)]
    points = sorted(shown.lines["pensieve/gpu"])
    assert points == [(4.0, 0.1), (5.0, 2.0), (8.0, 0.2), (10.0, 4.0)]
    above = {x for x, y in points if y > x / 4}
    assert above == {5.0, 10.0}
    nothing = [y for x, y in shown.lines["pensieve/cpu"] if x in (10.0, 20.0)]
    assert len(nothing) == 2 and all(0 < y < 4.0 / 4 for y in nothing), "below the line from its beginning on"
    assert "nothing is kept" in shown.texts


@pytest.mark.parametrize("figure", [miss_causes, holding, holding_table, break_even], ids=lambda figure: figure.name)
def test_a_policy_without_a_completed_trial_is_named_where_it_is_left_out(figure: Any, tmp_path: Any) -> None:
    source = swept(dict.fromkeys(("lru", "fifo", "mine"), HELD["pensieve"]), axis="eviction")
    [drawing] = figure.draw(source, tmp_path / "whole")
    assert "Left out" not in drawing.caption and not drawing.panel.left_out
    for trial in source.trials:
        if trial.eviction == "mine":
            source.store.finish_trial(trial.id, "failed", "It broke.")
    [drawing] = figure.draw(Source(source.store, source.sweep, prices=EVEN), tmp_path / "without")
    assert "Left out, without a completed trial: eviction=mine. " in drawing.caption
    assert "mine" not in drawing.csv.read_text()


def test_the_table_sums_by_tier(tmp_path: Any) -> None:
    rows = {(row["baseline"], row["tier"]): row for row in rows_of(holding_table, swept(), tmp_path)}
    gpu, cpu, none = rows["pensieve", "gpu"], rows["pensieve", "cpu"], rows["stateless", "gpu"]
    assert (float(gpu["gib_s"]), float(gpu["idle_gib_s"]), float(gpu["saved_s"])) == (15.0, 13.5, pytest.approx(3.15))
    assert float(gpu["paid_back"]) == pytest.approx(4 * 3.15 / 13.5)
    assert float(gpu["worthwhile_pct"]) == 50.0
    assert (float(cpu["paid_back"]), float(cpu["worthwhile_pct"])) == (pytest.approx(0.3), 0.0)
    assert (none["paid_back"], float(none["idle_gib_s"]), float(none["gib_s"])) == ("", 0.0, 4.5)


def test_without_prices_nothing_is_said_to_be_worth_it(tmp_path: Any) -> None:
    [drawing] = holding_table.draw(swept(prices=Prices()), tmp_path)
    assert drawing.table is not None and not {"paid back", "worth it"} & set(drawing.table[0])
    assert "worth" not in drawing.caption
    assert not break_even.applies(swept(prices=Prices()))


def test_break_even_at_equal_gib_s_and_with_prices(tmp_path: Any, drawn: Any) -> None:
    """32 tokens are 16 GiB and half a second. At equal GiB·s: 0.5 x 4 / 16. Two GPUs at 3 an hour make a second worth as
    much as 60 GiB·s of the GPU tier at 0.1, and 600 of the CPU tier at 0.01."""
    even = rows_of(break_even, swept(), tmp_path)
    times = {(row["baseline"], row["tier"], row["tokens"]): float(row["break_even_s"]) for row in even}
    assert times["pensieve", "gpu", "32"] == times["pensieve", "cpu", "32"] == times["stateless", "gpu", "32"] == 0.125
    assert times["pensieve", "gpu", "64"] == 1.5 * 4 / 32
    assert list(drawn["break_even"].lines) == ["pensieve,stateless/gpu,cpu"]
    prices = Prices(gpu_hour=3.0, gpu_gib_hour=0.1, cpu_gib_hour=0.01)
    priced = rows_of(break_even, swept(prices=prices), tmp_path)
    times = {(row["baseline"], row["tier"], row["tokens"]): float(row["break_even_s"]) for row in priced}
    assert times["pensieve", "gpu", "32"] == pytest.approx(0.5 * 60 / 16)
    assert times["pensieve", "cpu", "32"] == pytest.approx(0.5 * 600 / 16)
    assert not drawn["break_even"].clipped
    rows = {(row["baseline"], row["tier"]): row for row in rows_of(holding_table, swept(prices=prices), tmp_path)}
    assert float(rows["pensieve", "cpu"]["paid_back"]) == pytest.approx(4.5 * 600 / 60)


def test_the_policies_of_one_baseline_stand_side_by_side(tmp_path: Any, drawn: Any) -> None:
    """Not a picture for each of them: the same rows as by baseline, under the names of the policies."""
    held = {"lru": HELD["pensieve"], "belady": HELD["stateless"], **{f"other_{n}": HELD["pensieve"] for n in range(5)}}
    source = swept(held, axis="eviction")
    rows = rows_of(holding_table, source, tmp_path)
    assert [(row["baseline"], row["eviction"]) for row in rows[:3]] == [("pensieve", "lru")] * 2 + [
        ("pensieve", "belady")
    ]
    plain = {(row["baseline"], row["tier"]): row for row in rows_of(holding_table, swept(), tmp_path)}
    lru = next(row for row in rows if (row["eviction"], row["tier"]) == ("lru", "gpu"))
    assert [lru[name] for name in ("gib_s", "idle_gib_s", "saved_s", "paid_back")] == [
        plain["pensieve", "gpu"][name] for name in ("gib_s", "idle_gib_s", "saved_s", "paid_back")
    ]
    [drawing] = holding_table.draw(source, tmp_path)
    assert drawing.table is not None and drawing.table[0]["eviction"] == "lru"
    assert {row["eviction"] for row in rows_of(holding, source, tmp_path)} == set(held)
    assert len(rows_of(miss_causes, source, tmp_path)) == 2 * len(held)
    rows_of(break_even, source, tmp_path)
    assert len(drawn["break_even"].lines) == 1, "one machine, one line"
    for name in ("holding", "miss_causes", "break_even"):
        assert not drawn[name].clipped
    ticks = [label for axes in drawn["miss_causes"].figure.axes for label in axes.get_yticklabels()]
    assert {label.get_text() for label in ticks} == set(held)


def test_a_tier_without_its_price_has_no_break_even(tmp_path: Any) -> None:
    rows = rows_of(break_even, swept(prices=Prices(gpu_hour=3.0, cpu_gib_hour=0.01)), tmp_path)
    assert {row["tier"] for row in rows} == {"cpu"}
    with pytest.raises(MissingSeries, match="gpu_hour"):
        list(break_even.plots(swept(prices=Prices(cpu_gib_hour=0.01))))


def test_where_nobody_returns_nothing_is_paid_back(tmp_path: Any, drawn: Any) -> None:
    held = {"pensieve": [one._replace(saved_s=0.0) for one in HELD["pensieve"]]}
    rows = rows_of(holding_table, swept(held), tmp_path)
    assert {(float(row["paid_back"]), float(row["worthwhile_pct"])) for row in rows} == {(0.0, 0.0)}
    rows_of(holding, swept(held), tmp_path)
    assert not drawn["holding"].clipped


def test_trials_without_ledgers_have_no_such_figure() -> None:
    def turns(at: Any, seed: int) -> Any:
        return [answered("a", 1, 5.0)]

    source = fill(ResultsStore(MEMORY), {"baseline": ["pensieve"]}, turns)
    assert not any(figure.applies(source) for figure in (miss_causes, holding, holding_table, break_even))
