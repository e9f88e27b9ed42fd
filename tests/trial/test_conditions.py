"""The conditions that a trial declares are in its record, and one that did not hold invalidates it."""

from dataclasses import replace

import pytest

from pensieve.lab.workload.chat import ChatWorkload
from tests.trial.running import run


def test_a_cache_state_that_did_not_hold_invalidates_the_trial(tracking, monkeypatch):
    describe = ChatWorkload.describe
    monkeypatch.setattr(ChatWorkload, "describe", lambda self: replace(describe(self), cache_state="primed"))
    outcome = run(tracking)
    trial = tracking.store.trial(outcome.trial_id)
    assert not outcome.completed
    assert trial.status == "failed"
    assert "starts with a primed cache" in trial.error
    assert tracking.store.metrics_of(trial.id) == []


@pytest.mark.parametrize("baseline", ["pensieve", "gpu_only", "stateless"])
def test_two_engines_can_be_shown_to_match(tracking, baseline):
    outcome = run(tracking, "workload=prefix_invalidation", "workload.rounds=1", f"baseline={baseline}", words=())
    trial = tracking.store.trial(outcome.trial_id)
    assert outcome.completed
    scheduler = trial.config["scheduler"]
    assert trial.engine["n_ctx"] == 8192
    for name in ("max_batch_tokens", "max_batch_requests"):
        assert trial.engine[name] == scheduler[name]
    workload = trial.engine["workload"]
    assert workload["requests_at_once"] == 1
    assert (workload["load"], workload["cache_state"], workload["warmup_turns"]) == (
        "closed",
        "primed",
        12,
    )  # A and B before each query, and again after each miss or hit
    metrics = {(m.name, m.label): m.value for m in tracking.store.metrics_of(trial.id)}
    assert metrics["miss_rate", "miss"] == 1.0
    assert metrics["miss_rate", "hit"] == (1.0 if baseline == "stateless" else 0.0)
    # Without KV a hit computes A, B and Q and a miss only B and Q: there the longer prompt is the slower one.
    assert (metrics["ttft_degradation_pct", ""] < 0) is (baseline == "stateless")
