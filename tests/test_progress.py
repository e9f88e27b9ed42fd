import io
import time

import pytest

from pensieve.lab.trial.terminal import LINE_INTERVAL_S, TrialProgress


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


LINE = "seed=0: 3 of 4 turns, 1 tok/s, about 3 s left\n"


@pytest.mark.parametrize(
    ("terminal", "total", "shown", "told"),
    [
        (False, 4, {}, LINE),
        (False, None, {}, "seed=0: 3 turns, 1 tok/s\n"),
        (True, 4, {"shown": "lines"}, LINE),
        (True, 4, {"shown": "nothing"}, ""),
        (True, 4, {}, None),  # a bar
    ],
)
def test_a_log_gets_a_line_now_and_then_and_a_terminal_a_bar_unless_it_shows_other_trials(
    terminal, total, shown, told, monkeypatch
):
    now, stream = [0.0], Stream(terminal)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    progress = TrialProgress("seed=0", total=total, stream=stream, **shown)
    now[0] = LINE_INTERVAL_S / 2
    progress.update(1, 1)
    assert told is None or stream.getvalue() == ""
    now[0] = LINE_INTERVAL_S * 2
    progress.update(3, 10)
    progress.update(3, 10)
    progress.close()
    assert "seed=0" in stream.getvalue() if told is None else stream.getvalue() == told
