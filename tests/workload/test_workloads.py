"""What is told of one workload alone: decode, rounds, hotness, agents."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from pensieve.core.request import Hint
from pensieve.lab.workload.chat import HotnessWorkload, class_of
from pensieve.lab.workload.exact import AgentsWorkload, DecodeWorkload, RoundsWorkload
from tests.scripted import context
from tests.workload.dry import drive, measured


def test_one_prompt_of_72_tokens_thirty_times_one_at_a_time():
    workload = DecodeWorkload(context())
    plan, arrivals = workload.describe(), drive(workload)
    assert len(arrivals) == plan.turns == 30
    assert [a.at_s for a in arrivals] == [float(index) for index in range(30)]
    assert len({a.due().prompt.tobytes() for a in arrivals}) == 1
    assert len(arrivals[0].due().prompt) == 72
    assert {a.request.output.tokens for a in arrivals} == {50}
    assert [a.request.phase for a in arrivals] == ["warmup"] * 5 + ["throughput"] * 25
    assert len({a.request.session for a in arrivals}) == 30


def sessions(workload, **options):
    return [a.request.session for a in drive(workload, **options) if a.request.phase != "warmup"]


def test_strict_asks_all_in_the_same_order_every_round_and_random_in_another():
    asked = sessions(RoundsWorkload(context(), conversations=3, rounds=4))
    assert asked == ["conversation-0", "conversation-1", "conversation-2"] * 4
    asked = sessions(RoundsWorkload(context(), conversations=9, rounds=4, order="random"))
    rounds = [tuple(asked[start : start + 9]) for start in range(0, 36, 9)]
    assert all(sorted(one) == sorted(rounds[0]) for one in rounds)
    assert len(set(rounds)) == 4


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


def test_every_message_is_written_before_the_first_is_sent():
    """Or who writes it between two turns is measured with them."""
    asked = []

    def encode(text):
        asked.append(text)
        return context().encode(text)

    def workload():
        return RoundsWorkload(replace(context(), encode=encode), conversations=3, rounds=4)

    made = workload()
    written = len(asked)
    assert written >= 3 * 4
    assert len(drive(made)) == 3 * 4 + 2
    assert len(asked) == written


@pytest.mark.parametrize(
    ("users", "classes"),
    [(6, (2, 2, 2)), (1, (1, 0, 0)), (2, (1, 1, 0)), (9, (3, 3, 3)), (4, (2, 1, 1))],
)
def test_a_third_of_the_users_is_hot_a_third_warm_a_third_cold(users, classes):
    counted = Counter(class_of(user, users) for user in range(users))
    assert tuple(counted[label] for label in ("hot", "warm", "cold")) == classes


def test_users_return_at_the_interval_of_their_class():
    arrivals = measured(drive(HotnessWorkload(context(), turns=8, request_interval=2.0)))
    at = {(a.request.session, a.request.turn): a for a in arrivals}
    assert len({a.at_s for a in arrivals[:6]}) == 6, "also before their first message"
    gaps = {"hot": [], "warm": [], "cold": []}
    for (session, turn), arrival in at.items():
        if turn > 1:
            gaps[arrival.request.label].append(arrival.at_s - at[session, turn - 1].at_s - 1.0)
    for label, mean in (("hot", 0.6), ("warm", 2.0), ("cold", 5.0)):
        assert sum(gaps[label]) / len(gaps[label]) == pytest.approx(mean, rel=0.2)
        assert 0.5 * mean <= min(gaps[label]) < max(gaps[label]) <= 1.5 * mean


def test_each_agent_reasons_acts_and_reflects():
    arrivals = drive(AgentsWorkload(context(), agents=3, steps=2, act_s=10.0, reason_tokens=20, observation_tokens=6))
    for agent in range(3):
        turns = [a for a in arrivals if a.request.session == f"agent-{agent}"]
        assert [a.request.phase for a in turns] == ["reason", "reflect"] * 2
        assert [a.request.label for a in turns] == ["reason", "reflect"] * 2
        acting = Hint("tool_use", "act", expected_s=10.0)
        assert [a.request.hint for a in turns] == [acting, Hint(expected_s=0.0), acting, Hint("end_turn")]
        assert [len(a.due().prompt) for a in turns] == [20, 6] * 2
        assert all(a.continues for a in turns), "only new tokens are sent"
        acted = [b.at_s - a.at_s - 1.0 for a, b in zip(turns[::2], turns[1::2], strict=True)]
        assert all(9.0 <= seconds <= 11.0 for seconds in acted)
        assert turns[2].at_s == pytest.approx(turns[1].at_s + 1.0)
        assert turns[0].at_s == 2.0, "all at once, after as many have warmed up"
