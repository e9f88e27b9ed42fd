"""Trials that fail, crash, hang or are killed; alone and in a process of their own."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from pensieve.lab.compose.settings import resolved
from pensieve.lab.results.store import open_store
from pensieve.lab.trial import run as isolate
from pensieve.lab.trial.job import Job
from tests.composed import SHORT, composed
from tests.runners.sweeping import start
from tests.trial.running import run

CRASHING = "++eviction._target_=tests.trial.crashing.Crash"


@pytest.fixture(autouse=True)
def count(tmp_path, monkeypatch):
    """Of the crashes: see crashing.py."""
    monkeypatch.setenv("CRASH_COUNT", str(tmp_path / "crashes"))


@pytest.mark.slow
def test_trials_of_one_process_are_the_same_trials_until_one_hangs_or_needs_its_own(tracking, monkeypatch):
    """Simulated ones, so that no torch is loaded twice: what is asked is which process ran each."""
    store = tracking.store

    def apart(seed, timeout_s=100, crashes=0):
        waiting.write_text(str(1000 - crashes))
        words = ("tracking=local", *SHORT, CRASHING, f"seed={seed}")
        job = Job("a", tracking.outputs / str(seed), resolved(composed(*words)))
        outcome = isolate.run_isolated(job, tracking, timeout_s, keeps=True)
        return outcome, store.trial(outcome.trial_id)

    monkeypatch.setenv("CRASH", "hang")
    waiting = Path(os.environ["CRASH_COUNT"])
    first = apart(1)[1].pid
    monkeypatch.setattr(isolate, "GRACE_S", 2.5)
    outcome, late = apart(3, timeout_s=0.5, crashes=1)
    assert "did not stop by itself" in outcome.error and (late.status, late.pid) == ("failed", first)
    kept = apart(2)[1].pid
    sweep = store.open_sweep("key", "x", None, None, {}, 1, "host", None)
    outcome = run(tracking, "trial.isolate=true", "trial.timeout_s=100", sweep_id=sweep, number=3)
    trial = store.trial(outcome.trial_id)
    assert len({first, kept, trial.pid, os.getpid()}) == 4 and not isolate._kept
    assert (trial.status, trial.config["trial"]["isolate"]) == ("completed", True)
    assert [(job.job, job.last.id) for job in store.trials_of_sweep(sweep)] == [(3, trial.id)]
    assert store.artifacts_of(trial.id, "tokens")[0].path.is_file()
    again = run(tracking)
    assert again.reused and again.trial_id == trial.id  # how a trial is run does not make another one
    forced = run(tracking, "force=true")
    counted = ("session", "turn", "output_sha256", "ttft_ms", "gpu_hit_tokens")
    assert store.turns_of(forced.trial_id, *counted) == store.turns_of(trial.id, *counted)


@pytest.mark.parametrize(
    ("crash", "sentence", "stack"),
    [("kill", "memory ran out", ""), ("native", "SIGSEGV", "Segmentation fault")],
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


def test_retries_run_until_one_completes_or_they_end(tracking, monkeypatch, capsys):
    monkeypatch.setenv("CRASH", "error")
    monkeypatch.setenv("CRASHES", "2")
    outcome = run(tracking, "trial.retries=3", CRASHING)
    assert outcome.completed
    assert tracking.store.trial(outcome.trial_id).attempt == 3
    assert [tracking.store.trial(number).status for number in (1, 2)] == ["failed", "failed"]
    said = capsys.readouterr().err
    assert said.count("and is tried again") == 2 and "it broke" in said
    monkeypatch.setenv("CRASHES", "1000")
    ended = run(tracking, "trial.retries=1", "seed=1", CRASHING)
    assert (ended.status, tracking.store.trial(ended.trial_id).attempt) == ("failed", 2)


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
def test_an_isolated_trial_does_not_outlive_its_sweep(tmp_path, monkeypatch):
    count = tmp_path / "crashes"
    monkeypatch.setenv("CRASH", "hang")
    process = start(tmp_path, "hardware=sim_h100", *SHORT, CRASHING, "trial.isolate=true", "tracking.mlflow=false")
    try:
        deadline = time.monotonic() + 60
        while not count.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        store = open_store(tmp_path, create=False)
        assert store.trial(1).pid != process.pid
        process.kill()
        process.join()
        while store.interrupt_dead() == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert store.trial(1).status == "interrupted"
    finally:
        process.kill()
