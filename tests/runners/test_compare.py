"""python runners/compare.py and workload.inspect=true, as a user types them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.compose import resolved
from pensieve.trial import Job, run_trial
from pensieve.trial.tracking import open_tracking
from tests.composed import SHORT as SHORTER
from tests.composed import checked, composed

CHECKOUT = Path(__file__).resolve().parents[2]
SHORT = [
    "hardware=sim_h100",
    "workload.pressure=0",
    "workload.min_turns=2",
    "workload.max_turns=2",
    "tracking.mlflow=false",
]


def run(outputs, script, *arguments):
    env = {key: text for key, text in os.environ.items() if key not in ("PYTEST_CURRENT_TEST", "HYDRA_FULL_ERROR")}
    env |= {"PENSIEVE_OUTPUTS": str(outputs), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(CHECKOUT / "runners" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=outputs.parent, timeout=120)


@pytest.mark.slow
def test_an_inspection_runs_nothing_and_records_nothing(tmp_path):
    outputs = tmp_path / "outputs"
    for sweep in ([], ["-m"]):
        done = run(outputs, "run.py", *SHORT, "workload.inspect=true", "seed=0", *sweep)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("working set") == 1
        assert "x cache.gpu (1,408)" in done.stdout
    assert not (outputs / "results.db").exists()


@pytest.mark.slow
def test_two_baselines_are_compared(tmp_path, monkeypatch):
    outputs = tmp_path / "outputs"
    nothing = run(outputs, "compare.py", "1", "2")
    assert nothing.returncode == 1
    assert len(nothing.stderr.strip().splitlines()) == 1, nothing.stderr
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(outputs))
    tracking = replace(open_tracking(checked("tracking=local")), mlflow=False)
    for baseline in ("pensieve", "stateless"):
        words = ("tracking=local", *SHORTER, f"baseline={baseline}")
        done = run_trial(checked(*words), resolved(composed(*words)), tracking, Job("", outputs / baseline), print)
        assert done.completed
    shown = run(outputs, "compare.py", "baseline=pensieve", "baseline=stateless")
    assert shown.returncode == 0, shown.stderr
    for text in (
        "ttft_ms_mean",
        "95 % interval",
        "8 conversations",
        "n = 1, no interval",
        "stateless in B",
        "One seed",
    ):
        assert text in shown.stdout, text
    assert "queue_ms" not in shown.stdout
