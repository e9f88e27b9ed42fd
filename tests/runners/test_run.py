"""The command lines a user types, in processes of their own: forks of this one but where a new one matters."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.runners.sweeping import SHORT
from tests.typed import typed, typed_process

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def outputs(tmp_path):
    return tmp_path / "outputs"


def run(outputs, *arguments, script="run.py", **given):
    return typed(f"runners/{script}", *arguments, outputs=outputs, **given)


def rows(outputs, query):
    with sqlite3.connect(outputs / "results.db") as connection:
        return connection.execute(query).fetchall()


OVERLAY = """# @package _global_
defaults:
  - override /sweep: none
workload:
  max_new_tokens: {tokens}
hydra:
  sweeper:
    params:
      baseline: pensieve,stateless
"""


def test_an_edited_overlay_is_another_sweep(outputs, tmp_path):
    """The same command, and other trials: one table must not pool them."""
    overlay = tmp_path / "experiment" / "mine.yaml"
    overlay.parent.mkdir()
    arguments = ("-m", "--config-dir=.", "experiment=mine", *SHORT, "seed=0", "tracking.mlflow=false")
    for tokens in (8, 8, 4):
        overlay.write_text(OVERLAY.format(tokens=tokens))
        done = run(outputs, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    # The first two are one sweep; of the third, the table has its own trials.
    assert rows(outputs, "select id, n_expected from sweep order by id") == [(1, 2), (2, 2)]
    shown = rows(outputs, "select sweep_id, job, trial_id > 2 from sweep_result order by sweep_id, job")
    assert shown == [(1, 0, 0), (1, 1, 0), (2, 0, 1), (2, 1, 1)]


@pytest.mark.slow
def test_a_reader_that_has_read_enough_hears_no_complaint(outputs):
    """... | head"""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out, tempfile.TemporaryFile("w+") as err:
        process = typed_process("runners/run.py", *SHORT, "workload.inspect=true", "-m", outputs=outputs, to=(out, err))
        process.join(60)
        err.seek(0)
        assert err.read() == ""
    assert process.exitcode == 0


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_130(outputs):
    """In a new interpreter, and also where the suite itself runs in a shell's background, which ignores Ctrl-C."""
    long = ["hardware=sim_h100", "workload.conversations=4000", "tracking.mlflow=false", "seed=0"]
    given = {**os.environ, "PENSIEVE_OUTPUTS": str(outputs)}
    given.pop("PYTEST_CURRENT_TEST", None)
    command = [sys.executable, str(CHECKOUT / "runners" / "run.py"), "-m", *long]
    process = subprocess.Popen(
        command,
        env=given,
        cwd=outputs.parent,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(sqlite3.OperationalError):  # the database is being made
            if outputs.exists() and rows(outputs, "select 1 from trial where status = 'running'"):
                break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said.strip().splitlines()[-1].startswith("Interrupted;")
    assert set(rows(outputs, "select status from trial")) == {("interrupted",)}
    assert rows(outputs, "select status from sweep") == [("interrupted",)]
