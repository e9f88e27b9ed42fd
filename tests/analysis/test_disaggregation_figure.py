"""The figure of disaggregated decode, against its rows."""

from __future__ import annotations

import csv
from statistics import fmean

import pytest

from analysis.decoding import disaggregation
from pensieve.errors import MissingSeries
from tests.analysis.prefixes import marks
from tests.analysis.sweeps import fill
from tests.results.trials import turn

COSTS = {  # ms a token in all, computing, waiting for the network; bytes a token each way
    "native_pytorch": (10.0, 9.0, None, None, None),
    "semantic_blind": (400.0, 11.0, 380.0, 4.0e7, 1.0e6),
    "fully_aware": (12.0, 9.5, 2.0, 10.0, 40.0),
}
TOKENS = 50


def sweep(store, costs=COSTS, **columns):
    def turns(at, seed):
        found = [
            turn("iteration-0", 1, 9.0, tokens=(1,) * TOKENS, phase="warmup", latency_ms=99999.0, sent_bytes=10**12)
        ]
        for number in range(1, 7):
            whole, compute, transfer, sent, received = (
                None if one is None else one * TOKENS * (1 + number / 100) for one in costs[at["baseline"]]
            )
            one = turn(f"iteration-{number}", 1, 9.0, tokens=(1,) * TOKENS, phase="throughput", iteration=number)
            one.latency_ms, one.compute_ms, one.transfer_ms, one.queue_ms = whole, compute, transfer, 0.5
            one.sent_bytes, one.received_bytes = (None if x is None else round(x) for x in (sent, received))
            found.append(one)
        return found

    return fill(store, {"baseline": list(costs)}, turns, seeds=(0,), summary=True, workload="decode", **columns)


def test_bars_are_the_means_of_the_rows_and_what_nobody_counted_has_none(drawn, store, tmp_path):
    source = sweep(store)
    assert disaggregation.applies(source)
    disaggregation.draw(source, tmp_path)
    found, mean = marks(drawn["disaggregation"].figure), fmean(1 + number / 100 for number in range(1, 7))
    for name, (whole, compute, transfer, sent, received) in COSTS.items():
        parts = {
            "0": {"latency": whole, "compute": compute, "transfer": transfer},
            "1": {"sent": sent, "received": received},
        }
        for axes, own in parts.items():
            for part, value in own.items():
                if value is None:
                    assert f"{axes}:{name}/{part}" not in found
                else:
                    assert found[f"{axes}:{name}/{part}"][1] == pytest.approx(value * mean, rel=1e-3)
    assert "no network" in drawn["disaggregation"].texts
    assert "sent 41.4 MB" in drawn["disaggregation"].texts and not drawn["disaggregation"].clipped
    with (tmp_path / "disaggregation.csv").open(newline="") as file:
        rows = {(row["baseline"], row["quantity"]): row["value"] for row in csv.DictReader(file)}
    assert rows["native_pytorch", "transfer_ms_per_token"] == rows["native_pytorch", "sent_bytes_per_token"] == ""
    assert float(rows["fully_aware", "queue_ms_per_token"]) == pytest.approx(0.5 / TOKENS)
    assert "counted as they were serialised" in drawn["disaggregation"].caption


def test_simulated_bytes_are_called_so(drawn, store, tmp_path):
    disaggregation.draw(sweep(store, simulated=True), tmp_path)
    assert "computed from the model's shapes, simulated" in drawn["disaggregation"].caption


def test_it_is_not_drawn_where_nothing_crossed_a_network(store):
    source = sweep(store, {"native_pytorch": COSTS["native_pytorch"]})
    assert not disaggregation.applies(source)


def test_a_sweep_without_decoding_names_the_command(store, tmp_path):
    source = fill(store, {"baseline": ["fully_aware"]}, lambda at, seed: [turn("a", 1)], workload="decode")
    with pytest.raises(MissingSeries, match="experiment=machine/disaggregated_decode -m"):
        disaggregation.draw(source, tmp_path)
