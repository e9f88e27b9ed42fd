"""Without an admission reserve a request may be admitted and get no share of the iteration, or be preempted in it."""

import random

import pytest

from tests.simulated import make_engine, request


@pytest.mark.parametrize("budget", [5, 64])
def test_admissions_without_a_row_or_a_copy_are_not_lost(budget):
    for seed in range(12):
        rng = random.Random(seed)
        engine = make_engine(
            gpu_blocks=14, cpu_blocks=rng.choice((0, 6, 24)), admission_reserve=0.0, max_batch_tokens=budget
        )
        waiting = [request(n, f"s{n % 6}", rng.randint(3, 16), rng.randint(1, 12), turn=n // 6 + 1) for n in range(24)]
        finished = {}
        while waiting or engine.busy:
            while waiting and rng.random() < 0.4:
                engine.submit(waiting.pop(0))
            if engine.busy:
                for event in engine.step(None):
                    if event.turn is not None:
                        finished[event.request_id] = event.turn.status
                engine.cache.check()
        assert set(finished.values()) <= {"completed", "refused"} and len(finished) == 24
        assert "completed" in finished.values()
