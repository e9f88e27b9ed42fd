import time
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import insert

from pensieve import cli
from pensieve.errors import ResultsError
from pensieve.lab.results.listing import list_sweeps, list_trials, prunable, prune, show_trial
from pensieve.lab.results.schema import MetricRow, Trial
from pensieve.lab.results.store import open_store
from tests.results.test_database import in_another_process
from tests.results.trials import add_trial, conversation_turns, open_sweep, trial_fields


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def test_the_newest_come_first_with_what_tells_them_apart(store):
    sweep = open_sweep(store, 2, seed="0,1")
    add_trial(store, sweep, 0, "pensieve", [], {"ttft_ms_p50": 12.345})
    add_trial(store, sweep, 1, "stateless", [])
    failed = store.begin_trial(trial_fields("failed", baseline="gpu_only"))
    store.finish_trial(failed, "failed", error="no")
    titles, *rows = list_trials(store)
    assert titles.split()[:3] == ["trial", "status", "baseline"]
    assert [row.split()[:3] for row in rows] == [
        ["3", "failed", "gpu_only"], ["2", "completed", "stateless"], ["1", "completed", "pensieve"],
    ]  # fmt: skip
    assert rows[2].split()[-3:] == ["12.35", "100", "0.5"]
    assert rows[0].split()[-3:] == ["-", "-", "-"]
    assert len(list(list_trials(store, sweep))) == 1 + 2
    assert [row.split()[0] for row in list_trials(store, status="failed")] == ["trial", "3"]
    assert len(list(list_trials(store, limit=1))) == 1 + 1
    assert list(list_sweeps(store))[1].split()[:3] == ["1", "running", "2"]
    assert list(list_sweeps(store))[1].endswith("seed=0,1")


def test_ten_thousand_trials_list_in_a_second(store):
    trial = store.begin_trial(trial_fields())
    store.finish_trial(trial, "completed")
    with store.database.writing() as connection:
        row = dict(connection.execute(Trial.__table__.select()).one()._mapping)
        ids = range(2, 10_001)
        connection.execute(insert(Trial), [{**row, "id": i, "fingerprint": str(i)} for i in ids])
        names = [f"metric_{i}" for i in range(20)] + ["ttft_ms_p50", "throughput_output_tok_s", "gpu_hit_rate"]
        metrics = [{"trial_id": i, "name": n, "label": "", "value": 1.5, "unit": "ms"} for i in ids for n in names]
        connection.execute(insert(MetricRow), metrics)
    before = time.process_time()  # not the wall: other tests share this machine
    lines = list(list_trials(store))
    assert time.process_time() - before < 1
    assert len(lines) == 10_001
    assert lines[1].split()[-3:] == ["1.5"] * 3


def test_a_trial_that_is_not_there_is_said(store):
    with pytest.raises(ResultsError, match="no trial 99"):
        list(show_trial(store, 99))


def test_a_killed_sweep_is_listed_as_interrupted(store, tmp_path, monkeypatch, capsys):
    store.set_sweep(open_sweep(store), started_at=datetime.now(UTC) - timedelta(hours=1))
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    assert cli.results(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["1", "interrupted"]


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
