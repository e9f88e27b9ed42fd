"""The frame of turns and its pairing, which the table of a sweep, comparisons and claims share."""

import math

import pytest

from pensieve.lab.metrics import Measurement, summarise
from pensieve.lab.results.export import baseline_report
from pensieve.lab.results.frame import (
    Frame,
    by_conversation,
    conversation_ends,
    found_more,
    gap_closed,
    measured_turns,
    paired,
    positive_ratio,
    turn_frame,
    values_of,
)
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import sweep_table
from pensieve.lab.turns import Turns
from pensieve.serve.record import is_measured
from tests.results.synthetic import numbered
from tests.results.trials import MEMORY, add_trial, open_sweep, turn


@pytest.fixture
def store():
    return ResultsStore(MEMORY)


def frame_of(store, turns, *columns, measured=True, **changed):
    sweep_id = open_sweep(store)
    trial = store.trial(add_trial(store, sweep_id, 0, "pensieve", numbered(turns), **changed))
    return turn_frame(store, [trial], *columns, measured=measured)


def test_of_two_rows_with_one_key_the_later_one_is_kept_and_no_trials_are_an_empty_frame(store):
    turns = [turn("a", 1, 5.0), turn("a", 2, 6.0, status="failed"), turn("a", 1, 7.0)]
    assert frame_of(store, turns, "ttft_ms", measured=False)["ttft_ms"].to_list() == [6.0, 7.0]
    assert by_conversation(values_of(turn_frame(store, []), "ttft_ms")) == {}


def test_what_was_not_counted_has_no_value(store):
    turns = [
        turn("a", 1, tokens=(1, 2), latency_ms=8.0, sent_bytes=6, received_bytes=4),
        turn("a", 2, tokens=(), latency_ms=8.0, sent_bytes=6, received_bytes=4),
        turn("a", 3, tokens=(1,), latency_ms=8.0, sent_bytes=6, received_bytes=None),
    ]
    frame = frame_of(store, turns)
    assert math.isnan(frame["received_bytes"].iloc[2])
    assert values_of(frame, "normalized_latency_ms").to_list() == [4.0, 8.0]
    assert values_of(frame, "wire_bytes_per_token").to_list() == [5.0]
    assert len(values_of(frame, "no_such_column")) == 0


def test_turns_are_paired_where_both_have_them(store):
    ours = frame_of(store, [turn("a", 2, 2.0), turn("a", 1, 1.0), turn("a", 3, None), turn("b", 1, 4.0)])
    theirs = frame_of(ResultsStore(MEMORY), [turn("a", 2, 20.0), turn("a", 1, 10.0), turn("a", 3, 30.0)])
    pairs = paired(values_of(ours, "ttft_ms"), values_of(theirs, "ttft_ms"))
    assert [tuple(row) for row in pairs.to_numpy()] == [(1.0, 10.0), (2.0, 20.0)]
    assert conversation_ends(pairs, last=False)["a"].to_list() == [1.0]
    assert conversation_ends(pairs, last=True)["b"].to_list() == [20.0]
    assert by_conversation(pairs["a"]) == {(0, "a/0"): [1.0, 2.0]}
    ratio = positive_ratio({(0, "x"): 4.0, (0, "y"): 0.0, (0, "z"): 1.0}, {(0, "x"): 2.0, (0, "y"): 1.0, (0, "z"): 0.0})
    assert ratio is not None and (ratio.value, ratio.n) == (2.0, 1)


def test_the_gap_closed_is_in_tokens_of_all_tiers(store):
    """Of 100 tokens lru finds 20 and the bound 60: who finds 30 closes a quarter."""

    def found(**hits):
        known = {"history_tokens": 100, "gpu_hit_tokens": 10, "cpu_hit_tokens": 0, "disk_hit_tokens": 0, **hits}
        return frame_of(ResultsStore(MEMORY), [turn("a", 1, **known), turn("b", 1, **known)])

    start, policy = found(disk_hit_tokens=10), found(cpu_hit_tokens=5, disk_hit_tokens=15)
    assert gap_closed(policy, start, {0: 0.6}).value == pytest.approx(0.25)
    assert gap_closed(policy, start, {0: 0.2}) is None, "lru is at the bound"
    assert found_more(policy, start).value == pytest.approx(0.1)


def steps():
    for number, phase in enumerate(("warmup", "hit", "rewarm", "throughput"), start=1):
        ms = 10.0 if is_measured(phase) else 990.0
        yield turn("a", number, ms, phase=phase, latency_ms=ms, finished_s=float(number))


def test_every_reader_takes_the_same_turns(store):
    sweep = open_sweep(store)
    trial = add_trial(store, sweep, 0, "pensieve", numbered(steps()))
    assert [row.phase for row in measured_turns(store, trial)] == ["hit", "throughput"]
    found = Frame(store, sweep)
    assert [run["run_id"] for run in baseline_report(found, found.trials)["runs"]] == [f"{trial}/a/2", f"{trial}/a/4"]
    assert list(found.turns([store.trial(trial)]).index.get_level_values("turn")) == [2, 4]
    [row] = sweep_table(store, sweep).rows
    assert row.ttft_last_ms == pytest.approx(10.0)
    found = {(m.name, m.label): m for m in summarise(Measurement(Turns.of(numbered(steps())), 0.0, 5.0, 0.0, 5.0))}
    assert found["ttft_ms_mean", ""].n == found["turns", "completed"].value == 2
