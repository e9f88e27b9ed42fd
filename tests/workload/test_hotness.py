from collections import Counter

import pytest

from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.workload.hotness import HotnessWorkload, class_of
from tests.scripted import Latency, ScriptedSystem, context
from tests.workload.dry import drive, measured, most_at_once


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
    gaps = {"hot": [], "warm": [], "cold": []}
    for (session, turn), arrival in at.items():
        if turn > 1:
            gaps[arrival.request.label].append(arrival.at_s - at[session, turn - 1].at_s - 1.0)
    for label, mean in (("hot", 0.6), ("warm", 2.0), ("cold", 5.0)):
        assert sum(gaps[label]) / len(gaps[label]) == pytest.approx(mean, rel=0.2)
        assert 0.5 * mean <= min(gaps[label]) < max(gaps[label]) <= 1.5 * mean


def test_no_more_requests_are_in_flight_than_there_are_users_who_warm_up_at_once():
    arrivals = drive(HotnessWorkload(context(), users=5, turns=3, request_interval=0.0, warmup_turns=2))
    assert most_at_once(measured(arrivals)) == 5
    warm = [a for a in arrivals if a.request.phase == "warmup"]
    assert {a.at_s for a in warm} == {0.0} and {a.request.label for a in warm} == {""}


def test_time_to_first_token_comes_labelled_by_class():
    slow = {"hot": 20, "warm": 50, "cold": 130, "": 5}
    system = ScriptedSystem(lambda request: Latency(queue=0, first=slow[request.label], gap=1))
    record = replay(system, HotnessWorkload(context(), turns=3))
    found = {(m.name, m.label): m for m in summarise(record.measurement, system.start())}
    assert record.load == "closed"
    for label in ("hot", "warm", "cold"):
        assert found["ttft_ms_mean", label].value == pytest.approx(slow[label], abs=1.0)
        assert found["latency_ms_p50", label].value == pytest.approx(slow[label] + 11, abs=1.0)
