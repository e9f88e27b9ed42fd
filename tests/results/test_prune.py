import pytest

from pensieve.lab.results.prune import prunable, prune
from pensieve.lab.results.store import open_store
from tests.results.test_database import in_another_process
from tests.results.trials import conversation_turns, open_sweep, trial_fields


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def attempt(store, fingerprint, status, tokens=None):
    trial = store.begin_trial(trial_fields(fingerprint))
    store.add_turns(trial, conversation_turns([1.0]))
    if tokens is not None:
        tokens.parent.mkdir(exist_ok=True)
        tokens.write_bytes(b"tokens")
        store.add_artifact(trial, "tokens", tokens)
    store.finish_trial(trial, status)
    return trial


def test_replaced_attempts_go_and_sweeps_point_to_what_is_left(store, tmp_path):
    sweep = open_sweep(store, 2)
    replaced, kept = tmp_path / "runs" / "old.parquet", tmp_path / "runs" / "new.parquet"
    old = attempt(store, "a", "completed", replaced)
    current = attempt(store, "a", "completed", kept)
    worse = attempt(store, "a", "failed")  # newer, but tables read the completed one
    hopeless = attempt(store, "b", "failed")
    for job, trial in enumerate((worse, hopeless)):
        store.link(sweep, trial, job, reused=False)
    chosen = prunable(store)
    assert [(one.trial_id, one.status, one.successor) for one in chosen] == [
        (old, "completed", current), (worse, "failed", current),
    ]  # fmt: skip
    assert prune(store, chosen) == len(b"tokens")
    assert not replaced.exists()
    assert kept.exists()
    assert [(job.job, job.last.id) for job in store.trials_of_sweep(sweep)] == [(0, current), (1, hopeless)]
    assert store.completed_trial("a").id == current
    assert store.turns_of(old) == []
    assert len(store.turns_of(current)) == 4
    assert prunable(store) == []
    (last,) = prunable(store, failed=True)
    prune(store, [last])
    assert [job.job for job in store.trials_of_sweep(sweep)] == [0]


def test_running_trials_and_files_elsewhere_stay(store, tmp_path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "tokens.parquet"
    attempt(store, "a", "failed", elsewhere)
    attempt(store, "a", "completed")
    store.begin_trial(trial_fields("running"))
    dead = int(in_another_process(lambda: store.begin_trial(trial_fields("dead"))))
    chosen = prunable(store, failed=True)
    assert [one.trial_id for one in chosen] == [1, dead]
    prune(store, chosen)
    assert elsewhere.exists()
    assert store.trial(3).status == "running"


def test_what_a_sweep_shows_stays(store):
    sweep = open_sweep(store, 1)
    first = attempt(store, "a", "completed")
    store.link(sweep, first, 0, reused=False)
    between, newest = attempt(store, "a", "completed"), attempt(store, "a", "completed")
    assert [one.trial_id for one in prunable(store)] == [between]
    prune(store, prunable(store))
    assert [job.trial.id for job in store.trials_of_sweep(sweep)] == [first]
    assert store.completed_trial("a").id == newest


def test_a_failed_last_attempt_leaves_the_sweep_with_what_it_shows(store):
    sweep = open_sweep(store, 1)
    first, failed = attempt(store, "a", "completed"), attempt(store, "a", "failed")
    store.link(sweep, failed, 0, reused=False)
    attempt(store, "a", "completed")
    prune(store, prunable(store))
    assert [(job.last.id, job.trial.id) for job in store.trials_of_sweep(sweep)] == [(first, first)]
