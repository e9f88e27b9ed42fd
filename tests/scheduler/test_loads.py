"""On simulated hardware: who returns from the CPU loads beside the decodes of others, and joins them when nearly there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.policies.lru import Lru
from pensieve.core.request import Length, Request, tokens_of
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.lab.compose.plan import plan_trial
from pensieve.plugins.overlap import strategies_of
from pensieve.serve.books.books import Books
from pensieve.sim.roofline import Roofline
from pensieve.sim.worker import SimulatedWorker, VirtualClock
from tests.composed import checked
from tests.simulated import TalkingEngine, policy_context

CHUNK = 32


@dataclass
class Traffic:
    """gaps_ms: between tokens of those that decode all along. first_ms: time to the first token of those that return."""

    gaps_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def p(self, percent):
        return float(np.percentile(self.gaps_ms, percent))


def machine(name):
    plan = plan_trial(checked("model=llama3_8b", f"hardware={name}", "cache.gpu=8GiB", "cache.cpu=64GiB"))
    return plan.model, plan.hardware


def serve(load_apart, history, decoders=16, returning=8, name="sim_a100_80g", depth=1):
    """`decoders` chats write 400 tokens each; every 250 ms a conversation of `history` tokens returns from the CPU tier."""
    model, hardware = machine(name)
    clock = VirtualClock()
    worker = SimulatedWorker(model, hardware, clock, CHUNK, depth)
    worker.computes = True  # one iteration at a time, since gaps between tokens are read off the clock
    cost = Roofline(model, hardware, CHUNK)
    one = history // CHUNK + 4
    gpu = 2 * one + decoders * 24
    fillers = gpu // one + 2  # they push the others out of the GPU
    cpu = (returning + fillers) * one
    cache = TwoTierCache(
        policy=Lru(policy_context(CHUNK, gpu, cpu)), chunk_tokens=CHUNK, gpu_blocks=gpu, cpu_blocks=cpu
    )
    cache.begin(cost=cost, layers=model.layers, batch_tokens=512)
    worker.start(gpu, cpu)
    settings = SchedulerSettings(max_batch_requests=64, load_apart=load_apart)
    engine = TalkingEngine(
        cache=cache,
        settings=settings,
        worker=worker,
        clock=clock,
        max_context=model.max_context,
        facts=Books(CHUNK),
        strategies=strategies_of(settings, CHUNK, cost),
    )
    traffic = Traffic()

    def drain():
        while engine.busy:
            engine.step(None)

    for number in range(returning + fillers):
        engine.say(Request(number, f"r{number}", 1, tokens_of(range(history), model.vocab), Length(1)))
        drain()

    began, last, asked = clock.now_ns(), {}, {}
    for number in range(decoders):
        engine.say(Request(100 + number, f"d{number}", 1, tokens_of(range(200 + number), model.vocab), Length(400)))
    due = [(began + round((0.5 + 0.25 * i) * 1e9), i) for i in range(returning)]
    while engine.busy or due:
        while due and due[0][0] <= clock.now_ns():
            _, i = due.pop(0)
            asked[200 + i] = clock.now_ns()
            engine.say(Request(200 + i, f"r{i}", 2, tokens_of(range(40), model.vocab), Length(20)))
        if not engine.busy:
            clock.advance_to(due[0][0])
            continue
        for event in engine.step(None):
            now = clock.now_ns()
            if event.turn is not None:
                assert event.turn.status == "completed", event.turn
                traffic.tokens[event.request_id] = list(event.turn.token_ids)
                if event.request_id >= 200:
                    assert event.turn.cpu_hit_tokens > 0.9 * history, "it came from the CPU tier"
            if event.kind in ("first_token", "token"):
                number = event.request_id
                if number < 200:
                    if number in last:
                        traffic.gaps_ms.append((now - last[number]) / 1e6)
                    last[number] = now
                elif event.kind == "first_token":
                    traffic.first_ms.append((now - asked[number]) / 1e6)
    engine.cache.check()
    return traffic


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_load_holds_up_nobody_who_decodes(depth):
    """7,900 tokens are 1 GiB, 41 ms of the link; an iteration of the decodes is about 12 ms, and 17 with who joins."""
    together, apart = (serve(how, 7900, depth=depth, returning=4) for how in (False, True))
    assert together.p(99) > 2.5 * together.p(50)
    assert apart.p(99) < 0.5 * together.p(99)
    assert np.mean(apart.first_ms) < 1.25 * np.mean(together.first_ms), "who returns pays with one iteration at most"
    assert apart.tokens == together.tokens


def test_a_load_that_fits_an_iteration_is_left_alone():
    together, apart = (serve(how, 500, returning=3) for how in (False, True))
    assert (apart.gaps_ms, apart.first_ms) == (together.gaps_ms, together.first_ms)
