"""The figures of what the paper left out, against their raw rows; which way they point; and where nothing may change."""

from __future__ import annotations

import csv
import json

import pytest
import yaml
from sqlalchemy import text

from analysis.beyond import FACTORS, RATE, finding, sections
from analysis.registry import FIGURES
from analysis.sweep import Source
from pensieve.lab.compose import conf_folder
from pensieve.lab.results.store import ResultsStore
from tests.analysis.sweeps import answered, fill

SEEDS = (0, 1, 2, 3, 4)
COPY = next(one for one in FACTORS if one.name == "beyond_copy_ahead")
LOADS = ("0.15", "3.3")


def swept(store: ResultsStore, slower: float = 1.0, worse: int = 0, of=COPY, other="never") -> Source:
    """Under the first load all values are alike; under the second `other` has first tokens and latencies `slower` times as
    late, and finds `worse` tokens less."""

    def turns(at, seed):
        moved = at[RATE] == LOADS[1] and at[of.axis] == other
        return [
            answered(
                session,
                number,
                (10.0 + 3 * index + number + seed) * (slower if moved else 1.0),
                history=100 * (number - 1),
                gpu=50 * (number - 1),
                cpu=(40 - (worse if moved else 0)) * (number - 1),
                latency_ms=(80.0 + 7 * index + seed) * (slower if moved else 1.0),
            )
            for index, session in enumerate("abc")
            for number in (1, 2, 3)
        ]

    axes = {RATE: LOADS, of.axis: (of.reference, other), "baseline": ["pensieve"]}
    return fill(store, axes, turns, lambda at, seed: {"bound_hit_rate": 0.95}, seeds=SEEDS, summary=True)


def drawn_rows(source, folder, of=COPY):
    [drawing] = FIGURES[of.name].draw(source, folder)
    with drawing.csv.open(newline="") as file:
        return drawing, {(row[RATE], row[of.axis]): row for row in csv.DictReader(file)}


def raw(store, column):
    """(load, value, seed, session, turn) -> column, by SQL."""
    with store.database.reading() as connection:
        found = connection.execute(
            text(
                f"select trial.config, trial.seed, turn.session, turn.turn, {column} from turn "
                "join trial on trial_id = trial.id"
            )
        ).all()
    read = [(json.loads(config) if isinstance(config, str) else config, *rest) for config, *rest in found]
    return {
        (config["workload"]["request_rate"], config["scheduler"]["copy_ahead"], *key): value
        for config, *key, value in read
    }


def test_ratios_and_points_are_those_of_the_raw_rows_and_intervals_hold_them(store, tmp_path, drawn):
    _, rows = drawn_rows(swept(store, slower=1.3, worse=20), tmp_path)
    for name, column in (("ttft_ratio", "ttft_ms"), ("latency_ratio", "latency_ms / output_tokens")):
        values = raw(store, column)
        totals = {
            value: sum(v for key, v in values.items() if key[:2] == ("3.3", value)) for value in ("paper", "never")
        }
        row = rows["3.3", "never"]
        assert float(row[name]) == pytest.approx(totals["never"] / totals["paper"])
        assert float(row[f"{name}_ci_low"]) <= float(row[name]) <= float(row[f"{name}_ci_high"])
        assert (int(row[f"{name}_n"]), int(row[f"{name}_n_seeds"])) == (45, 5)
    hits, history = raw(store, "gpu_hit_tokens + cpu_hit_tokens"), raw(store, "history_tokens")
    shares = {
        value: 100
        * sum(v for key, v in hits.items() if key[:2] == ("3.3", value))
        / sum(v for key, v in history.items() if key[:2] == ("3.3", value))
        for value in ("paper", "never")
    }
    assert float(rows["3.3", "never"]["found_points"]) == pytest.approx(shares["never"] - shares["paper"])
    assert float(rows["3.3", "never"]["bound_points"]) == pytest.approx(95.0 - shares["paper"])
    picture = drawn["beyond_copy_ahead"]
    assert not picture.clipped
    assert picture.lines["3.3 requests/s/never/bound"][0][0] == pytest.approx(95.0 - shares["paper"])


def test_what_is_faster_points_the_other_way(store, tmp_path, drawn):
    _, slow = drawn_rows(swept(store, slower=1.25), tmp_path)
    _, fast = drawn_rows(swept(ResultsStore(store.database.url), slower=0.8), tmp_path)
    one, other = (float(rows["3.3", "never"]["ttft_ratio"]) for rows in (slow, fast))
    assert one == pytest.approx(1.25) and other == pytest.approx(0.8) and one * other == pytest.approx(1.0)


def test_where_no_turn_differs_the_caption_says_so_and_every_ratio_is_one(store, tmp_path, drawn):
    drawing, rows = drawn_rows(swept(store, slower=1.3), tmp_path)
    light = rows["0.15", "never"]
    assert (float(light["ttft_ratio"]), float(light["ttft_ratio_ci_low"]), float(light["ttft_ratio_ci_high"])) == (
        1,
        1,
        1,
    )
    assert (light["no_turn_differs"], rows["3.3", "never"]["no_turn_differs"]) == ("True", "False")
    found = drawing.caption.removeprefix("Copying to the CPU ahead of time. ")
    assert found.startswith(
        "Found: at 0.15 requests/s no turn differs; at 3.3 requests/s, never in place of paper makes"
    )
    assert "1.300 times" in found
    [(_, parts)] = sections(COPY, swept(ResultsStore(store.database.url)))
    assert finding(COPY, parts) == "Found: at 0.15 requests/s no turn differs; at 3.3 requests/s no turn differs"


def test_every_factor_has_its_overlay_with_its_axis_and_reference():
    folder = conf_folder() / "experiment" / "paper"
    overlays = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("beyond_*.yaml")}
    assert overlays.keys() == {one.name for one in FACTORS} == {name for name in FIGURES if name.startswith("beyond_")}
    for one in FACTORS:
        axes = overlays[one.name]["hydra"]["sweeper"]["params"]
        assert str(yaml.safe_load(one.reference)).lower() in [
            str(yaml.safe_load(v)).lower() for v in axes[one.axis].split(",")
        ]
        assert list(axes)[-2:] == [one.axis, "baseline"] and len(axes["seed"].split(",")) == 5
