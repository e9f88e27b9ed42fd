"""On simulated hardware: who returns from the CPU loads beside the decodes of others, and joins them when nearly there."""

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
from tests.invariants import check_cache
from tests.simulated import TalkingEngine, policy_context

CHUNK = 32


def serve(load_apart, history, returning, depth=1, decoders=16):
    """`decoders` chats write 400 tokens each; every 250 ms a conversation of `history` tokens returns from the CPU tier.
    Returns the milliseconds between tokens of those that decode all along, those to the first token of who returns, and the
    tokens of each request."""
    plan = plan_trial(checked("model=llama3_8b", "hardware=sim_a100_80g", "cache.gpu=8GiB", "cache.cpu=64GiB"))
    model, hardware, clock = plan.model, plan.hardware, VirtualClock()
    worker = SimulatedWorker(model, hardware, clock, CHUNK, depth)
    worker.computes = True  # one iteration at a time, since gaps between tokens are read off the clock
    cost, one = Roofline(model, hardware, CHUNK), history // CHUNK + 4
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
        cache=cache, settings=settings, worker=worker, clock=clock, max_context=model.max_context, facts=Books(CHUNK),
        strategies=strategies_of(settings, CHUNK, cost),
    )  # fmt: skip

    def say(number, name, tokens, output):
        engine.say(Request(number, name, 1, tokens_of(range(tokens), model.vocab), Length(output)))

    for number in range(returning + fillers):
        say(number, f"r{number}", history, 1)
        while engine.busy:
            engine.step(None)
    began, last, asked = clock.now_ns(), {}, {}
    gaps_ms, first_ms, tokens = [], [], {}
    for number in range(decoders):
        say(100 + number, f"d{number}", 200 + number, 400)
    due = [(began + round((0.5 + 0.25 * i) * 1e9), i) for i in range(returning)]
    while engine.busy or due:
        while due and due[0][0] <= clock.now_ns():
            _, i = due.pop(0)
            asked[200 + i] = clock.now_ns()
            say(200 + i, f"r{i}", 40, 20)
        if not engine.busy:
            clock.advance_to(due[0][0])
            continue
        for event in engine.step(None):
            number, now = event.request_id, clock.now_ns()
            if event.turn is not None:
                assert event.turn.status == "completed"
                tokens[number] = list(event.turn.token_ids)
                assert number < 200 or event.turn.cpu_hit_tokens > 0.9 * history, "it came from the CPU tier"
            elif number >= 200 and event.kind == "first_token":
                first_ms.append((now - asked[number]) / 1e6)
            elif number < 200 and event.kind in ("first_token", "token"):
                gaps_ms += [(now - last[number]) / 1e6] if number in last else []
                last[number] = now
    check_cache(cache)
    return gaps_ms, first_ms, tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_load_holds_up_nobody_who_decodes(depth):
    """7,900 tokens are 1 GiB, 41 ms of the link; an iteration of the decodes is about 12 ms, and 17 with who joins."""
    (together, first, tokens), (apart, later, same) = (serve(how, 7900, 4, depth) for how in (False, True))
    assert np.percentile(together, 99) > 2.5 * np.percentile(together, 50)
    assert np.percentile(apart, 99) < 0.5 * np.percentile(together, 99)
    assert np.mean(later) < 1.25 * np.mean(first), "who returns pays with one iteration at most"
    assert tokens == same


def test_a_load_that_fits_an_iteration_is_left_alone():
    together, apart = (serve(how, 500, 3) for how in (False, True))
    assert apart == together
