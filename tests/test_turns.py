"""Finished turns as columns in a file: what is read back is what was finished, and no record is kept for it. And the window
in which they are measured."""

import math
import random
import tracemalloc
from array import array

import numpy as np
import pytest

from pensieve.lab.turns import FEWEST_TURNS, TurnLog, Turns, find_window
from pensieve.serve.record import TurnRecord


def turn(number: int) -> TurnRecord:
    rng = random.Random(number)

    def perhaps(value):
        return rng.choice([None, value])

    return TurnRecord(
        f"s{number % 7}",
        number // 7 + 1,
        phase=rng.choice(["chat", "warmup", "rewarm"]),
        status=rng.choice(["completed", "timeout"]),
        error=perhaps("a sentence"),
        finished_s=rng.random(),
        ttft_ms=perhaps(rng.random()),
        prompt_tokens=perhaps(rng.randrange(2**40)),
        saved_s=perhaps((rng.random(), 0.0, rng.random())),
        emitted_s=array("d", sorted(rng.random() for _ in range(number % 5))),
    )


RECORDS = [turn(number) for number in range(40)]


def filled(batch: int = 7) -> Turns:
    log = TurnLog()
    for first in range(0, len(RECORDS), batch):
        log.add(RECORDS[first : first + batch])
    return Turns(log)


def known(values):
    return [None if math.isnan(value) else value for value in values]


def gaps(turns: Turns):
    pairs = list(turns.gaps_s())
    return [np.concatenate(part).tolist() for part in zip(*pairs, strict=True)]


def check(turns: Turns, records: list[TurnRecord]) -> None:
    assert len(turns) == len(records)
    for name in ("turn", "ttft_ms", "prompt_tokens"):
        assert known(turns[name]) == [getattr(one, name) for one in records]
    for name in ("session", "phase", "error"):
        words = turns.words(name)
        assert [words[code] for code in turns.codes(name)] == [getattr(one, name) for one in records]
    assert known(turns["saved_disk_s"]) == [one.saved_s and one.saved_s[2] for one in records]
    assert turns["last_token_s"].tolist() == [one.emitted_s[-1] if one.emitted_s else one.finished_s for one in records]
    apart = [np.diff(one.emitted_s).tolist() for one in records]
    assert gaps(turns) == [[gap for own in apart for gap in own], [len(own) for own in apart]]


@pytest.mark.parametrize("batch", [7, 100])
def test_what_is_read_back_is_what_was_finished(batch: int):
    turns = filled(batch)
    check(turns, RECORDS)
    check(turns.completed, [one for one in RECORDS if one.status == "completed"])
    both = turns.measured.where(turns.measured["turn"] > 2)
    check(both, [one for one in RECORDS if one.phase == "chat" and one.turn > 2])
    assert both.word("session", 1) == [one for one in RECORDS if one.phase == "chat" and one.turn > 2][1].session
    check(turns.where(np.full(len(turns), False)), [])


def test_a_finished_turn_leaves_few_bytes():
    """With names of conversations of 5.5 turns each, which the workload holds."""
    names, log = [f"conversation-{n}" for n in range(1000)], TurnLog()
    log.add([turn(0)])
    tracemalloc.start()
    try:
        for number in range(0, 5500, 500):
            batch = [TurnRecord(names[at * 2 // 11], 1, finished_s=1.0) for at in range(number, number + 500)]
            for one in batch:
                one.emitted_s = array("d", range(200))
            log.add(batch)
            del batch, one
        left = tracemalloc.get_traced_memory()[0] / 5500
    finally:
        tracemalloc.stop()
    print(f"{left:.1f} bytes a turn")
    assert left < 60


# The window of their throughput


def finished(session, finished_s, tokens=10, status="completed"):
    return TurnRecord(session, 1, status=status, output_tokens=tokens, finished_s=finished_s)


def steady(seconds=100, apart=0.5, lasts=2.0):
    """One-turn conversations that arrive every `apart` seconds after a warm-up of 10 s, each `lasts` seconds long."""
    arrivals = {f"s{index}": 10.0 + index * apart for index in range(int(seconds / apart) + 1)}
    return [finished(session, at + lasts) for session, at in arrivals.items()], arrivals


def window_of(turns, arrivals, load="partly open", warm_s=10.0, out_of_work_s=None):
    return find_window(Turns.of(turns), load=load, warm_s=warm_s, arrivals_s=arrivals, out_of_work_s=out_of_work_s)


def span(window):
    return window.start_s, window.end_s


def test_an_open_load_is_measured_while_the_second_half_of_its_conversations_arrives():
    window = window_of(*steady(), "open")
    assert span(window) == (60.0, 110.0)
    assert (window.measured_from_s, window.ended_s) == (10.0, 112.0)
    assert window.drain_share == pytest.approx(4 / 201)
    assert window.flags == {}


@pytest.mark.parametrize(
    ("lasts", "flag", "told"),
    [
        (30.0, "not_steady", "three mean conversation durations of 30 s"),
        (95.0, "few_turns", "Only 11 turns"),
        (500.0, "few_turns", "Only 0 turns finished in the measurement window of 50 s"),
    ],
)
def test_baselines_of_a_seed_have_one_window_however_slow_they_are_and_a_slow_one_says_so(lasts, flag, told):
    """A window that began after three of the baseline's own conversation durations, and gave way to the whole replay where
    that left too little, measured the slower one over its drain and the faster one over a lull: 154 against 90 tokens/s
    where the whole replays took 148 and 173."""
    turns, arrivals = steady(lasts=lasts)
    window = window_of(turns, arrivals)
    assert span(window) == (60.0, 110.0)
    assert told in window.flags[flag]
    assert "late_warmup" not in window.flags
    assert "late_warmup" in window_of(turns, arrivals, warm_s=70.0).flags
    assert flag == "few_turns" or "few_turns" not in window.flags


def test_a_load_too_small_for_a_window_is_measured_whole_under_every_baseline():
    for lasts in (0.1, 1.0, 40.0):
        window = window_of(*steady(seconds=15, lasts=lasts))
        assert (*span(window), window.drain_share) == (10.0, 25.0 + lasts, 0.0)
        assert "fewer than 20 conversations" in window.flags["window"] and len(window.flags) == 1


def test_a_closed_load_is_measured_until_the_first_user_has_nothing_left():
    turns, arrivals = steady()
    assert span(window_of(turns, arrivals, "closed", out_of_work_s=90.0)) == (10.0, 90.0)
    assert span(window_of(turns, arrivals, "closed", warm_s=20.0)) == (20.0, 112.0)
    for record in turns[:-5]:
        record.status = "timeout"
    assert "fewer than 20 turns finished" in window_of(turns, arrivals, "closed").flags["window"], (
        "these fill no window"
    )


def test_halves_that_differ_are_flagged():
    turns, arrivals = steady()
    for record in turns:
        record.output_tokens = 12 if record.finished_s > 85 else 10
    assert "not steady" in window_of(turns, arrivals, "open").flags["halves"]


def test_a_turn_that_ends_as_the_window_begins_is_in_it_as_throughput_counts_it():
    """Twenty turns of a closed load, the first of which ends at once: the halves hold what the window holds. A turn that did
    not complete has given nothing."""
    turns = [finished(f"s{n}", float(n), 0 if n else 100) for n in range(FEWEST_TURNS)]
    turns.append(finished("late", 15.0, 100, status="timeout"))
    found = window_of(turns, {one.session: 0.0 for one in turns}, "closed", 0.0, float(FEWEST_TURNS))
    assert found.start_s == 0.0
    assert "100 and 0 output tokens" in found.flags["halves"]
