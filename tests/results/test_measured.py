"""Which turns count is said in one place: what re-warms a conversation is in no number of any reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pensieve
from pensieve.core.request import is_measured
from pensieve.errors import RequestFailed
from pensieve.lab.metrics import Measurement, summarise
from pensieve.lab.results.export import baseline_report
from pensieve.lab.results.frame import Frame, measured_turns
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import sweep_table
from pensieve.lab.trial.run import _refuse_empty
from tests.results.trials import MEMORY, add_trial, open_sweep, turn

PHASES = ("warmup", "hit", "rewarm", "throughput")


def steps():
    found = []
    for number, phase in enumerate(PHASES, start=1):
        ms = 10.0 if is_measured(phase) else 990.0
        found.append(turn("a", number, ms, phase=phase, latency_ms=ms, finished_s=float(number)))
        found[-1].ordinal = number
    return found


@pytest.fixture
def recorded():
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store)
    return store, sweep, add_trial(store, sweep, 0, "pensieve", steps())


def test_every_reader_takes_the_same_turns(recorded):
    store, sweep, trial = recorded
    assert [row.phase for row in measured_turns(store, trial)] == ["hit", "throughput"]
    [job] = store.trials_of_sweep(sweep)
    assert [run["run_id"] for run in baseline_report(store, [job])["runs"]] == [f"{trial}/a/2", f"{trial}/a/4"]
    assert list(Frame(store, sweep).turns([store.trial(trial)]).index.get_level_values("turn")) == [2, 4]
    [row] = sweep_table(store, sweep).rows
    assert (row.ttft_first_ms, row.ttft_last_ms) == pytest.approx((10.0, 10.0))
    assert any((note.code, note.values) == ("warm_up", {"count": "2"}) for note in sweep_table(store, sweep).notes)
    found = {(m.name, m.label): m for m in summarise(Measurement(steps(), 0.0, 5.0, 0.0, 5.0))}
    assert found["ttft_ms_mean", ""].n == found["turns", "completed"].value == 2


def test_a_trial_that_only_warmed_up_has_measured_nothing():
    with pytest.raises(RequestFailed, match="No measured turn completed"):
        _refuse_empty([turn for turn in steps() if turn.phase in ("warmup", "rewarm")])


def test_no_module_has_a_rule_of_its_own():
    """Every phase but some that a module names itself would be a second definition."""
    root = Path(pensieve.__file__).parents[1]
    own = re.compile(r"""\.phase\s*(!=|not in)\s*\(?["'](warmup|rewarm)""")
    files = [file for part in ("pensieve", "analysis", "runners") for file in (root / part).rglob("*.py")]
    assert [str(file) for file in files if own.search(file.read_text(encoding="utf-8"))] == []
