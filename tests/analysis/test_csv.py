"""What stands in the CSV of a figure, computed again from the rows of the database in plain Python."""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from statistics import fmean

import pytest

from analysis.figures import registry
from tests.analysis.sweeps import answered, fill

NAMES = ("pensieve", "gpu_only", "stateless")


def chat(store, axes, metrics=lambda at, seed: {}):
    """Conversations of four turns whose times and hits have no pattern."""
    chance = random.Random(3)

    def turns(at, seed):
        for session in "abc":
            for number in (1, 2, 3, 4):
                history = 60 * (number - 1)
                gpu = chance.randint(0, history)
                cpu = chance.randint(0, history - gpu)
                columns = {"history": history, "gpu": gpu, "cpu": cpu, "latency_ms": chance.uniform(40, 400)}
                yield answered(session, number, chance.uniform(10, 90), tokens=chance.randint(1, 9), **columns)
        yield answered("late", 1, 999.0, status="timeout")
        yield answered("first", 1, 999.0, phase="warmup")

    return fill(store, axes, lambda at, seed: list(turns(at, seed)), metrics, summary=True, slo={"slo.ttft_ms": "200"})


def rows_of(store, **where):
    """The turns that count, as the schema has them: completed, and neither warm-up nor re-warm-up."""
    found = "SELECT turn.*, trial.baseline, trial.seed, trial.config FROM turn JOIN trial ON trial.id = turn.trial_id"
    with store.database.reading() as connection:
        rows = connection.exec_driver_sql(f"{found} ORDER BY turn.trial_id, turn.id").mappings().all()
    counted = [row for row in rows if row["status"] == "completed" and row["phase"] not in ("warmup", "rewarm")]
    return [row for row in counted if all(row[name] == value for name, value in where.items())]


@pytest.fixture
def written(drawn, tmp_path):
    def draw(name, source):
        [drawing] = registry.FIGURES[name].draw(source, tmp_path)
        with drawing.csv.open(newline="") as file:
            return list(csv.DictReader(file))

    return draw


def test_speed_ups_are_paired_by_conversation(store, written):
    source = chat(store, {"baseline": NAMES})
    rows = written("speedup", source)
    assert [row["baseline"] for row in rows] == ["pensieve", "gpu_only"]
    for row, column in ((row, column) for row in rows for column in ("turn_1", "average")):
        turn = {"turn": 1} if column == "turn_1" else {}
        means = {}
        for name in (row["baseline"], "stateless"):
            times = defaultdict(list)
            for one in rows_of(store, baseline=name, **turn):
                times[one["seed"], one["session"]].append(one["ttft_ms"])
            means[name] = {key: fmean(found) for key, found in times.items()}
        logs = [math.log(means["stateless"][key] / own) for key, own in means[row["baseline"]].items()]
        assert float(row[column]) == pytest.approx(math.exp(fmean(logs)))


def test_shares_of_history(store, written):
    source = chat(store, {"baseline": NAMES})
    for row in written("hit_rates", source):
        turns = rows_of(store, baseline=row["baseline"])
        history = sum(one["history_tokens"] for one in turns)
        for column, tokens in (
            ("gpu_hit_pct", "gpu_hit_tokens"), ("cpu_hit_pct", "cpu_hit_tokens"), ("recomputed_pct", "recomputed_tokens")
        ):  # fmt: skip
            assert float(row[column]) == pytest.approx(100 * sum(one[tokens] for one in turns) / history)
