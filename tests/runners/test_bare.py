"""A machine with torch and transformers, and without mlflow and matplotlib: what runs, and what it says.

Two of them are new interpreters; the others are forks of this one, in which the package is imported anew.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.typed import typed

CHECKOUT = Path(__file__).resolve().parents[2]
BARE = ("mlflow", "matplotlib")
BLOCKER = (
    "import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n"  # None there: not found, whoever asks in which way
)
SHORT = ("model=llama3_8b", "cache=small", "hardware=sim_a100_80g", "workload.users=2", "workload.max_turns=2",
         "workload.min_turns=2", "workload.pressure=0")  # fmt: skip


@pytest.fixture
def blocker(tmp_path):
    """Makes a folder for PYTHONPATH that hides these packages from a new interpreter."""

    def hide(without):
        folder = tmp_path / "blocker"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(BLOCKER.format(blocked=without))
        return str(folder)

    return hide


@pytest.fixture
def bare(tmp_path, blocker):
    """Runs a runner where the named packages cannot be imported, also not by the processes that it starts."""

    def run(runner, *arguments, without=BARE):
        env = {**os.environ, "PYTHONPATH": blocker(without), "PENSIEVE_OUTPUTS": str(tmp_path), "OMP_NUM_THREADS": "1"}
        env.pop("PYTEST_CURRENT_TEST", None)
        command = [sys.executable, str(CHECKOUT / "runners" / f"{runner}.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=240)

    return run


@pytest.fixture
def forked(tmp_path, blocker):
    """As `bare`, in a fork of this interpreter."""

    def run(runner, *arguments, without=BARE):
        hidden = blocker(without)
        return typed(
            f"runners/{runner}.py", *arguments, outputs=tmp_path, without=without, figures=True, PYTHONPATH=hidden
        )

    return run


def statuses(folder):
    with sqlite3.connect(folder / "results.db") as connection:
        return connection.execute("SELECT baseline, status FROM trial ORDER BY baseline").fetchall()


@pytest.mark.slow
def test_a_trial_and_a_sweep_are_recorded_in_the_database_alone(forked, tmp_path):
    done = forked("run", *SHORT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Nothing was logged to MLflow") == 1
    assert "complete without it" in done.stdout
    done = forked("run", *SHORT, "-m", "seed=0", "baseline=pensieve,stateless")
    assert done.returncode == 0, done.stderr
    assert sum("matplotlib" in line for line in done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert statuses(tmp_path) == [("pensieve", "completed"), ("stateless", "completed")]
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize("runner", ["run", "doctor"])
def test_a_package_that_cannot_be_missing_is_named_in_one_sentence(bare, runner):
    done = bare(runner, without=("omegaconf", "sqlalchemy"))
    assert done.returncode == 1
    assert "is not installed in " in done.stderr
    assert "make install" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("installed", [True, False])
def test_another_python_goes_on_in_the_environment_of_the_checkout(tmp_path, blocker, installed):
    checkout = tmp_path / "checkout"
    for name in ("runners/run.py", "runners/_verb.py", "pensieve/cli.py", "pensieve/__init__.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / name, checkout / name)
    python = checkout / ".venv" / "bin" / "python"
    if installed:
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\necho "$@"\n')
        python.chmod(0o755)
    command = [sys.executable, str(checkout / "runners" / "run.py"), "seed=0,1", "-m"]
    env = {**os.environ, "PYTHONPATH": blocker(["hydra"])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    [said] = done.stderr.strip().splitlines()
    assert f"hydra is not installed for {sys.executable}" in said
    assert (done.returncode == 0, done.stdout.split()) == (installed, command[1:] if installed else [])
    assert (str(python) if installed else "make install") in said
