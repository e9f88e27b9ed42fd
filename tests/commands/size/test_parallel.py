"""Trials in processes of their own, as the map of sizes runs them."""

from pensieve.lab.commands.size import parallel
from pensieve.lab.results.environment import this_process
from pensieve.lab.trial.job import Asked, Job


def test_after_ctrl_c_a_worker_begins_no_trial_that_waited_for_it(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(parallel, "_outcome", lambda asked, tracking: begun.append(asked))
    monkeypatch.setattr(parallel, "_ended", False)
    monkeypatch.setattr("pensieve.lab.trial.terminal._interrupted", True)
    asked = Asked({}, Job("", tmp_path))
    assert [parallel._perform(asked, tmp_path, this_process()) for _ in range(2)] == [None, None]
    assert begun == []
