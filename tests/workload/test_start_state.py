import pytest

from pensieve.errors import MeasurementInvalid
from pensieve.record import TurnRecord
from pensieve.workload.base import WorkloadPlan
from pensieve.workload.start_state import check_start


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
