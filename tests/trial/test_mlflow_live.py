"""A trial goes on whatever becomes of the process that shows it in MLflow."""

import json
import sys
import time

import pytest

from pensieve.lab.results.store import open_store
from pensieve.lab.trial import mlflow, mlflow_process
from pensieve.lab.trial.job import Job
from pensieve.lab.trial.mlflow import LiveRun
from pensieve.lab.trial.tracking import Tracking
from tests.results.trials import trial_fields, turn

ANSWERS = """
import sys
for line in sys.stdin:
    print(line, end="", file=open(sys.argv[1], "a"))
    print("ready" if "run" in line else "ended" if "end" in line else "", flush=True)
"""


class Gauges:
    latest = (1.0, {"gpu_blocks_used": 3.0})


@pytest.fixture
def live(tmp_path, monkeypatch, live_mlflow):
    """Makes the LiveRun of a new trial, whose writer is the given command."""
    store = open_store(tmp_path)

    def made(*command):
        mlflow._writer.cache_clear()
        monkeypatch.setattr(mlflow_process, "COMMAND", command)
        monkeypatch.setattr(mlflow_process, "find_spec", lambda package: "there")
        trial = store.begin_trial(trial_fields(f"f{time.monotonic()}"))
        return LiveRun(Tracking(tmp_path, store, True, True), trial, "pensieve", Job("t", tmp_path))

    yield made
    writer = mlflow._writer() if mlflow._writer.cache_info().currsize else None
    mlflow._writer.cache_clear()
    if writer is not None:
        writer.kill()


def test_turns_and_gauges_are_told_and_the_end_is_waited_for(live, tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow, "INTERVAL_S", 0.05)
    told = tmp_path / "told"
    with live(sys.executable, "-c", ANSWERS, str(told)) as run:
        run.watch(Gauges())
        run.finished(turn("s", 1, 10.0))
        run.finished(turn("w", 1, 900.0, phase="warmup"))
        run.end()
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    assert lines[0]["run"]["tags"]["status"] == "running"
    assert lines[-1] == {"end": True}
    assert [one[:2] for line in lines[1:-1] for one in line["turns"]] == [[1, 10.0]]
    assert all(line["gauges"] == {"gpu_blocks_used": 3.0} for line in lines[1:-1])


@pytest.mark.parametrize("command", [["false"], ["sleep", "60"], ["yes", "noise"]])
def test_a_writer_that_dies_hangs_or_talks_nonsense_costs_the_trial_nothing(live, monkeypatch, command):
    monkeypatch.setattr(mlflow, "READY_S", 0.3)
    monkeypatch.setattr(mlflow, "LAST_LINES_S", 0.3)
    began = time.monotonic()
    with live(*command) as run:
        run.watch(Gauges())
        run.finished(turn("s", 1, 10.0))
    assert time.monotonic() - began < 30
    assert mlflow._writer.cache_info().currsize == 0, "the next trial starts another"
