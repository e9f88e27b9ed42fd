"""A policy's choices do not hang on how fast or how busy the machine is: one order of requests at five speeds."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from pensieve.core.plan import CPU, GPU, Moved, StepPlan, StepResult
from pensieve.core.policies.conversation_lru import ConversationLru
from pensieve.core.policies.fifo import Fifo
from pensieve.core.policies.lru import Lru
from pensieve.core.policies.retention_value import RetentionValue
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.plugins.policies.adaptive_retention import AdaptiveRetention
from pensieve.plugins.policies.learned_return import LearnedReturn
from pensieve.serve.systems import profiling
from pensieve.serve.systems.inline_system import InlineSystem
from pensieve.sim.worker import SimulatedWorker, VirtualClock
from tests.baselines.systems import parts
from tests.simulated import MACHINE, MODEL, request, run

SPEEDS = (0.1, 0.5, 1.0, 2.0, 20.0)
CONVERSATIONS, TURNS, MESSAGE, REPLY = 10, 5, 24, 4
CPU_MACHINE = replace(MACHINE, simulated=False, device="cpu")


class BusyCpu(SimulatedWorker):
    """As on a CPU: a copy is done when the call returns, and the forward begins after it. Each takes longer by chance, as
    beside other programs."""

    def __init__(self, hardware, clock, seed):
        super().__init__(MODEL, hardware, clock, 4)
        self._rng, self._late_s = random.Random(seed), 0.0 if seed == 0 else hardware.step_overhead_s

    def _pass_s(self, seconds):
        self._clock.advance_to(self._clock.now_ns() + round(1e9 * seconds))

    def _perform(self, plan):
        self._pass_s(self._late_s * self._rng.expovariate(0.2))
        for target in (GPU, CPU):
            blocks = sum(len(move.src) for move in plan.moves if move.target == target)
            self._pass_s(self.cost.transfer_s(blocks, target == GPU))
        result = super()._perform(StepPlan(plan.step, plan.rows, plan.tables))
        return StepResult(
            plan.step, result.tokens, ended_ns=result.ended_ns, moved=tuple(Moved(m.ticket) for m in plan.moves)
        )


class MeasuredSystem(InlineSystem):
    """Its prices are measured when it starts, as on a real machine."""

    def _prices(self, report):
        profiling._known.clear()
        return profiling.profile_of(self._worker, self.clock, 4, 256, MODEL.max_context, 64, {}, 512)


def kept(policy, speed, seed):
    """Where each conversation's chunks are after each turn, all asked in strict turn; and the share of history found."""
    rates = {name: getattr(MACHINE, name) * speed for name in ("flops", "memory_bw", "h2d_bw", "d2h_bw")}
    hardware = replace(CPU_MACHINE, **rates, step_overhead_s=MACHINE.step_overhead_s / speed)
    clock = VirtualClock()
    settings = SchedulerSettings(copy_ahead="auto", max_batch_requests=1)
    changed = parts(hardware=hardware, policy=policy, scheduler=settings, gpu_blocks=128, cpu_blocks=128)
    system = MeasuredSystem(worker=BusyCpu(hardware, clock, seed), clock=clock, **changed)
    system.start()
    engine, places, found, history = system.engine, [], 0, 0
    for number in range(CONVERSATIONS * TURNS):
        name = str(number % CONVERSATIONS)
        message = request(number, name, MESSAGE, REPLY, turn=1 + number // CONVERSATIONS)
        held = engine.cache.sessions.get(name)
        engine.submit(message if held is None else replace(message, prompt=held.tokens + message.prompt))
        turn = run(engine)[number]
        found += (turn.gpu_hit_tokens or 0) + (turn.cpu_hit_tokens or 0)
        history += turn.history_tokens or 0
        places.append(" ".join(engine.cache.places(one) for one in engine.cache.sessions.values()))
    return places, found / history


BY_ORDER = [LearnedReturn, Lru, Fifo, ConversationLru]
BY_SECONDS = [RetentionValue, AdaptiveRetention, partial(LearnedReturn, guarded=False)]
"""Their formulas have idle seconds or measured prices."""


@pytest.mark.parametrize("policy", BY_ORDER + BY_SECONDS)
def test_one_order_of_requests_is_evicted_alike_at_five_speeds(policy):
    (first, share), *others = [kept(policy, speed, seed) for seed, speed in enumerate(SPEEDS)]
    assert "-" in first[-1], "something was lost"
    assert [found for _, found in others] == pytest.approx([share] * 4, abs=0.03)
    if policy in BY_ORDER:
        assert all(places == first for places, _ in others)
