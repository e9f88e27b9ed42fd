from array import array

import pytest

from pensieve.core.request import Length, Request
from pensieve.lab.workload.base import Arrival, WorkloadPlan
from pensieve.lab.workload.inspection import inspect


class Written:
    """Arrivals that are known beforehand."""

    def __init__(self, *arrivals):
        self.arrivals = arrivals

    def describe(self):
        return WorkloadPlan("open", 2, len(self.arrivals), 99, 1)

    def start(self):
        return self.arrivals

    def on_finished(self, turn):
        assert turn.status == "completed"
        assert turn.finished_s == turn.intended_s
        return []


def arrival(number, at_s, session, tokens, reply, continues=True, **fields):
    return Arrival(at_s, Request(number, session, 1, array("i", tokens), Length(reply), **fields), continues=continues)


def test_lengths_reuse_and_rates_are_those_of_the_arrivals():
    found = inspect(
        Written(
            arrival(1, 0.0, "w", [1] * 50, 5, phase="warmup"),
            arrival(2, 1.0, "a", [1, 2, 3, 4], 2),
            arrival(3, 3.0, "a", [5, 6], 2),  # 6 of 8 prompt tokens are known
            arrival(4, 5.0, "b", [1, 2, 3, 4, 5], 1, continues=False),
            arrival(5, 11.0, "b", [1, 2, 3, 9, 9, 9], 1, continues=False),  # 3 of 6
        )
    )
    assert (found.sessions, len(found.turns), found.warmup_turns) == (2, 4, 1)
    assert [(turn.prompt, turn.new, turn.reply) for turn in found.turns] == [(4, 4, 2), (8, 2, 2), (5, 5, 1), (6, 3, 1)]
    assert found.reuse == pytest.approx(9 / 23)
    assert found.span_s == 10.0
