from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from analysis import benchmarks, figures
from analysis.benchmarks import kernel, swap
from analysis.sweep import Source, open_source
from pensieve.errors import MissingSeries, MixedPanel
from pensieve.lab.bench.case import Case, Figure, Measured, Result
from pensieve.lab.bench.record import Record, Setting
from pensieve.lab.compose.machine import Device
from pensieve.lab.results.store import ResultsStore, open_store
from tests.analysis.prefixes import colours, marks, swapped
from tests.results.trials import MEMORY

CPU = Device("cpu", "cpu", "cpu", "a CPU", 1, 1 << 30, 1 << 30)
Times = Mapping[str, list[float]]
OURS, PEER = [1.0, 1.2, 1.1, 1.3, 1.25, 1.15], [4.0, 4.4, 4.2, 4.1, 4.3, 4.5]


def bench(store: ResultsStore, target: str, cases: Mapping[str, Times], floor: float | None = 0.5, **setting) -> Source:
    """As runners/bench.py records it. A backend without times could not run."""
    record = Record(store, target, {"target": target}, CPU)
    shared = {"model": "none", "dtype": "float32", "threads": 1, "seed": 0, "contended": False, **setting}
    for number, (label, times) in enumerate(cases.items(), 1):
        measured = [
            Measured(
                backend,
                values,
                figures=[Figure("overlap_pct", 80.0 + number)] if backend == "pipelined" else [],
                error=None if values else f"{backend} is not installed.",
            )
            for backend, values in times.items()
        ]
        case = Case(label, None if floor is None else floor * number, "bytes at copy bandwidth", ours="ours")
        result = Result(target, case, measured)
        record.add(Setting(target, CPU, "cpu", **shared), result, {"copy_bytes_s": 1e10}, datetime.now(UTC))
    record.close("completed")
    return open_source(store, record.sweep_id)


def drawn_by(module, drawn, tmp_path, cases):
    drawn.clear()
    module.draw(bench(ResultsStore(MEMORY), module.name, cases), tmp_path)
    return marks(drawn[module.name].figure)


def rows_of(tmp_path, stem):
    with (tmp_path / f"{stem}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("module", "one", "other"), [(kernel, "ours", "contiguous"), (swap, "pipelined", "sequential")]
)
def test_swapping_two_backends_in_the_database_swaps_the_bars(module, one, other, drawn, tmp_path):
    before = drawn_by(
        module, drawn, tmp_path, {"decode 8": {one: OURS, other: PEER}, "append": {one: PEER, other: OURS}}
    )
    inks = colours(drawn[module.name].figure)
    after = drawn_by(
        module, drawn, tmp_path, {"decode 8": {one: PEER, other: OURS}, "append": {one: OURS, other: PEER}}
    )
    assert after == swapped(before, one, other) != before
    assert inks[f"{one}/append"] == benchmarks.colour(one).upper() != benchmarks.colour(other).upper()


def test_a_bar_is_the_median_over_the_limit_of_its_own_case(drawn, tmp_path):
    found = drawn_by(
        kernel, drawn, tmp_path, {"decode 8": {"ours": OURS, "contiguous": PEER}, "append": {"ours": PEER}}
    )
    assert found["0:ours/decode 8"][1] == pytest.approx(1.15 / 0.5)
    assert found["0:contiguous/decode 8"][1] == pytest.approx(4.2 / 0.5)
    assert found["1:ours/append"][1] == pytest.approx(4.2 / 1.0)
    assert {x for x, _ in found["0:limit"][:2]} == {1.0}
    rows = rows_of(tmp_path, "kernel")
    assert [(row["case"], row["backend"], row["floor"], row["n"]) for row in rows] == [
        ("decode 8", "ours", "0.5", "6"), ("decode 8", "contiguous", "0.5", "6"), ("append", "ours", "1.0", "6"),
    ]  # fmt: skip
    assert float(rows[1]["time"]) == pytest.approx(4.2)
    assert (float(rows[1]["ci_low"]), float(rows[1]["ci_high"])) == (4.0, 4.5)
    texts = drawn["kernel"].texts
    assert "4.20 ms (8.40×)" in texts
    note = drawn["kernel"].caption
    assert "n = 6 repetitions; limit: bytes at copy bandwidth" in note and "conversations" not in note


