"""Made-up sweeps of baselines, and what is told of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import SweepTable, sweep_table
from pensieve.serve.record import TurnRecord
from tests.results.trials import MEMORY, add_trial, conversation_turns, open_sweep

FLAT = [40.0, 40.0, 40.0]
RISING = [40.0, 80.0, 160.0]
CHANCE = [0.9, 1.2, 1.0, 1.1, 0.8, 1.05, 0.95]


def turns(ttft_ms: Sequence[float], factor: float = 1.0, queue_share: float = 0.1) -> list[TurnRecord]:
    made = conversation_turns([factor * ms for ms in ttft_ms])
    for turn in made:
        assert turn.ttft_ms is not None
        turn.queue_ms = queue_share * turn.ttft_ms
    return made


def told(*trials: dict[str, Any], seeds: int = 5, **axes: str) -> SweepTable:
    """The table of a sweep of these baselines, each run with every seed; `ttft` rises with chance by seed, `turns` are taken
    as they are."""
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, seed="0,1,2,3,4", **axes)
    job = count()
    for seed in range(seeds):
        for number, given in enumerate(trials):
            fields = dict(given)
            chance = CHANCE[(seed + 2 * number) % len(CHANCE)]
            own = fields.pop("turns", None) or turns(fields.pop("ttft"), chance, fields.pop("queue", 0.1))
            statuses = fields.pop("statuses", {})
            trial = add_trial(
                store, sweep, next(job), fields.pop("baseline"), own, fields.pop("metrics", None), seed=seed, **fields
            )
            store.add_metrics(trial, [MetricValue("turns", n, status) for status, n in statuses.items()])
    return sweep_table(store, sweep)


def values_of(table: SweepTable, code: str) -> Mapping[str, Any] | None:
    """What the note of this code names; None where the sweep has none."""
    found = [note for note in table.notes if note.code == code]
    assert len(found) < 2
    return found[0].values if found else None


def where(table: SweepTable, code: str) -> str | None:
    values = values_of(table, code)
    return None if values is None else values["where"]
