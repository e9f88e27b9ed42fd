from dataclasses import replace

import pytest

from pensieve.errors import MeasurementInvalid
from pensieve.lab.workload.base import WorkloadPlan
from pensieve.lab.workload.start_state import CHANCE_TOKENS, check_start, contamination, unverified
from pensieve.serve.record import TurnRecord


def plan(state):
    return WorkloadPlan("closed", 1, None, 0, 0, cache_state=state)


def turn(session, number, at_s, history=0, hit=0, phase="chat", shared=0):
    record = TurnRecord(session, number, phase=phase, admitted_s=at_s)
    record.history_tokens, record.gpu_hit_tokens, record.shared_hit_tokens = history, hit, shared
    return record


def test_a_cold_start_has_no_history_before_the_second_turn():
    good = [turn("w", 1, 0.0, phase="warmup"), turn("a", 1, 1.0), turn("a", 2, 2.0, history=9, hit=9)]
    check_start(plan("cold"), good[::-1])
    with pytest.raises(MeasurementInvalid, match="a had 5 tokens of history"):
        check_start(plan("cold"), [turn("w", 1, 0.0, phase="warmup"), turn("a", 1, 1.0, history=5)])


def test_an_engine_that_was_used_before_is_not_cold():
    with pytest.raises(MeasurementInvalid, match="found 64 tokens of its prompt"):
        check_start(plan("cold"), [turn("w", 1, 0.0, phase="warmup", shared=64), turn("a", 1, 1.0)])


def test_a_primed_start_has_history_in_every_conversation():
    good = [turn("a", 1, 0.0, phase="warmup"), turn("a", 2, 1.0, history=4)]
    check_start(plan("primed"), good)
    with pytest.raises(MeasurementInvalid, match="b had 0 tokens"):
        check_start(plan("primed"), [*good, turn("b", 1, 2.0)])


def test_a_carried_start_finds_what_this_trial_did_not_make():
    check_start(plan("carried"), [turn("a", 7, 0.0, history=40, hit=40)])
    with pytest.raises(MeasurementInvalid, match="held none of them"):
        check_start(plan("carried"), [turn("a", 1, 0.0), turn("a", 2, 1.0, history=40)])


def test_turns_that_were_never_admitted_say_nothing():
    check_start(plan("cold"), [TurnRecord("a", 1, status="refused")])
    check_start(plan("primed"), [TurnRecord("a", 2, admitted_s=1.0)])


def strange(session, number, unexplained, phase="chat"):
    record = turn(session, number, float(number), shared=unexplained, phase=phase)
    record.unexplained_tokens = unexplained
    return record


@pytest.mark.parametrize("state", ["cold", "salted", "primed"])
def test_what_nobody_said_in_the_trial_is_told(state):
    clean = [strange("w", 1, 0, "warmup"), strange("a", 1, CHANCE_TOKENS - 1)]
    declared = replace(plan(state), facts={"salt_tokens": 16})
    assert contamination(declared, clean) is None
    said = contamination(declared, [*clean, strange("b", 1, 64), strange("c", 1, 36)])
    assert f"declared {state}, but 2 of 4 turns found 100 tokens" in said
    assert "turn 1 of b: 64" in said and "cache_state=salted" in said


def test_what_a_server_puts_around_each_prompt_is_no_salted_text():
    """16 tokens of its chat template were cached: the count of what nobody said has left them out."""
    declared = replace(plan("salted"), facts={"salt_tokens": 16})
    around = strange("a", 1, 0)
    around.shared_hit_tokens = 16
    assert contamination(declared, [around]) is None
    around.unexplained_tokens = None  # an engine whose requests nobody remembers
    assert "1 salted conversations were found" in contamination(declared, [around])


def test_a_warm_cache_may_hold_what_warmed_it_and_a_carried_one_anything():
    assert contamination(plan("warm"), [strange("before-a", 1, 64, "warmup"), strange("a", 1, 0)]) is None
    assert contamination(plan("warm"), [strange("a", 1, 64)]) is not None
    assert contamination(plan("carried"), [strange("a", 7, 64)]) is None


def test_a_server_that_ran_before_is_not_refused_but_told():
    first = [turn("w", 1, 0.0, phase="warmup", shared=64), turn("a", 1, 1.0)]
    check_start(plan("cold"), first, starts_empty=False)
    with pytest.raises(MeasurementInvalid, match="found 64 tokens"):
        check_start(plan("cold"), first, starts_empty=True)
    with pytest.raises(MeasurementInvalid, match="a had 5 tokens of history"):
        check_start(plan("cold"), [turn("a", 1, 1.0, history=5)], starts_empty=False)


def test_a_server_that_ran_before_and_says_nothing_leaves_it_open():
    silent = turn("a", 1, 0.0)
    silent.gpu_hit_tokens = None
    assert "nobody can tell" in unverified(plan("cold"), [silent], starts_empty=False)
    assert unverified(plan("cold"), [silent], starts_empty=True) is None, "it was started for this trial"
    assert unverified(plan("cold"), [turn("a", 1, 0.0)], starts_empty=False) is None
    assert unverified(plan("warm"), [silent], starts_empty=False) is None
