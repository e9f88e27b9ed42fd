"""Scheduler and cache work a step: flat in idle and waiting conversations, counted in calls so that no noise can blur it.
What numpy does within a call is not seen: docs/results/speed.md has the time of a choice by idle conversations."""

from pensieve.core.engine import MemoryLimits
from tests.crossings import calls_of
from tests.simulated import make_engine, request

STEPS = 100


def calls_a_step(engine, first, waiting=0):
    """Python calls a decode step of a batch of 8, while `waiting` requests stand behind it."""
    for number in range(8):
        engine.say(request(first + number, f"busy{first}-{number}", tokens=40, output=160))
    for number in range(waiting):
        engine.say(request(first + 8 + number, f"waiting{number}", tokens=8, output=1))
    for _ in range(20):
        engine.step(None)

    def steps():
        for _ in range(STEPS):
            engine.step(None)

    calls = calls_of(steps)
    assert len(engine.scheduler.running) == 8
    return calls / STEPS


def engine_with(idle, **settings):
    limits = MemoryLimits(ttl_s=1e6, tokens=10**9)
    engine = make_engine(idle + 4000, idle, chunk_tokens=16, limits=limits, max_batch_requests=8, **settings)
    for number in range(idle):
        engine.say(request(number, f"idle{number}", tokens=8, output=1))
        while engine.busy:
            engine.step(None)
    return engine


def test_a_step_does_not_grow_with_who_is_idle_or_waits():
    alone = calls_a_step(engine_with(idle=10), 10_000)
    crowded = calls_a_step(engine_with(idle=3000), 10_000)
    queued = calls_a_step(engine_with(idle=10), 10_000, waiting=2000)
    assert alone < 500, "at about 0.1 us a call, a step of eight stays far below 0.3 ms"
    assert abs(crowded - alone) < 0.1 * alone
    assert abs(queued - alone) < 0.2 * alone
