"""Beside the hit rates of a trial stands what the best offline choice could have reached, and none reaches more."""

from dataclasses import replace

import pytest

from pensieve.lab.compose import resolved
from pensieve.lab.trial import Job, run_trial
from pensieve.lab.trial.tracking import open_tracking
from tests.composed import checked, composed

BUSY = (
    "cache=cramped",
    "workload.min_turns=7",
    "workload.max_turns=7",
    "workload.pressure=2",
    "workload.users=8",
    "workload.conversations=8",
    "workload.think_time_s=1.0",
)


def rates(tmp_path, monkeypatch, *words, load=BUSY):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    tracking = replace(open_tracking(checked("tracking=local")), mlflow=False)
    words = ("tracking=local", *load, *words)
    job = Job("test", tracking.outputs / "runs" / "x")
    outcome = run_trial(checked(*words), resolved(composed(*words)), tracking, job, lambda text: None)
    assert outcome.completed, outcome.error
    return {metric.name: metric.value for metric in tracking.store.metrics_of(outcome.trial_id) if not metric.label}


SCAN = ("workload=rounds", "workload.rounds=12", "cache.gpu='2048 tokens'", "cache.cpu='6144 tokens'")


def test_in_strict_turn_recency_finds_little_and_who_adapts_more_than_half(tmp_path, monkeypatch):
    """All conversations are 1.8 times both tiers at their longest."""
    found = {}
    for eviction in ("retention_value", "adaptive_retention"):
        of = rates(tmp_path / eviction, monkeypatch, f"eviction={eviction}", load=SCAN)
        found[eviction] = of["gpu_hit_rate"] + of["cpu_hit_rate"]
    assert found["retention_value"] < 0.3 and found["adaptive_retention"] > 0.5, found


@pytest.mark.parametrize("eviction", ["retention_value", "lru", "fifo", "adaptive_retention", "belady"])
def test_no_policy_beats_the_bound(tmp_path, monkeypatch, eviction):
    found = rates(tmp_path, monkeypatch, f"eviction={eviction}")
    reached = found["gpu_hit_rate"] + found["cpu_hit_rate"]
    assert 0.2 < reached <= found["bound_hit_rate"] < 1.0
    assert found["prompt_hit_rate"] <= found["bound_prompt_hit_rate"] < found["bound_hit_rate"]


def test_less_room_has_a_lower_bound(tmp_path, monkeypatch):
    both = rates(tmp_path / "both", monkeypatch)
    gpu = rates(tmp_path / "gpu", monkeypatch, "baseline=gpu_only")
    assert gpu["gpu_hit_rate"] <= gpu["bound_hit_rate"] < both["bound_hit_rate"]
