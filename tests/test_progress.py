import time

import pytest

from pensieve.lab.trial.terminal import LINE_INTERVAL_S, TrialProgress


@pytest.mark.parametrize(
    ("total", "shown", "told"),
    [(4, True, "seed=0: 3 of 4 turns, 1 tok/s\n"), (None, True, "seed=0: 3 turns, 1 tok/s\n"), (4, False, "")],
)
def test_a_log_gets_a_line_now_and_then(total, shown, told, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    progress = TrialProgress("seed=0", total, shown)
    now[0] = LINE_INTERVAL_S / 2
    progress.update(1, 1)
    assert capsys.readouterr().err == ""
    now[0] = LINE_INTERVAL_S
    progress.update(3, round(LINE_INTERVAL_S))
    progress.update(3, round(LINE_INTERVAL_S))
    progress.close()
    assert capsys.readouterr().err == told
