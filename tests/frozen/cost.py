"""What a plan and a row cost on the host: scheduler, cache and engine, without the worker.

With checkouts as arguments each is measured in a process of its own, in turns, so that a busy machine slows all alike.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.composed import replayed
from tests.frozen import play
from tests.frozen.play import Play
from tests.frozen.scenarios import CHAT, TOY
from tests.frozen.workers import Stepwise

ROUNDS = 5
BATCHES = (1, 8, 32)
PLANS = 150
LARGE = (
    *TOY, "cache.chunk_tokens=32", "cache.gpu='32768 tokens'", "cache.cpu='32768 tokens'", "scheduler.max_batch_tokens=4096",
    "scheduler.max_batch_requests=64",
)  # fmt: skip


class Timed(Stepwise):
    """own_ns: spent in the worker."""

    own_ns = plans = 0

    def launch(self, plan: Any) -> None:
        began = time.process_time_ns()
        super().launch(plan)
        self.plans += 1
        self.own_ns += time.process_time_ns() - began

    def collect(self, until_ns: int | None) -> Any:
        began = time.process_time_ns()
        result = super().collect(until_ns)
        self.own_ns += time.process_time_ns() - began
        return result


def plan_us(requests: int) -> float:
    """Microseconds of a plan in which so many requests decode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(play.WORKERS, "timed", Timed)
        driver = Play(LARGE, "timed")
    worker: Any = driver._worker
    for number in range(requests):
        driver.ask(f"c{number}", 64, PLANS)
    driver.run(0.0)
    plans, own, began = worker.plans, worker.own_ns, time.process_time_ns()
    while driver.system.poll(None):  # not by driver.run, which digests each event
        pass
    took = time.process_time_ns() - began - (worker.own_ns - own)
    driver.system.close()
    return took / (worker.plans - plans) / 1e3


def measured() -> dict[str, float]:
    """Microseconds: of plans of BATCHES, of a row more, and of a simulated turn with all that a trial does for it."""
    plans = {batch: min(plan_us(batch) for _ in range(3)) for batch in BATCHES}
    began = time.process_time()
    record, _ = replayed(*CHAT, "workload.conversations=60", "tracking=off")
    turn_us = (time.process_time() - began) / len(record.turns) * 1e6
    slope = (plans[BATCHES[-1]] - plans[BATCHES[0]]) / (BATCHES[-1] - BATCHES[0])
    return {**{f"plan of {batch}": us for batch, us in plans.items()}, "row": slope, "simulated turn": turn_us}


def report(checkouts: Sequence[Path]) -> str:
    """A table in microseconds, medians of ROUNDS."""
    found: dict[Path, list[dict[str, float]]] = {one: [] for one in checkouts}
    for _ in range(ROUNDS):
        for one in checkouts:
            words = [sys.executable, "-m", "tests.frozen", "--cost-once"]
            done = subprocess.run(words, cwd=one, capture_output=True, text=True, check=True)
            found[one].append(json.loads(done.stdout))
    lines = [f"{'us, median of ' + str(ROUNDS):24}" + "".join(f"{one.name:>16}" for one in checkouts)]
    lines += [
        f"{name:24}" + "".join(f"{median(one[name] for one in rounds):16.1f}" for rounds in found.values())
        for name in found[checkouts[0]][0]
    ]
    return "\n".join(lines)
