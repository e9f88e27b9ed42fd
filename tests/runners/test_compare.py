"""python runners/compare.py and workload.inspect=true, as a user types them."""

from dataclasses import replace

import pytest

from pensieve.lab.compose import resolved
from pensieve.lab.trial import Job, run_trial
from pensieve.lab.trial.tracking import open_tracking
from tests.composed import SHORT as SHORTER
from tests.composed import checked, composed
from tests.typed import typed

SHORT = [
    "hardware=sim_h100",
    "workload.pressure=0",
    "workload.min_turns=2",
    "workload.max_turns=2",
    "tracking.mlflow=false",
]


def run(outputs, script, *arguments):
    return typed(f"runners/{script}", *arguments, outputs=outputs)


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
