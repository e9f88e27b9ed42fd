"""Affinity against random routing, drawn: checked by hand against what went into the database, and in a simulated cluster."""

from __future__ import annotations

import csv
from statistics import median
from typing import Any

import pytest

from analysis.cluster import replica_routing
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.store import ResultsStore
from tests.analysis.sweeps import answered, fill
from tests.baselines.test_cluster_system import run
from tests.results.trials import MEMORY

FOUND = {("affinity", "1"): 100, ("affinity", "4"): 90, ("random", "1"): 100, ("random", "4"): 40}
"""Of 100 tokens of history, on the GPU; a token that is missing takes 0.1 ms."""


def swept(found: Any) -> Source:
    def turns(at: Any, seed: int) -> Any:
        hit = found[at["hardware.router"], at["hardware.replicas"]]
        return [
            answered(
                name, turn, 5.0 + (turn > 1) * (100 - hit) / 10, history=100 * (turn > 1), gpu=hit * (turn > 1), cpu=0
            )
            for name in "ab"
            for turn in (1, 2, 3)
        ]

    axes = {
        "hardware.router": list(dict.fromkeys(router for router, _ in found)),
        "hardware.replicas": list(dict.fromkeys(replicas for _, replicas in found)),
        "baseline": ["pensieve"],
    }
    return fill(ResultsStore(MEMORY), axes, turns, lambda at, seed: {}, summary=True)


def test_each_router_has_a_line_over_the_replicas(tmp_path: Any, drawn: Any) -> None:
    source = swept(FOUND)
    assert replica_routing.applies(source)
    [drawing] = replica_routing.draw(source, tmp_path)
    with drawing.csv.open(newline="") as file:
        rows = {(row["router"], row["replicas"]): row for row in csv.DictReader(file)}
    assert {key: float(row["hit_pct"]) for key, row in rows.items()} == FOUND
    expected = {key: 5.0 + (100 - hit) / 10 for key, hit in FOUND.items()}
    assert {key: float(row["ttft_ms_p50"]) for key, row in rows.items()} == expected, "first turns have no history"
    shown = drawn["replica_routing"]
    assert not shown.clipped
    lines = [
        (str(line.get_gid()), [(x, y) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)])
        for line in shown.figure.axes[0].get_lines()
    ]
    assert dict(lines) == {"affinity": [(1.0, 100.0), (4.0, 90.0)], "random": [(1.0, 100.0), (4.0, 40.0)]}


def test_one_router_is_no_comparison() -> None:
    alone = swept({("affinity", "1"): 100, ("affinity", "4"): 100})
    assert not replica_routing.applies(alone)


def test_a_machine_without_replicas_beside_a_simulated_one_is_no_comparison() -> None:
    """As in experiment=machine/fidelity: hardware=local has neither router nor replicas, a simulated machine one of each."""
    beside = fill(
        ResultsStore(MEMORY),
        {"hardware.router": ["null", "single"], "hardware.replicas": ["null", "1"], "baseline": ["pensieve"]},
        lambda at, seed: [answered("a", 1, 5.0)],
        lambda at, seed: {},
        summary=True,
    )
    assert len(beside.swept("hardware.router")) > 1
    assert not beside.compares("hardware.router")
    assert not replica_routing.applies(beside)


def test_a_sweep_without_history_says_so() -> None:
    source = fill(
        ResultsStore(MEMORY),
        {"hardware.router": ["affinity", "random"], "hardware.replicas": ["2"], "baseline": ["pensieve"]},
        lambda at, seed: [answered("a", 1, 5.0)],
        lambda at, seed: {},
        summary=True,
    )
    with pytest.raises(MissingSeries, match="history"):
        list(replica_routing.plots(source))


def test_affinity_is_worth_what_the_turns_say_and_can_cost_where_nothing_is_kept() -> None:
    """The figure's claim from raw turns: with four replicas; with one, where no router can matter; and with stateless
    replicas and turns that come together, where the hash loads one replica more than another and finds nothing for it."""

    def first_tokens(turns: Any) -> float:
        return median(turn.ttft_ms for turn in turns if turn.history_tokens)

    def of(router: str, *overrides: str) -> Any:
        return run(f"hardware.router={router}", *overrides)[0]

    roomy = ("hardware.replicas=4", "cache.gpu='4096 tokens'")
    with_it, without = of("affinity", *roomy), of("random", *roomy)
    assert sum(turn.recomputed_tokens for turn in with_it) == 0 < sum(turn.recomputed_tokens for turn in without)
    assert first_tokens(with_it) < first_tokens(without)
    one = ("hardware.replicas=1", "cache.gpu='4096 tokens'")
    assert [turn.ttft_ms for turn in of("affinity", *one)] == [turn.ttft_ms for turn in of("random", *one)]
    crowd = (*roomy, "baseline=stateless", "workload.think_time_s=0")
    hashed, spread = of("affinity", *crowd), of("least_loaded", *crowd)
    assert sum(turn.ttft_ms for turn in hashed) > sum(turn.ttft_ms for turn in spread)
