"""Trials in processes of their own, as the map of sizes runs them."""

from __future__ import annotations

import pytest

from pensieve.lab.commands.size import planner
from pensieve.lab.results.store import open_store
from tests.commands.size.test_planner import outputs, planned, trials

__all__ = ["outputs"]


@pytest.mark.slow
def test_after_ctrl_c_no_process_runs_on_and_the_same_command_finishes_the_map(outputs, monkeypatch):
    asked = (
        "size.gpu=[1024 tokens,4096 tokens]",
        "size.cpu=[0 tokens,4096 tokens]",
        "size.seeds=[3]",
        "size.processes=2",
    )
    note = planner._Planner._note

    def interrupted(*told):
        note(*told)
        raise KeyboardInterrupt

    monkeypatch.setattr(planner._Planner, "_note", interrupted)
    with pytest.raises(SystemExit) as left:
        planned(outputs, *asked)
    monkeypatch.setattr(planner._Planner, "_note", note)
    assert left.value.code == 130
    store, done = open_store(outputs), trials(outputs)
    assert 1 <= done <= 3 and store.latest_sweep().status == "interrupted"
    states = {store.trial(job.last.id).status for job in store.trials_of_sweep(store.latest_sweep().id)}
    assert states <= {"completed", "interrupted"}, "nothing runs on"
    status, found = planned(outputs, *asked)
    assert (status, len(found.cells), trials(outputs)) == (0, 4, 4)
