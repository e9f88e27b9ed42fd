"""What vLLM's scheduler does otherwise than the paper's: who is admitted, and what a shortage of blocks costs."""

from __future__ import annotations

from pensieve.core.plan import StepPlan
from pensieve.plugins.caches.prefix import PrefixCache
from tests.simulated import make_engine, request, run


def admitted_with_the_first(beyond_budget: bool) -> int:
    engine = make_engine(gpu_blocks=64, max_batch_tokens=8, admission_reserve=0.0, admit_beyond_budget=beyond_budget)
    for number, session in enumerate("abc"):
        engine.say(request(number, session, 20, 2))
    engine.step(None)
    found = len(engine.scheduler.running)
    assert len(run(engine)) == 3
    return found


def test_nobody_is_admitted_who_could_not_compute_yet():
    assert admitted_with_the_first(beyond_budget=False) == 1
    assert admitted_with_the_first(beyond_budget=True) == 3


def test_a_plan_is_not_made_for_those_alone_who_have_their_blocks():
    """Requests that need blocks at different times, in a full cache: until one is preempted, each iteration serves all."""
    engine = make_engine(gpu_blocks=9, cpu_blocks=0, cache=PrefixCache, depth=2, admission_reserve=0.0)
    served: list[tuple[int, int]] = []
    launch = engine.worker.launch

    def watched(plan: StepPlan) -> None:
        served.append((len(plan.rows), len(engine.scheduler.running)))
        launch(plan)

    engine.worker.launch = watched  # type: ignore[method-assign]
    for number, tokens in enumerate((7, 6, 5)):
        engine.say(request(number, f"s{number}", tokens, 14))
    while not engine.scheduler.counters.preempted:
        engine.step(None)
    assert len(served) > 4 and all(rows == running for rows, running in served[:-1])
    turns = run(engine)
    assert [turns[number].output_tokens for number in range(3)] == [14, 14, 14]
