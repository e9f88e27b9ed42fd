"""The `pensieve` command: as the console script calls it, and from a folder laid out as the wheel is."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from pensieve import cli
from pensieve.lab.trial.terminal import command_line
from tests.runners.sweeping import SHORT
from tests.test_recipes import UNFINISHED

CHECKOUT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
RUNNERS = ("advise", "bench", "chat", "compare", "doctor", "profile", "record", "results", "run", "serve", "size")
VERBS = (*RUNNERS, "demo", "mlflow")
SCRIPT = "import sys\nfrom pensieve.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def command(monkeypatch, *arguments):
    """Call the console script in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/pensieve", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as left:  # pip's script exits with what main returns
        sys.exit(EntryPoint("pensieve", PROJECT["project"]["scripts"]["pensieve"], "console_scripts").load()())
    return left.value.code


@pytest.fixture
def installed(tmp_path):
    """Runs the command on a copy of what pyproject.toml puts into the wheel, from a folder without a checkout."""
    site, cwd = tmp_path / "site", tmp_path / "cwd"
    cwd.mkdir()
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    for package in wheel["packages"]:
        shutil.copytree(CHECKOUT / package, site / package, ignore=UNFINISHED)  # what is compiled stays compiled
    for source, target in wheel["force-include"].items():
        shutil.copytree(CHECKOUT / source, site / target, ignore=UNFINISHED)
    script = tmp_path / "bin" / "pensieve"  # without a suffix, as pip writes it
    script.parent.mkdir()
    script.write_text(SCRIPT)

    def run(*arguments):
        env = {k: v for k, v in os.environ.items() if k not in ("PYTEST_CURRENT_TEST", "PENSIEVE_OUTPUTS")}
        env |= {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, str(script), *arguments]
        return subprocess.run(words, capture_output=True, text=True, env=env, cwd=cwd, timeout=240, check=False)

    return run


def test_each_runner_is_a_verb_and_each_verb_a_runner(monkeypatch, capsys):
    assert sorted(file.stem for file in (CHECKOUT / "runners").glob("[a-z]*.py")) == list(RUNNERS)
    assert command(monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n{verb:<9}{getattr(cli, verb).__doc__}" in shown


@pytest.mark.parametrize(
    ("program", "typed"),
    [("runners/run.py", "python runners/run.py -m 'a=\"b c\"'"), ("pensieve run", "pensieve run -m 'a=\"b c\"'")],
)
def test_a_sweep_records_the_command_that_was_typed(monkeypatch, program, typed):
    monkeypatch.setattr(sys, "argv", [program, "-m", 'a="b c"'])
    assert command_line() == typed


@pytest.mark.slow
def test_an_installed_command_sweeps_draws_lists_and_shows_its_help_without_a_checkout(installed, tmp_path):
    words = ("tracking.mlflow=false", "seed=0", "baseline=stateless", "trial.isolate=true")
    swept = installed("demo", *SHORT, *words)
    assert swept.returncode == 0, swept.stderr
    assert f"Database: {tmp_path / 'cwd' / 'outputs' / 'results.db'}" in swept.stdout
    assert (tmp_path / "cwd" / "outputs" / "figures" / "sweep-1" / "hit_rates.png").is_file()
    [(recorded,)] = sqlite3.connect(tmp_path / "cwd" / "outputs" / "results.db").execute("select command from sweep")
    assert recorded.startswith("pensieve run -m experiment=demo ")
    assert "[1/1] : TTFT first turn" in swept.stderr
    listed = installed("results", "list")
    found = {tuple(line.split()[1:3]) for line in listed.stdout.splitlines()[4:]}
    assert found == {("completed", "stateless")}
    assert "sim_a100_80g" in installed("run", "--help").stdout
