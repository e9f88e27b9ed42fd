"""trial.trace=true: the file is what the Trace Event Format asks for, read by its rules alone."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest

from pensieve.sim.timeline import Timeline
from tests.trial.running import run
from tests.trial.test_disk import SMALL

ALWAYS = {
    "M": {"name", "pid", "args"},
    "X": {"name", "pid", "tid", "ts", "dur"},
    "b": {"name", "pid", "cat", "id", "ts"},
}
ALWAYS["e"] = ALWAYS["b"]


def read(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def ns(microseconds):
    """As Perfetto takes a time."""
    return round(1e3 * microseconds)


def open_phases(events):
    """By (process, category, id), what begins and has not ended; raises where an end is of nothing that is open."""
    open_ = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            key = event["pid"], event["cat"], event["id"]
            if event["ph"] == "b":
                open_[key].append(event)
            else:
                begun = open_[key].pop()
                assert begun["name"] == event["name"] and begun["ts"] <= event["ts"]
    return {key: left for key, left in open_.items() if left}


def test_a_trace_with_all_tiers_keeps_the_formats_rules(tracking):
    outcome = run(tracking, *SMALL, "cache.disk='16384 tokens'", "trial.trace=true")
    content = read(tracking.outputs / "runs" / "x" / "trace.json.gz")
    assert content["displayTimeUnit"] in ("ms", "ns")
    events = content["traceEvents"]
    for event in events:
        assert ALWAYS[event["ph"]] <= event.keys()
        assert isinstance(event["name"], str) and event["name"] and isinstance(event["pid"], int)
        for time in event.keys() & {"ts", "dur"}:
            assert math.isfinite(event[time]) and event[time] >= 0
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["pid"] for e in events} == {e["pid"] for e in events if e["name"] == "process_name"}
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[named[event["pid"], event["tid"]]].append((ns(event["ts"]), ns(event["ts"] + event["dur"])))
    assert set(lanes) == {"compute", "CPU to GPU", "GPU to CPU", "read from disk", "write to disk"}
    for name, lane in lanes.items():
        assert all(one[1] <= following[0] for one, following in pairwise(sorted(lane))), f"{name} overlaps"
    assert not open_phases(events)
    phases = defaultdict(dict)
    for event in events:
        if event["ph"] in "be":
            phases[event["args"]["session"], event["args"]["turn"]][event["name"], event["ph"]] = event["ts"]
    turns = tracking.store.turns_of(outcome.trial_id)
    assert len(phases) == len(turns) > 40
    for turn in turns:
        at = phases[turn.session, turn.turn]
        assert at["prefill", "e"] - at["waiting", "b"] == pytest.approx(1e3 * turn.ttft_ms)
        assert at["decode", "e"] - at["waiting", "b"] == pytest.approx(1e3 * turn.latency_ms)


@pytest.mark.parametrize(
    ("admitted_s", "first_token_s", "finished_s", "shown"),
    [
        (None, None, 3.0, {"waiting": (0.5, 3.0)}),
        (1.0, None, 3.0, {"waiting": (0.5, 1.0), "prefill": (1.0, 3.0)}),
        (1.0, 2.0, 3.0, {"waiting": (0.5, 1.0), "prefill": (1.0, 2.0), "decode": (2.0, 3.0)}),
        (None, None, None, {}),
    ],
)
def test_a_request_that_was_given_up_ends_in_the_phase_it_had_reached(
    tmp_path, admitted_s, first_token_s, finished_s, shown
):
    turn = SimpleNamespace(
        request_id=7, session="a", turn=1, status="timeout", intended_s=0.5, admitted_s=admitted_s,
        first_token_s=first_token_s, finished_s=finished_s,
    )  # fmt: skip
    Timeline().write(tmp_path / "trace.json.gz", [turn], 10.0)
    events = [event for event in read(tmp_path / "trace.json.gz")["traceEvents"] if event["ph"] in "be"]
    assert not open_phases(events)
    found = {
        name: tuple(1e-6 * event["ts"] - 10.0 for event in events if event["name"] == name)
        for name in dict.fromkeys(event["name"] for event in events)
    }
    assert found == {name: pytest.approx(times) for name, times in shown.items()}
