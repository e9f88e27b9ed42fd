"""Scheduler and cache work a step: flat in idle and waiting conversations, counted in calls so that no noise can blur it."""

from __future__ import annotations

import sys
import time
from types import FrameType

from pensieve.engine import Engine
from tests.simulated import make_engine, request

STEPS = 100


def calls_a_step(engine: Engine, first: int, waiting: int = 0) -> float:
    """Python calls a decode step of a batch of 8, while `waiting` requests stand behind it."""
    for number in range(8):
        engine.submit(request(first + number, f"busy{first}-{number}", tokens=40, output=160))
    for number in range(waiting):
        engine.submit(request(first + 8 + number, f"waiting{number}", tokens=8, output=1))
    for _ in range(20):
        engine.step(None)
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            engine.step(None)
    finally:
        sys.setprofile(None)
    assert len(engine.scheduler.running) == 8
    return calls / STEPS


def engine_with(idle: int) -> Engine:
    engine = make_engine(gpu_blocks=idle + 4000, cpu_blocks=idle, chunk_tokens=16, max_batch_requests=8)
    for number in range(idle):
        engine.submit(request(number, f"idle{number}", tokens=8, output=1))
        while engine.busy:
            engine.step(None)
    return engine


def test_a_step_does_not_grow_with_who_is_idle_or_waits() -> None:
    alone = calls_a_step(engine_with(idle=10), 10_000)
    crowded = calls_a_step(engine_with(idle=3000), 10_000)
    queued = calls_a_step(engine_with(idle=10), 10_000, waiting=2000)
    assert alone < 500, "at about 0.1 us a call, a step of eight stays far below 0.3 ms"
    assert abs(crowded - alone) < 0.1 * alone
    assert abs(queued - alone) < 0.2 * alone


def test_the_engine_reports_its_own_time() -> None:
    began = time.perf_counter_ns()
    engine = engine_with(idle=10)
    calls_a_step(engine, 10_000)
    assert 0 < engine.counters.schedule_ns < time.perf_counter_ns() - began