def test_the_swap_figure_says_speed_up_and_overlap(drawn, tmp_path):
    drawn_by(swap, drawn, tmp_path, {"restore 4096": {"pipelined": OURS, "sequential": PEER}})
    [text] = [text for text in drawn["swap"].texts if "overlap" in text and "×" in text]
    assert text.endswith("81 % overlap") and "3.65× faster" in text
    pipelined, sequential = rows_of(tmp_path, "swap")
    assert pipelined["overlap_pct"] == "81.0" and sequential["overlap_pct"] == ""
    assert float(pipelined["speed_up_ci_low"]) <= float(pipelined["speed_up"]) <= float(pipelined["speed_up_ci_high"])


def test_a_peer_that_is_not_installed_is_named_in_the_small_print(drawn, tmp_path):
    found = drawn_by(kernel, drawn, tmp_path, {"decode 8": {"ours": OURS, "flashinfer": []}})
    assert "0:flashinfer/decode 8" not in found
    assert "without flashinfer: flashinfer is not installed" in drawn["kernel"].caption


def test_half_of_a_swap_is_a_missing_series(store, tmp_path):
    source = bench(store, "swap", {"restore 4096": {"pipelined": OURS, "sequential": []}})
    with pytest.raises(
        MissingSeries, match=r"no swap measurement of sequential for restore 4096 \(sequential is not ins.*target=swap`"
    ):
        swap.draw(source, tmp_path)


def test_a_backend_that_is_asked_for_and_missing_is_an_error_with_the_command(store, tmp_path):
    sweep = bench(store, "kernel", {"decode 8": {"ours": OURS}}).sweep
    with pytest.raises(
        MissingSeries, match=r"no kernel measurement of contiguous.*`python runners/bench.py target=kernel`"
    ):
        kernel.draw(open_source(store, sweep.id, wanted=["ours", "contiguous"]), tmp_path)


def test_a_case_without_a_limit_is_not_drawn_as_if_it_had_one(store, tmp_path):
    with pytest.raises(MissingSeries, match="has no limit beside it"):
        kernel.draw(bench(store, "kernel", {"decode 8": {"ours": OURS}}, floor=None), tmp_path)


def test_contended_benchmarks_are_refused(store, tmp_path):
    with pytest.raises(MixedPanel, match="shared their device"):
        kernel.draw(bench(store, "kernel", {"decode 8": {"ours": OURS}}, contended=True), tmp_path)


def test_a_sweep_of_another_target_does_not_apply(store):
    source = bench(store, "swap", {"restore": {"pipelined": OURS, "sequential": PEER}})
    assert swap.applies(source) and not kernel.applies(source)
    assert "runners/bench.py target=kernel" in kernel.missing(source)


def test_the_sidecar_names_the_trials(drawn, store, tmp_path):
    source = bench(store, "kernel", {"decode 8": {"ours": OURS, "contiguous": PEER}})
    [drawing] = kernel.draw(source, tmp_path)
    said = json.loads(drawing.sidecar.read_text())
    assert said["trials"] == [1, 2] and said["devices"] == ["a CPU"] and said["kind"] == ["real"]


def test_the_script_draws_the_latest_measurement_of_its_own_target(drawn, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    store = open_store(tmp_path)
    assert figures.main(["kernel"]) == 1
    assert "python runners/bench.py target=kernel" in capsys.readouterr().err
    bench(store, "kernel", {"decode 8": {"ours": OURS}})
    bench(store, "swap", {"restore": {"pipelined": OURS, "sequential": PEER}})
    assert (figures.main(["kernel"]), figures.main(["swap"])) == (0, 0)
    assert set(drawn) == {"kernel", "swap"}
