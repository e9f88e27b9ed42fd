import random
from array import array
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.engine import Engine
from pensieve.plugins.caches.restore import RestoreTimes, RestoringCache
from pensieve.serve.record import TurnRecord
from pensieve.sim.roofline import Roofline
from pensieve.specs import HardwareSpec
from tests.invariants import check_cache
from tests.simulated import MACHINE, MODEL, make_engine, request, run


@dataclass(frozen=True)
class Cost:
    """Seconds of a chunk: by context length to compute, alike to load."""

    load: float
    context: float
    step: float

    def recompute_s(self, context_tokens: int) -> float:
        return 1.0 + self.context * context_tokens

    def step_s(self) -> float:
        return self.step

    def weights_s(self) -> float:
        return 0.0

    def load_s(self) -> float:
        return self.load

    def describe(self) -> dict[str, Any]:
        return {}


def position_by_position(model: RestoreTimes, missing: Any, on_cpu: Any, recomputed: int, backlog: int) -> float:
    """Iteration after iteration; the first one with a position above a loaded chunk waits for the loads, layer by layer."""
    positions = (p for start, stop in (*missing, *on_cpu[:recomputed]) for p in range(start, stop))
    work, loads, cost, now = sorted(positions), len(on_cpu) - recomputed, model.cost, 0.0
    for at in range(0, len(work), model.batch_tokens):
        some = work[at : at + model.batch_tokens]
        took = cost.step_s() + sum(cost.recompute_s(4 * (p // 4) + 4) / 4 for p in some)
        if loads and some[-1] > on_cpu[recomputed][0]:
            first = max(now, (backlog + loads / model.layers) * cost.load_s())
            now, loads = max(first + took, (backlog + loads) * cost.load_s() + took / model.layers), 0
        else:
            now += took
    return now


def test_every_split_takes_what_its_iterations_take_one_after_the_other() -> None:
    rng = random.Random(5)
    for _ in range(60):
        cost = Cost(rng.choice((0.0, 0.3, 5.0)), rng.choice((0.0, 0.01)), rng.choice((0.0, 3.0)))
        model, count = RestoreTimes(cost, 4, rng.choice((1, 4, 32)), rng.choice((3, 16, 64))), rng.randint(1, 30)
        on_cpu = sorted(rng.sample([(4 * index, 4 * index + 4) for index in range(2 * count)], count))
        free = sorted(set(range(8 * count)) - {p for start, stop in on_cpu for p in range(start, stop)})
        missing = [*((p, p + 1) for p in sorted(rng.sample(free, rng.choice((0, count))))), (8 * count, 8 * count + 9)]
        for recomputed, seconds in enumerate(model.seconds_of_splits(missing, on_cpu, backlog := rng.choice((0, 9)))):
            expected = position_by_position(model, missing, on_cpu, recomputed, backlog)
            assert seconds == pytest.approx(expected, rel=1e-9), (recomputed, count)


def returning(mode: str, hardware: HardwareSpec, tokens: int = 400, budget: int = 32) -> tuple[TurnRecord, Engine]:
    """A conversation whose chunks another one has displaced to CPU returns to an idle machine."""
    blocks = -(-tokens // 4) + 20
    engine = make_engine(blocks, 2 * blocks, cache=partial(RestoringCache, restore=mode), hardware=hardware,
                         max_batch_tokens=budget)  # fmt: skip
    assert isinstance(engine.cache, RestoringCache)
    engine.cache.begin(cost=Roofline(MODEL, hardware, 4), layers=MODEL.layers, batch_tokens=budget)
    run(engine)
    for number, name in ((1, "a"), (2, "b")):
        engine.say(request(number, name, tokens + 8 * number, 2))
        run(engine)
    engine.forget("b")
    asked = request(3, "a", 5, 3, turn=2)
    asked.intended_s = engine.clock.now_s()
    engine.say(asked)
    return run(engine)[3], engine


@pytest.mark.parametrize("h2d_bw", [3e5, 3e6, 3e7])
def test_a_hybrid_restore_saves_what_was_predicted_and_changes_no_token(
    h2d_bw: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[list[float]] = []
    choose = RestoreTimes.choose

    def watched(model: RestoreTimes, missing: Any, on_cpu: Any, backlog: int) -> int:
        best, seconds = choose(model, missing, on_cpu, backlog), model.seconds_of_splits(missing, on_cpu, backlog)
        predicted.append([seconds[n] for n in (best, 0, len(on_cpu))])
        return best

    monkeypatch.setattr(RestoreTimes, "choose", watched)
    hardware = replace(MACHINE, h2d_bw=h2d_bw, step_overhead_s=1e-5, memory_bw=1e12)
    turns = {mode: returning(mode, hardware) for mode in ("load", "hybrid", "recompute")}
    assert len({bytes(turn.token_ids) for turn, _ in turns.values()}) == 1
    for mode, (turn, _) in turns.items():
        assert turn.cpu_hit_tokens and turn.cpu_hit_tokens > 300
        assert turn.recomputed_tokens == 0, "what is computed again although it is on CPU stays a CPU hit"
        most = {"load": 0, "recompute": turn.cpu_hit_tokens, "hybrid": turn.cpu_hit_tokens - 1}[mode]
        assert turn.cpu_recomputed_tokens <= most
        assert (turn.cpu_recomputed_tokens == most) or mode == "hybrid"
    took = {mode: turn.ttft_ms or 0.0 for mode, (turn, _) in turns.items()}
    [(split_s, *either_s)] = predicted
    assert took["hybrid"] <= min(took["load"], took["recompute"]) * 1.001
    saving = 1 - took["hybrid"] / min(took["load"], took["recompute"])
    assert saving >= 0.7 * (1 - split_s / min(either_s))
    if h2d_bw == 3e6:
        assert saving > 0.1


def test_while_a_plan_is_in_flight_truncated_blocks_do_not_count_as_available() -> None:
    """An edit keeps little of a conversation whose clean chunks count as available until they are cut off."""
    engine = make_engine(40, 80, swap_out_start=1.0, swap_out_stop=1.0)
    engine.say(request(1, "a", 60, 2))
    run(engine)
    while engine.step(None) or engine.progressed:
        pass  # copies out what is idle
    cache, session = engine.cache, engine.cache.open("a", 0.0)
    assert isinstance(cache, TwoTierCache) and cache.tiers.clean.chunks == 16
    fits, step = -cache.room.lacking(session, 8, array("i", range(20))), engine.scheduler.counters.steps
    cache.plans(step, step + 1)
    left = -cache.room.lacking(session, 8, array("i", range(20)))
    assert left == fits - 14, "two of its sixteen clean chunks are kept"
    cache.admit(session, 8, request(2, "a", 12, 1).prompt, 1.0)
    check_cache(cache)
    assert cache.room.available == left
