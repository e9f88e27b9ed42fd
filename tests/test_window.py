import pytest

from pensieve.lab.window import FEWEST_TURNS, find_window
from pensieve.serve.record import TurnRecord


def turn(session, finished_s, tokens=10, status="completed"):
    record = TurnRecord(session, 1, status=status, output_tokens=tokens)
    record.finished_s = finished_s
    return record


def steady(seconds=100, apart=0.5, lasts=2.0, tokens=10):
    """One-turn conversations that arrive every `apart` seconds after a warm-up of 10 s, each `lasts` seconds long."""
    arrivals = {f"s{index}": 10.0 + index * apart for index in range(int(seconds / apart) + 1)}
    return [turn(session, at + lasts, tokens) for session, at in arrivals.items()], arrivals


def window_of(turns, arrivals, load="partly open", warm_s=10.0, out_of_work_s=None):
    return find_window(turns, load=load, warm_s=warm_s, arrivals_s=arrivals, out_of_work_s=out_of_work_s)


def output_rate(turns, window):
    tokens = sum(t.output_tokens for t in turns if window.start_s <= t.finished_s <= window.end_s)
    return tokens / (window.end_s - window.start_s)


def test_an_open_load_is_measured_while_the_second_half_of_its_conversations_arrives():
    turns, arrivals = steady()
    window = window_of(turns, arrivals, "open")
    assert (window.start_s, window.end_s) == (60.0, 110.0)
    assert (window.measured_from_s, window.ended_s) == (10.0, 112.0)
    assert window.drain_share == pytest.approx(4 / 201)
    assert window.flags == {}


@pytest.mark.parametrize(("fast", "slow"), [(2.0, 30.0), (5.0, 16.0), (12.0, 60.0)])
def test_baselines_of_a_seed_have_one_window_however_fast_they_are(fast, slow):
    """A window that began after three of the baseline's own conversation durations, and gave way to the whole replay where
    that left too little, measured the slower one over its drain and the faster one over a lull: 154 against 90 tokens/s
    where the whole replays took 148 and 173."""
    (quick, arrivals), (sluggish, _) = steady(lasts=fast), steady(lasts=slow)
    windows = [window_of(turns, arrivals) for turns in (quick, sluggish)]
    assert (windows[0].start_s, windows[0].end_s) == (windows[1].start_s, windows[1].end_s) == (60.0, 110.0)


@pytest.mark.parametrize("faster", ["first", "second"])
def test_the_order_of_throughputs_is_that_of_the_times_taken(faster):
    """Conversations that come ever more quickly, of which the slower baseline finishes fewer in the same time."""
    arrivals = {f"s{index}": 10.0 + 100.0 * (index / 99) ** 0.5 for index in range(100)}
    lasts = {"first": (3.0, 17.0), "second": (17.0, 3.0)}[faster]
    rates, makespans = [], []
    for seconds in lasts:
        turns = [turn(session, at + seconds) for session, at in arrivals.items()]
        window = window_of(turns, arrivals)
        rates.append(output_rate(turns, window))
        makespans.append(window.ended_s - window.measured_from_s)
    assert (rates[0] > rates[1]) == (makespans[0] < makespans[1]) == (faster == "first")


def test_a_load_too_small_for_a_window_is_measured_whole_under_every_baseline():
    for lasts in (0.1, 1.0, 40.0):
        turns, arrivals = steady(seconds=15, lasts=lasts)
        window = window_of(turns, arrivals)
        assert (window.start_s, window.end_s, window.drain_share) == (10.0, 25.0 + lasts, 0.0)
        assert "fewer than 20 conversations" in window.flags["window"] and len(window.flags) == 1


def test_a_closed_load_is_measured_until_the_first_user_has_nothing_left():
    turns, arrivals = steady()
    window = window_of(turns, arrivals, "closed", out_of_work_s=90.0)
    assert (window.start_s, window.end_s) == (10.0, 90.0)


def test_a_system_that_is_still_filling_up_says_so():
    turns, arrivals = steady(lasts=30.0)
    window = window_of(turns, arrivals)
    assert (window.start_s, window.end_s) == (60.0, 110.0)
    assert "three mean conversation durations of 30 s" in window.flags["not_steady"]
    assert "late_warmup" not in window.flags
    assert "late_warmup" in window_of(turns, arrivals, warm_s=70.0).flags


def test_a_baseline_that_finishes_little_in_the_window_says_so_and_keeps_it():
    turns, arrivals = steady(lasts=95.0)
    window = window_of(turns, arrivals)
    assert (window.start_s, window.end_s) == (60.0, 110.0)
    assert window.flags["few_turns"].startswith("Only 11 turns")


def test_a_baseline_that_finishes_nothing_in_the_window_has_no_throughput():
    turns, arrivals = steady(lasts=500.0)
    flags = window_of(turns, arrivals).flags
    assert "few_turns" not in flags
    assert flags["none_in_window"].startswith("No turn finished in the measurement window of 50 s")


def test_failed_turns_do_not_fill_the_window_of_a_closed_load():
    turns, arrivals = steady(seconds=30)
    for record in turns[:-5]:
        record.status = "timeout"
    window = window_of(turns, arrivals, "closed")
    assert "fewer than 20 turns finished" in window.flags["window"]


def test_halves_that_differ_are_flagged():
    turns, arrivals = steady()
    for record in turns:
        record.output_tokens = 12 if record.finished_s > 85 else 10
    assert "not steady" in window_of(turns, arrivals, "open").flags["halves"]


def test_a_turn_that_ends_as_the_window_begins_is_in_it_as_throughput_counts_it():
    """Twenty turns of a closed load, the first of which ends at once: the halves hold what the window holds."""
    turns = [TurnRecord(f"s{n}", 1, finished_s=float(n), output_tokens=0 if n else 100) for n in range(FEWEST_TURNS)]
    arrivals = {turn.session: 0.0 for turn in turns}
    found = find_window(turns, load="closed", warm_s=0.0, arrivals_s=arrivals, out_of_work_s=float(FEWEST_TURNS))
    assert found.start_s == 0.0
    assert "100 and 0 output tokens" in found.flags["halves"]
