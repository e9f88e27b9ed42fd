import signal
import sys

import pytest

from pensieve.lab.trial import terminal
from pensieve.lab.trial.terminal import ends_interrupted, raise_if_interrupted, remember_interrupts


@pytest.fixture(autouse=True)
def python_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    terminal._pressed = terminal._ending = False


def test_a_second_ctrl_c_waits_for_a_safe_point(monkeypatch):
    """Raised where Python calls back, it would be printed and dropped."""

    class Freed:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    remember_interrupts()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    ends_interrupted()
    Freed()
    assert dropped == []
    with pytest.raises(KeyboardInterrupt):
        raise_if_interrupted()
