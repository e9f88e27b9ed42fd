"""Trials that fail, crash, hang or are killed; alone and in a process of their own."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pensieve.lab.results.store import open_store
from pensieve.lab.trial import job as isolate
from tests.composed import SHORT
from tests.trial.running import run

CRASHING = "++eviction._target_=tests.trial.crashing.Crash"
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def count(tmp_path, monkeypatch):
    """Of the crashes: see crashing.py."""
    monkeypatch.setenv("CRASH_COUNT", str(tmp_path / "crashes"))


@pytest.mark.slow
def test_an_isolated_trial_is_the_same_trial(tracking):
    sweep = tracking.store.open_sweep("key", "x", None, None, {}, 1, "host", None)
    outcome = run(tracking, "trial.isolate=true", "trial.timeout_s=100", sweep_id=sweep, number=3)
    trial = tracking.store.trial(outcome.trial_id)
    assert outcome.completed
    assert (trial.status, trial.config["trial"]["isolate"]) == ("completed", True)
    assert trial.pid != os.getpid()
    assert [(job.job, job.last.id) for job in tracking.store.trials_of_sweep(sweep)] == [(3, trial.id)]
    assert tracking.store.artifacts_of(trial.id, "tokens")[0].path.is_file()
    again = run(tracking)
    assert again.reused  # how a trial is run does not make another one
    assert again.trial_id == trial.id
    forced = run(tracking, "force=true")
    kept = ("session", "turn", "output_sha256", "ttft_ms", "gpu_hit_tokens")
    assert tracking.store.turns_of(forced.trial_id, *kept) == tracking.store.turns_of(trial.id, *kept)


@pytest.mark.parametrize(
    ("crash", "sentence", "stack"),
    [("kill", "memory ran out", ""), ("native", "SIGSEGV", "Segmentation fault"), ("status", "status 7", "")],
)
def test_a_process_that_dies_costs_one_trial(tracking, monkeypatch, crash, sentence, stack):
    monkeypatch.setenv("CRASH", crash)
    outcome = run(tracking, "trial.isolate=true", CRASHING)
    trial = tracking.store.trial(outcome.trial_id)
    assert (outcome.status, trial.status) == ("failed", "failed")
    assert sentence in trial.error
    assert stack in (trial.traceback or "")
    assert trial.finished_at is not None
    monkeypatch.setenv("CRASHES", "0")
    again = run(tracking, CRASHING)
    assert again.completed
    assert again.trial_id == 2


def test_retries_run_until_one_completes_or_they_end(tracking, monkeypatch):
    monkeypatch.setenv("CRASH", "error")
    monkeypatch.setenv("CRASHES", "2")
    said = []
    outcome = run(tracking, "trial.retries=3", CRASHING, said=said, preflight=False)
    assert outcome.completed
    assert tracking.store.trial(outcome.trial_id).attempt == 3
    assert [tracking.store.trial(number).status for number in (1, 2)] == ["failed", "failed"]
    assert len(said) == 2
    assert "it broke" in said[0]
    monkeypatch.setenv("CRASHES", "1000")
    ended = run(tracking, "trial.retries=1", "seed=1", CRASHING, preflight=False)
    assert (ended.status, tracking.store.trial(ended.trial_id).attempt) == ("failed", 2)


@pytest.mark.slow  # it waits
def test_a_trial_that_hangs_is_killed(tracking, monkeypatch):
    monkeypatch.setenv("CRASH", "hang")
    monkeypatch.setattr(isolate, "GRACE_S", 8.0)
    outcome = run(tracking, "trial.isolate=true", "trial.timeout_s=0.5", CRASHING)
    assert "did not stop by itself" in outcome.error
    assert tracking.store.trial(outcome.trial_id).status == "failed"


def test_ctrl_c_reaches_the_isolated_trial(tracking, monkeypatch):
    monkeypatch.setenv("CRASH", "hang")
    waiting = Path(os.environ["CRASH_COUNT"])

    def interrupt():
        while not waiting.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tracking, "trial.isolate=true", CRASHING)
    finally:
        signal.signal(signal.SIGINT, previous)
    trial = tracking.store.trial(1)
    assert trial.status == "interrupted"
    assert "by the user" in trial.error


@pytest.mark.slow
def test_an_isolated_trial_does_not_outlive_its_sweep(tmp_path):
    count = tmp_path / "crashes"
    env = {
        **os.environ, "PENSIEVE_OUTPUTS": str(tmp_path), "CRASH": "hang", "CRASH_COUNT": str(count),
        "PYTHONPATH": str(CHECKOUT),
    }  # fmt: skip
    command = [sys.executable, str(CHECKOUT / "runners" / "run.py"), "hardware=sim_h100", *SHORT, CRASHING]
    process = subprocess.Popen([*command, "trial.isolate=true", "tracking.mlflow=false"], env=env)
    try:
        deadline = time.monotonic() + 60
        while not count.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        store = open_store(tmp_path, create=False)
        assert store.trial(1).pid != process.pid
        process.kill()
        process.wait()
        while store.interrupt_dead() == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert store.trial(1).status == "interrupted"
    finally:
        process.kill()
