import io
import time

import pytest

from pensieve.lab.trial.terminal import LINE_INTERVAL_S, TrialProgress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_a_log_gets_a_line_now_and_then(clock):
    stream = io.StringIO()
    progress = TrialProgress("seed=0", total=8, stream=stream)
    clock[0] = LINE_INTERVAL_S / 2
    progress.update(1, 10)
    assert stream.getvalue() == ""
    clock[0] = LINE_INTERVAL_S * 2
    progress.update(2, 30)
    progress.update(3, 40)
    progress.close()
    assert stream.getvalue() == "seed=0: 2 of 8 turns, 3 tok/s, about 30 s left\n"


def test_nobody_knows_the_total(clock):
    stream = io.StringIO()
    progress = TrialProgress("x", total=None, stream=stream)
    clock[0] = 10.0
    progress.update(0, 5)
    assert stream.getvalue() == "x: 0 turns, 0 tok/s\n"


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    progress = TrialProgress("seed=0", total=4, stream=stream)
    progress.update(3, 10)
    progress.close()
    assert "seed=0" in stream.getvalue()


@pytest.mark.parametrize(
    ("shown", "expected"), [("lines", "seed=0: 3 of 4 turns, 1 tok/s, about 3 s left\n"), ("nothing", "")]
)
def test_beside_other_trials_a_terminal_gets_lines_and_nothing_where_nothing_is_asked(clock, shown, expected):
    stream = Terminal()
    progress = TrialProgress("seed=0", total=4, stream=stream, shown=shown)
    clock[0] = 2 * LINE_INTERVAL_S
    progress.update(3, 10)
    progress.close()
    assert stream.getvalue() == expected


def test_quiet_under_pytest(capsys, clock):
    progress = TrialProgress("seed=0", total=4)
    clock[0] = 100.0
    progress.update(1, 1)
    progress.close()
    assert capsys.readouterr().err == ""
