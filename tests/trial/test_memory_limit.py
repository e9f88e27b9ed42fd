"""Agents whose context outgrows cache.gpu: the point where memory runs out is reached, and recorded."""

import pytest

from pensieve.lab.metrics import summarise
from tests.composed import replayed

GROWTH = ("workload.reason_tokens=192", "workload.reason_output=32", "workload.observation_tokens=64",
          "workload.reflect_output=24", "workload.act_s=0.1")  # fmt: skip
A_STEP = 192 + 32 + 64 + 24


@pytest.mark.parametrize("baseline", ["pensieve", "stateless"])
def test_the_out_of_memory_point_is_where_a_context_outgrows_the_device(baseline):
    """Blocks of 32 in 1,024 tokens: the third reflection ends at 936 tokens, the fourth reason needs 1,160."""
    load = ("workload=agents", *GROWTH, "workload.agents=3", "workload.steps=6")
    record, _ = replayed(*load, f"baseline={baseline}", "cache.gpu=1024 tokens")
    metrics = {(m.name, m.label): m.value for m in summarise(record.measurement)}
    refused = [turn for turn in record.turns if turn.status == "refused"]
    assert {(turn.turn, turn.phase, turn.finish_reason) for turn in refused} == {(7, "reason", "capacity")}
    assert 3 * A_STEP < 1024 < 3 * A_STEP + 192 + 32
    assert len(refused) == 3, "every agent meets it, and ends there"
    assert metrics["oom_turns", ""] == 3
    assert metrics["turns", "refused"] == 3
    assert record.flags["oom"].startswith("3 turns did not get the memory they needed; the first: The request needs")
    assert all(turn.status == "completed" for turn in record.turns if turn.turn < 7)
