import signal
from contextlib import nullcontext

import pytest
from hydra.core.global_hydra import GlobalHydra

from pensieve import cli
from pensieve.lab.trial import terminal


@pytest.fixture
def pressed():
    """Ctrl-C as a new interpreter takes it, and as before afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    terminal._pressed = terminal._ending = False


@pytest.fixture
def typed(tmp_path, monkeypatch, pressed):
    """Runs run.py with these arguments in this process; its exit status."""
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

    return run
