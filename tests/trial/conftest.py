import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hydra.core.global_hydra import GlobalHydra

from pensieve import cli
from pensieve.lab.trial import terminal
from pensieve.lab.trial.job import open_tracking
from tests.composed import checked


@pytest.fixture
def tracking(tmp_path, monkeypatch):
    """A database in a folder of its own."""
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    return replace(open_tracking(checked("tracking=local").tracking), mlflow=False)


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """Runs run.py with these arguments in this process; its exit status."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr("pensieve.lab.trial.sweep.drawing", lambda *_: nullcontext(list))

    def run(*arguments):
        GlobalHydra.instance().clear()
        monkeypatch.setattr("sys.argv", ["run.py", *arguments])
        try:
            return cli.run()
        except SystemExit as left:
            return left.code

    yield run
    signal.signal(signal.SIGINT, before)
    terminal._pressed = terminal._ending = False
