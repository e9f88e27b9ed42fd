from collections import Counter

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.workload.hotness import HotnessWorkload, class_of
from tests.scripted import Latency, ScriptedSystem, context
from tests.workload.dry import drive


def measured(arrivals):
    return [arrival for arrival in arrivals if arrival.request.phase == "chat"]


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


def test_no_more_requests_are_in_flight_than_there_are_users():
    arrivals = measured(drive(HotnessWorkload(context(), users=5, turns=3, request_interval=0.0)))
    events = sorted([(a.at_s, 1) for a in arrivals] + [(a.at_s + 1.0, -1) for a in arrivals])
    busy = most = 0
    for _, change in events:
        busy += change
        most = max(most, busy)
    assert most == 5


def test_every_planned_turn_is_sent_once_and_warm_up_comes_first():
    workload = HotnessWorkload(context(), users=7, turns=3, warmup_turns=2)
    plan, arrivals = workload.describe(), drive(workload)
    warm = [a for a in arrivals if a.request.phase == "warmup"]
    assert len(arrivals) == len({a.request.id for a in arrivals}) == plan.turns
    assert len(warm) == plan.warmup_turns == 7
    assert {a.at_s for a in warm} == {0.0}, "as many at once as are measured"
    assert min(a.at_s for a in measured(arrivals)) >= 1.0
    assert {a.request.label for a in warm} == {""}


def test_the_same_seed_asks_the_same_and_another_does_not():
    def asked(seed):
        return [(a.at_s, a.request.session, a.request.prompt.tobytes()) for a in drive(HotnessWorkload(context(seed)))]

    assert asked(1) == asked(1)
    assert asked(1) != asked(2)


def test_a_failed_turn_ends_its_conversation_and_its_user_goes_on():
    whole = measured(drive(HotnessWorkload(context(), turns=4)))
    victim = next(a.request.session for a in whole if a.request.label == "hot")
    cut = measured(drive(HotnessWorkload(context(), turns=4), fail={(victim, 2)}))
    assert len(cut) == len(whole) - 2


def test_time_to_first_token_comes_labelled_by_class():
    slow = {"hot": 20, "warm": 50, "cold": 130, "": 5}
    system = ScriptedSystem(lambda request: Latency(queue=0, first=slow[request.label], gap=1))
    record = replay(system, HotnessWorkload(context(), turns=3))
    found = {(m.name, m.label): m for m in summarise(record.measurement, system.start())}
    assert record.load == "closed"
    for label in ("hot", "warm", "cold"):
        assert found["ttft_ms_mean", label].value == pytest.approx(slow[label], abs=1.0)
        assert found["latency_ms_p50", label].value == pytest.approx(slow[label] + 11, abs=1.0)


@pytest.mark.parametrize("fields", [{"users": 0}, {"request_interval": -1}, {"turns": 0}, {"free": True}])
def test_fields_out_of_range_are_refused_by_name(fields):
    with pytest.raises(ConfigError, match=f"workload.{next(iter(fields))}="):
        HotnessWorkload(context(), **fields)
