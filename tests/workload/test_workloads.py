"""What is told of one workload alone: decode, rounds, hotness, agents."""

from dataclasses import replace
from itertools import pairwise

import pytest

from pensieve.lab.workload.exact import RoundsWorkload
from tests.scripted import context
from tests.workload.dry import drive


def test_the_live_set_is_the_multiple_that_was_asked_of_both_tiers():
    at = replace(context(gpu_tokens=1000), cpu_tokens=3000)
    for pressure in (0.5, 1.8, 3.7):
        workload = RoundsWorkload(at, pressure=pressure, rounds=5, message_tokens=40, reply_tokens=10)
        plan, arrivals = workload.describe(), drive(workload)
        each = 5 * 50 - 1
        assert pressure * 4000 <= plan.working_set_tokens < pressure * 4000 + each
        said = sum(len(a.due().prompt) + a.request.output.tokens for a in arrivals if a.request.phase != "warmup")
        assert plan.working_set_tokens == said - plan.sessions
        assert len(arrivals) == plan.turns
        assert sum(a.request.phase == "warmup" for a in arrivals) == plan.warmup_turns == 2


@pytest.mark.parametrize("at_once", [1, 3, 7])
def test_so_many_are_under_way_and_each_conversation_once(at_once):
    workload = RoundsWorkload(context(), conversations=4, rounds=3, order="random", at_once=at_once)
    arrivals = [a for a in drive(workload) if a.request.phase != "warmup"]
    times = [a.at_s for a in arrivals]
    assert max(times.count(at) for at in times) == min(at_once, 4)
    for name in {a.request.session for a in arrivals}:
        turns = [(a.at_s, a.request.turn) for a in arrivals if a.request.session == name]
        assert [turn for _, turn in turns] == [1, 2, 3]
        assert all(b - a >= 1.0 for (a, _), (b, _) in pairwise(turns))
