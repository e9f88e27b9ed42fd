import pytest

from pensieve.record import TurnRecord
from pensieve.window import find_window


def turn(session, finished_s, tokens=10, status="completed"):
    record = TurnRecord(session, 1, status=status, output_tokens=tokens)
    record.finished_s = finished_s
    return record


def steady(seconds=100, apart=0.5, lasts=2.0, tokens=10):
    """One-turn conversations that arrive every `apart` seconds after a warm-up of 10 s, each `lasts` seconds long."""
    arrivals = {f"s{index}": 10.0 + index * apart for index in range(int(seconds / apart) + 1)}
    return [turn(session, at + lasts, tokens) for session, at in arrivals.items()], arrivals


def test_an_open_load_is_measured_from_three_conversation_durations_to_the_last_arrival():
    turns, arrivals = steady()
    window = find_window(turns, load="open", warm_s=10.0, arrivals_s=arrivals, out_of_work_s=None)
    assert (window.start_s, window.end_s) == (16.0, 110.0)
    assert (window.measured_from_s, window.ended_s) == (10.0, 112.0)
    assert window.drain_share == pytest.approx(4 / 201)
    assert window.flags == {}


def test_a_closed_load_is_measured_until_the_first_user_has_nothing_left():
    turns, arrivals = steady()
    window = find_window(turns, load="closed", warm_s=10.0, arrivals_s=arrivals, out_of_work_s=90.0)
    assert (window.start_s, window.end_s) == (10.0, 90.0)


def test_a_short_trial_keeps_its_start_and_says_so():
    turns, arrivals = steady(lasts=50.0)
    window = find_window(turns, load="partly open", warm_s=10.0, arrivals_s=arrivals, out_of_work_s=None)
    assert (window.start_s, window.end_s) == (10.0, 110.0)
    assert "three mean conversation durations" in window.flags["not_steady"]


def test_a_window_with_few_turns_gives_way_to_all_measured_turns_and_says_so():
    turns, arrivals = steady(seconds=5)
    window = find_window(turns, load="partly open", warm_s=10.0, arrivals_s=arrivals, out_of_work_s=None)
    assert (window.start_s, window.end_s, window.drain_share) == (10.0, 17.0, 0.0)
    assert window.flags["window"].startswith("Only 7 turns finished")


def test_failed_turns_do_not_fill_a_window():
    turns, arrivals = steady(seconds=30)
    for record in turns[:-5]:
        record.status = "timeout"
    window = find_window(turns, load="closed", warm_s=10.0, arrivals_s=arrivals, out_of_work_s=None)
    assert window.flags["window"].startswith("Only 5 turns")


def test_halves_that_differ_are_flagged():
    turns, arrivals = steady()
    for record in turns:
        record.output_tokens = 12 if record.finished_s > 60 else 10
    window = find_window(turns, load="open", warm_s=10.0, arrivals_s=arrivals, out_of_work_s=None)
    assert "not steady" in window.flags["halves"]
