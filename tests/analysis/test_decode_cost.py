from __future__ import annotations

import csv
from itertools import pairwise

import pytest

from analysis import style
from analysis.decoding import decode_cost
from pensieve.errors import MissingSeries
from pensieve.lab.metrics import summarise
from pensieve.lab.results.store import ResultsStore
from tests.analysis.prefixes import colours, marks, swapped
from tests.analysis.sweeps import fill
from tests.composed import replayed
from tests.results.trials import MEMORY, turn

NAMES = ("pensieve", "gpu_only", "semantic_blind")
MOVED = {"sent_bytes_per_token": 1000.0, "received_bytes_per_token": 24.0, "h2d_bytes_per_token": 7.0}


def decode_sweep(store, slow: str, counted: bool = True):
    """Ten requests of 50 tokens at 10 ms a token, 40 for the slow one, which also moves bytes over a network."""

    def turns(at, seed):
        each = 40.0 if at["baseline"] == slow else 10.0
        found = [turn("iteration-0", 1, 9.0, tokens=(1,) * 50, phase="warmup", latency_ms=99999.0)]
        for number in range(1, 11):
            one = turn(f"iteration-{number}", 1, 9.0, tokens=(1,) * 50, phase="throughput", iteration=number)
            one.latency_ms = 50 * each * (1 + number / 100)
            found.append(one)
        return found

    def metrics(at, seed):
        moved = MOVED if at["baseline"] == slow else dict.fromkeys(MOVED, 0.0)
        return {**moved, "d2h_bytes_per_token": 0.0} if counted else moved

    return fill(store, {"baseline": NAMES}, turns, metrics, workload="decode")


def drawn_by(drawn, tmp_path, slow):
    drawn.clear()
    decode_cost.draw(decode_sweep(ResultsStore(MEMORY), slow), tmp_path)
    return marks(drawn["decode_cost"].figure)


def test_swapping_two_baselines_in_the_database_swaps_the_bars(drawn, tmp_path):
    before, after = (drawn_by(drawn, tmp_path, slow) for slow in ("semantic_blind", "pensieve"))
    assert after == swapped(before, "pensieve", "semantic_blind") != before
    inks = colours(drawn["decode_cost"].figure)
    assert all(inks[f"{name}/p50"] == style.colour(name).upper() for name in NAMES)


def test_a_bar_is_the_latency_by_tokens_and_the_bytes_are_those_that_were_counted(drawn, tmp_path):
    found = drawn_by(drawn, tmp_path, "semantic_blind")
    assert found["0:pensieve/p50"][1] == pytest.approx(10.5)
    assert found["0:semantic_blind/p99"][1] == pytest.approx(44.0)
    assert found["1:semantic_blind/network"][1] == pytest.approx(1024.0)
    assert found["1:semantic_blind/GPU-CPU"][1] == pytest.approx(7.0)
    texts = drawn["decode_cost"].texts
    assert {"network 1.02 kB", "GPU-CPU 7 B", "p50 10.5"} <= set(texts)
    assert not drawn["decode_cost"].clipped
    with (tmp_path / "decode_cost.csv").open(newline="") as file:
        rows = {(row["baseline"], row["quantity"]): row for row in csv.DictReader(file)}
    one = rows["semantic_blind", "per_token_ms_p50"]
    assert (float(one["value"]), one["n"], one["n_seeds"], one["trials"]) == (pytest.approx(42.0), "20", "2", "3 6")
    assert rows["semantic_blind", "bytes_per_token network"]["value"] == "1024.0"


def test_ticks_of_bytes_do_not_run_into_each_other(drawn, store, tmp_path):
    """From 7 bytes to 600 MB a token, on an axis that is half a column wide."""
    moved = {"sent_bytes_per_token": 5.4e8, "received_bytes_per_token": 6e7, "h2d_bytes_per_token": 7.0}
    source = fill(
        store, {"baseline": NAMES}, lambda at, seed: [decoded(number) for number in range(1, 4)],
        lambda at, seed: {**moved, "d2h_bytes_per_token": 0.0}, workload="decode",
    )  # fmt: skip
    decode_cost.draw(source, tmp_path)
    figure = drawn["decode_cost"].figure
    figure.draw_without_rendering()
    boxes = sorted(
        (label.get_window_extent() for label in figure.axes[1].get_xticklabels() if label.get_text()),
        key=lambda box: box.x0,
    )
    gap = 0.02 * figure.dpi
    assert len(boxes) >= 2 and all(left.x1 + gap < right.x0 for left, right in pairwise(boxes))


def decoded(number: int):
    one = turn(f"iteration-{number}", 1, 9.0, tokens=(1,) * 50, phase="throughput", iteration=number)
    one.latency_ms = 500.0
    return one


def test_what_moves_nothing_has_no_bars_of_bytes(drawn, store, tmp_path):
    found = drawn_by(drawn, tmp_path, "semantic_blind")
    moved = {gid for gid in found if gid.startswith("1:")}
    assert moved == {"1:semantic_blind/network", "1:semantic_blind/GPU-CPU", "1:pensieve/nothing", "1:gpu_only/nothing"}
    assert drawn["decode_cost"].texts.count("nothing moved") == 2

    drawn.clear()
    decode_cost.draw(decode_sweep(store, slow="nobody"), tmp_path)
    [axes] = drawn["decode_cost"].figure.axes
    assert axes.get_xlabel() == "ms a token"
    assert "no baseline moved a byte" in drawn["decode_cost"].caption


def test_bytes_that_nobody_counted_are_not_drawn_as_none(drawn, store, tmp_path):
    decode_cost.draw(decode_sweep(store, "semantic_blind", counted=False), tmp_path)
    assert "GPU-CPU not counted" in drawn["decode_cost"].texts
    with (tmp_path / "decode_cost.csv").open(newline="") as file:
        values = {row["value"] for row in csv.DictReader(file) if row["quantity"].endswith("GPU-CPU")}
    assert values == {""}


def test_an_engine_in_this_process_has_a_network_that_nobody_counts(drawn, store, tmp_path):
    """From a trial that ran: what the engine counted, as metrics and as the figure shows it."""
    record, _ = replayed("workload=decode", "workload.iterations=3", "workload.discard=1")
    found = {metric.name: metric.value for metric in summarise(record.measurement) if not metric.label}
    source = fill(
        store, {"baseline": ["pensieve"]}, lambda at, seed: record.turns, lambda at, seed: found, workload="decode"
    )
    decode_cost.draw(source, tmp_path)
    assert "network not counted" in drawn["decode_cost"].texts
    with (tmp_path / "decode_cost.csv").open(newline="") as file:
        values = {row["quantity"]: row["value"] for row in csv.DictReader(file)}
    assert (values["bytes_per_token network"], values["bytes_per_token GPU-CPU"]) == ("", "0.0")


def test_a_sweep_without_decoding_names_the_command(store, tmp_path):
    source = fill(store, {"baseline": ["pensieve"]}, lambda at, seed: [turn("a", 1, phase="warmup")], workload="decode")
    with pytest.raises(
        MissingSeries, match=r"no completed request of baseline pensieve.*experiment=machine/disaggregated_decode -m"
    ):
        decode_cost.draw(source, tmp_path)
