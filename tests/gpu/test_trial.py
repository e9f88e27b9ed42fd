"""On a GPU: one trial from the command line, in a process of its own, with everything that a trial records."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_device

CHECKOUT = Path(__file__).resolve().parents[2]


def test_a_trial_runs_and_records_the_device(tmp_path: Path) -> None:
    environment = {**os.environ, "PENSIEVE_OUTPUTS": str(tmp_path)}
    environment.pop("PYTEST_CURRENT_TEST", None)
    command = [
        sys.executable, str(CHECKOUT / "runners" / "run.py"), "hardware=cuda", "hardware.depth=2", "model=tiny",
        "cache=demo", "workload.users=2", "workload.max_turns=2", "workload.min_turns=2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "results.db") as connection:
        ((status, device, simulated, engine),) = connection.execute(
            "SELECT status, device, simulated, engine FROM trial"
        ).fetchall()
    assert (status, simulated) == ("completed", 0) and device != "cpu" and '"depth": 2' in engine
