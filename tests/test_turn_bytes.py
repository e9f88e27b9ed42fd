"""Bytes a turn: what was copied because that turn waited for it, against the engine's own totals."""

from collections import Counter

import pytest

from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.workload.chat import ChatWorkload
from tests.composed import replayed
from tests.scripted import ScriptedSystem, context

BUSY = ("workload=chat_busy", "cache.gpu=2304 tokens", "cache.cpu=4096 tokens")


@pytest.mark.parametrize("baseline", ["pensieve", "prefix_cache"])
def test_the_turns_bytes_are_within_the_engines(baseline):
    record, system = replayed(*BUSY, f"baseline={baseline}")
    totals, moved = system.counters(), Counter()
    for turn in record.turns:
        moved.update(h2d_bytes=turn.h2d_bytes, d2h_bytes=turn.d2h_bytes)
    assert moved["h2d_bytes"] == totals["h2d_bytes"], "whatever comes in is for somebody"
    assert moved["d2h_bytes"] <= totals["d2h_bytes"]
    assert bool(totals["h2d_bytes"]) is bool(totals["d2h_bytes"]) is (baseline == "pensieve")
    found = {metric.name: metric.value for metric in summarise(record.measurement)}
    measured = [turn for turn in record.turns if turn.phase == "chat"]
    assert found["h2d_bytes"] == sum(turn.h2d_bytes for turn in measured)
    assert found["d2h_bytes"] >= sum(turn.d2h_bytes for turn in measured)


def test_bytes_that_nobody_counted_have_no_value():
    for record in (replayed(*BUSY)[0], replay(ScriptedSystem(), ChatWorkload(context()))):
        found = {metric.name: metric.value for metric in summarise(record.measurement)}
        assert {found[f"{way}_bytes{per}"] for way in ("sent", "received") for per in ("", "_per_token")} == {None}
    assert (found["h2d_bytes"], found["d2h_bytes"]) == (None, None)
