from datetime import UTC, datetime, timedelta

import pytest

from pensieve import cli
from pensieve.lab.results.export import baseline_report
from pensieve.lab.results.frame import Frame
from pensieve.lab.results.store import open_store
from tests.results.trials import add_trial, open_sweep, turn

FIELDS = ["baseline", "model_id", "prompt_tokens", "new_tokens", "batch_size", "runs", "aggregates"]
RUN_FIELDS = [
    "run_id", "total_ms", "per_token_ms", "tokens_generated", "gpu_util_pct", "memory_bw_gbps", "host_to_device_mb",
    "device_to_host_mb", "queue_ms", "compute_ms", "transfer_ms", "sent_bytes", "received_bytes",
]  # fmt: skip


def served(session, number, admitted_s, finished_s, **changed):
    fields = {
        "intended_s": admitted_s - 0.5, "admitted_s": admitted_s, "finished_s": finished_s, "prompt_tokens": 40,
        "latency_ms": (finished_s - admitted_s + 0.5) * 1e3, "h2d_bytes": 2_000_000, "queue_ms": 500.0,
        "transfer_ms": 300.0, "sent_bytes": 4096, **changed,
    }  # fmt: skip
    return turn(session, number, tokens=(1, 2, 3, 4), **fields)


def test_a_report_has_the_fields_and_the_numbers(tmp_path):
    store = open_store(tmp_path)
    sweep = open_sweep(store, seed="0,1")
    turns = [
        served("w", 1, 0, 1, phase="warmup"),
        served("a", 1, 1, 3),
        served("b", 1, 2, 4),
        served("a", 2, 3, 4, prompt_tokens=60),
        served("c", 1, 3, 9, status="timeout"),
    ]
    trial = add_trial(store, sweep, 0, "pensieve", turns, {"gpu_util_pct": 55.0})
    report = baseline_report(Frame(store, sweep), [store.trial(trial)])
    assert list(report) == [*FIELDS, "simulated", "network"]
    assert [list(run) for run in report["runs"]] == [RUN_FIELDS] * 3
    assert [run["run_id"] for run in report["runs"]] == [f"{trial}/a/1", f"{trial}/b/1", f"{trial}/a/2"]
    assert report["runs"][0] == {
        "run_id": f"{trial}/a/1", "total_ms": 2500.0, "per_token_ms": 625.0, "tokens_generated": 4,
        "gpu_util_pct": 55.0, "memory_bw_gbps": None, "host_to_device_mb": 2.0, "device_to_host_mb": None,
        "queue_ms": 500.0, "compute_ms": None, "transfer_ms": 300.0, "sent_bytes": 4096, "received_bytes": None,
    }  # fmt: skip
    assert (report["baseline"], report["model_id"]) == ("pensieve", "tiny")
    assert (report["prompt_tokens"], report["new_tokens"]) == (40, 4)
    assert report["batch_size"] == 2  # a's second turn begins when its first ends
    assert report["aggregates"] == {
        "mean_total_ms": pytest.approx((2500 + 2500 + 1500) / 3), "p95_total_ms": 2500.0,
        "mean_per_token_ms": pytest.approx((625 + 625 + 375) / 3),
    }  # fmt: skip


def test_a_killed_sweep_is_listed_as_interrupted(tmp_path, monkeypatch, capsys):
    store = open_store(tmp_path)
    store.set_sweep(open_sweep(store), started_at=datetime.now(UTC) - timedelta(hours=1))
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    assert cli.results(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["1", "interrupted"]
