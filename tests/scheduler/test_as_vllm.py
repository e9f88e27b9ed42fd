"""What vLLM's scheduler does otherwise than the paper's: who is admitted, and what a shortage of blocks costs."""

from __future__ import annotations

from pensieve.cache.prefix import PrefixCache
from tests.simulated import make_engine, request, run


def admitted_with_the_first(beyond_budget: bool) -> int:
    engine = make_engine(gpu_blocks=64, max_batch_tokens=8, admission_reserve=0.0, admit_beyond_budget=beyond_budget)
    for number, session in enumerate("abc"):
        engine.submit(request(number, session, 20, 2))
    engine.step(None)
    found = len(engine.scheduler.running)
    assert len(run(engine)) == 3
    return found


def test_nobody_is_admitted_who_could_not_compute_yet():
    assert admitted_with_the_first(beyond_budget=False) == 1
    assert admitted_with_the_first(beyond_budget=True) == 3


def test_prompts_that_leave_room_in_the_iteration_are_joined():
    engine = make_engine(gpu_blocks=64, max_batch_tokens=8, admission_reserve=0.0, admit_beyond_budget=False)
    for number, session in enumerate("abc"):
        engine.submit(request(number, session, 5, 2))
    engine.step(None)
    assert len(engine.scheduler.running) == 2, "five positions and three more"


def test_a_plan_is_not_made_for_those_alone_who_have_their_blocks():
    """Two requests that reach a block's end together in a full cache: with a plan in flight none is made for a part of them,
    and then one is preempted."""
    engine = make_engine(gpu_blocks=6, cpu_blocks=0, cache=PrefixCache, depth=2, admission_reserve=0.0)
    rows: list[int] = []
    launch = engine.worker.launch
    engine.worker.launch = lambda plan: (rows.append(len(plan.rows)), launch(plan))[1]  # type: ignore[method-assign]
    engine.submit(request(0, "a", 7, 9))
    engine.submit(request(1, "b", 7, 9))
    turns = run(engine)
    assert [turns[number].output_tokens for number in (0, 1)] == [9, 9]
    assert engine.scheduler.counters.preempted == 1
    first = rows.index(1)
    assert 2 not in rows[first:], "after the preemption each runs alone; no iteration before served one of the two"
