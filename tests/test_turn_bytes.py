"""Bytes a turn: what was copied because that turn waited for it, against the engine's own totals and its plans."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from pensieve.core.plan import CPU, GPU, StepPlan, StepResult
from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.workload.chat import ChatWorkload
from pensieve.sim.worker import SimulatedWorker
from tests.composed import replayed
from tests.scripted import ScriptedSystem, context
from tests.simulated import MODEL, make_engine, request, run

BLOCK_BYTES = 4 * MODEL.kv_bytes_per_token
BUSY = ("workload=chat_busy", "cache.gpu=2304 tokens", "cache.cpu=4096 tokens")


class Planned(SimulatedWorker):
    """Keeps the plans it performed; fails those it is told to."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self.__dict__.update(worker.__dict__)
        self.plans: list[StepPlan] = []
        self.failing: set[int | None] = set()

    def _perform(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if plan.step in self.failing:
            return replace(super()._perform(replace(plan, moves=())), error="It broke.")
        return super()._perform(plan)


def pressed(failing=None):
    """Six conversations of three turns, one at a time, in two tiers that do not hold them all."""
    engine = make_engine(gpu_blocks=16, cpu_blocks=8)
    engine.worker = worker = Planned(engine.worker)
    worker.failing = {failing}
    found = {}
    for number, (turn, session) in enumerate(product((1, 2, 3), "abcdef"), start=1):
        engine.say(request(number, session, tokens=9, output=4, turn=turn))
        found |= run(engine)
    return engine, worker, found


def test_a_preempted_turn_pays_for_its_way_out_and_back():
    engine = make_engine(gpu_blocks=12, cpu_blocks=24)
    engine.worker = worker = Planned(engine.worker)
    for number, session in enumerate("abc", start=1):
        engine.say(request(number, session, 6, 24))
    found = run(engine)
    assert engine.scheduler.counters.preempted
    urgent = sum(len(move.src) for plan in worker.plans for move in plan.moves if move.target == CPU and move.urgent)
    assert sum(turn.d2h_bytes for turn in found.values()) == urgent * BLOCK_BYTES > 0
    resumed = [turn for turn in found.values() if turn.resumed_swapped_tokens]
    assert resumed and all(turn.d2h_bytes and turn.h2d_bytes for turn in resumed)
    assert all(turn.h2d_bytes == 0 for turn in found.values() if turn not in resumed)


def test_what_a_failed_step_moved_is_not_known():
    _, worker, found = pressed()
    step = next(plan.step for plan in worker.plans if any(move.target == GPU for move in plan.moves))
    number = next(number for number, turn in found.items() if turn.h2d_bytes)
    _, _, found = pressed(failing=step)
    assert (found[number].status, found[number].h2d_bytes) == ("failed", None)
    assert all(turn.h2d_bytes is not None for other, turn in found.items() if other != number)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("baseline", ["pensieve", "gpu_only", "stateless", "prefix_cache"])
def test_the_turns_bytes_are_within_the_engines(baseline, depth):
    record, system = replayed(*BUSY, f"baseline={baseline}", f"hardware.depth={depth}")
    totals, moved = system.counters(), Counter()
    for turn in record.turns:
        moved.update(h2d_bytes=turn.h2d_bytes, d2h_bytes=turn.d2h_bytes)
    assert moved["h2d_bytes"] == totals["h2d_bytes"], "whatever comes in is for somebody"
    assert moved["d2h_bytes"] <= totals["d2h_bytes"]
    assert bool(totals["h2d_bytes"]) is bool(totals["d2h_bytes"]) is (baseline == "pensieve")
    found = {metric.name: metric.value for metric in summarise(record.measurement)}
    measured = [turn for turn in record.turns if turn.phase == "chat"]
    assert found["h2d_bytes"] == sum(turn.h2d_bytes for turn in measured)
    assert found["d2h_bytes"] >= sum(turn.d2h_bytes for turn in measured)


def test_bytes_that_nobody_counted_have_no_value():
    for record in (replayed(*BUSY)[0], replay(ScriptedSystem(), ChatWorkload(context()))):
        found = {metric.name: metric.value for metric in summarise(record.measurement)}
        assert {found[f"{way}_bytes{per}"] for way in ("sent", "received") for per in ("", "_per_token")} == {None}
    assert (found["h2d_bytes"], found["d2h_bytes"]) == (None, None)
