"""Figures of clusters, against what went into the database by hand."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from analysis.cluster import cluster, migration, replica_routing
from analysis.registry import Figure
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.trial.samples import ENGINE, Reading
from tests.analysis.sweeps import answered, fill
from tests.results.trials import MEMORY

MOVED = {"moved_turns": 3.0, "restarted_requests": 2.0, "replica_failures": 1.0}
TTFT = {("affinity", "10"): 5.0, ("affinity", "100"): 7.0, ("random", "10"): 20.0, ("random", "100"): 30.0}


def turns_of(waits: float, hit: int, received: int = 0) -> list[Any]:
    """Two conversations of two turns; the second finds `hit` of 100 tokens of history."""
    turns = []
    for session in "ab":
        first = answered(session, 1, waits, history=0, gpu=0, cpu=0)
        second = answered(session, 2, 2 * waits, history=100, gpu=hit, cpu=0)
        second.received_bytes = received
        turns += [first, second]
    return turns


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def cluster_sweep(failure_s: list[str] | None = None) -> Source:
    axes = {"hardware.failure_s": failure_s} if failure_s else {}
    axes |= {"hardware.router": ["affinity", "random"], "hardware.replicas": ["100", "10"], "baseline": ["pensieve"]}
    store = ResultsStore(MEMORY)
    source = fill(
        store, axes, lambda at, seed: turns_of(TTFT[at["hardware.router"], at["hardware.replicas"]], 90),
        lambda at, seed: MOVED,
    )  # fmt: skip
    for trial in source.trials:
        replicas = int(trial.config["hardware"]["replicas"])
        for at_s, fullest, under_way in ((0.0, 2.0, 4.0), (1.0, 4.0, 8.0)):
            store.add_samples(
                trial.id,
                [
                    Reading(at_s, ENGINE, "fullest_replica", fullest * replicas / 10, "requests"),
                    Reading(at_s, ENGINE, "requests_under_way", under_way, "requests"),
                ],
            )
    return source


def test_each_router_has_a_line_over_the_replicas(tmp_path: Path, drawn: Any) -> None:
    source = cluster_sweep()
    assert cluster.applies(source)
    [drawing] = cluster.draw(source, tmp_path)
    found = {(row["router"], row["replicas"]): row for row in rows(drawing.csv)}
    assert {key: float(row["ttft_ms_p50"]) for key, row in found.items()} == TTFT, "the lower two of four"
    assert {key: float(row["ttft_ms_p99"]) for key, row in found.items()} == {key: 2 * ms for key, ms in TTFT.items()}
    assert {float(row["recomputed_pct"]) for row in found.values()} == {10.0}
    # By hand: the fullest has (2 + 4) / 2 = 3 of 10 replicas, or 30 of 100, and the mean is 6 / 10, or 6 / 100.
    assert {key[1]: float(row["skew"]) for key, row in found.items()} == {
        "10": pytest.approx(5.0),
        "100": pytest.approx(500.0),
    }
    assert {float(row["moved_turns"]) for row in found.values()} == {6.0}, "of two seeds"
    assert not drawn["cluster"].clipped


@pytest.mark.parametrize("figure", [cluster, replica_routing], ids=lambda figure: figure.name)
def test_the_title_says_that_replicas_fail(figure: Figure, tmp_path: Path, drawn: Any) -> None:
    [plain] = figure.draw(cluster_sweep(), tmp_path)
    assert plain.title == figure.title
    for drawing, mean in zip(figure.draw(cluster_sweep(failure_s=["60", "300"]), tmp_path), (60, 300), strict=True):
        assert drawing.title == f"{figure.title}, each replica failing every {mean} s or so"
        assert drawing.caption.startswith(drawing.title)
    assert not drawn[figure.name].clipped


def test_trials_without_readings_of_their_replicas_are_named() -> None:
    axes = {"hardware.router": ["affinity"], "hardware.replicas": ["1", "10"], "baseline": ["pensieve"]}
    source = fill(ResultsStore(MEMORY), axes, lambda at, seed: turns_of(5.0, 90), lambda at, seed: MOVED)
    with pytest.raises(MissingSeries, match="no readings"):
        list(cluster.plots(source))


def test_each_way_to_decide_has_a_line_over_the_networks(tmp_path: Path, drawn: Any) -> None:
    waits = {("never", "10"): 40.0, ("never", "100"): 40.0, ("always", "10"): 90.0, ("always", "100"): 20.0}
    axes = {"hardware.migration": ["never", "always"], "hardware.network_gbps": ["100", "10"], "baseline": ["pensieve"]}
    source = fill(
        ResultsStore(MEMORY), axes,
        lambda at, seed: turns_of(
            waits[at["hardware.migration"], at["hardware.network_gbps"]] / 2, 50,
            received=1000 * (at["hardware.migration"] == "always"),
        ),
    )  # fmt: skip
    assert migration.applies(source) and not cluster.applies(source)
    [drawing] = migration.draw(source, tmp_path)
    found = {(row["migration"], row["network_gbps"].removesuffix(".0")): row for row in rows(drawing.csv)}
    assert {key: float(row["ttft_ms_mean"]) for key, row in found.items()} == waits, "first turns have no history"
    assert {key[0]: float(row["received_bytes_per_turn"]) for key, row in found.items()} == {"never": 0, "always": 1000}
    assert not drawn["migration"].clipped
