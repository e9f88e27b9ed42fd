import os
import re
import signal
import sys
import time
from dataclasses import replace

import pytest
from sqlalchemy import select

from pensieve.errors import ConfigError, ResultsError
from pensieve.lab.metrics import SLO_METRICS
from pensieve.lab.results.schema import MetricRow, Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.tokens import read_tokens
from pensieve.lab.trial import run as run_module
from pensieve.lab.trial.job import heartbeat, open_tracking
from pensieve.lab.trial.sweep import brief
from pensieve.lab.trial.terminal import raise_if_interrupted, remember_interrupts
from pensieve.lab.workload.chat import ChatWorkload
from tests.composed import checked
from tests.trial.running import run


def test_a_trial_is_recorded_whole(tracking):
    outcome = run(tracking, "slo.ttft_ms=1000")
    store = tracking.store
    trial = store.trial(outcome.trial_id)
    assert outcome.completed
    assert not outcome.reused
    assert (trial.status, trial.baseline, trial.simulated, trial.weights) == ("completed", "pensieve", True, "none")
    assert trial.config["model"]["name"] == "tiny"
    assert trial.measure_end_s > trial.measure_start_s > 0
    assert trial.engine["workload"]["load"] == "partly open"
    assert trial.flags["load"] == "partly open"
    metrics = {(m.name, m.label): m.value for m in store.metrics_of(outcome.trial_id)}
    for name in (
        "ttft_ms_mean", "warmup_ms_mean", "throughput_output_tok_s", "gpu_hit_rate", "cpu_hit_rate", "miss_rate",
        "slo_attainment", "schedule_ms_mean",
    ):  # fmt: skip
        assert metrics[name, ""] is not None, name
    turns = store.turns_of(outcome.trial_id)
    assert len(turns) == trial.engine["workload"]["turns"]
    (tokens,) = store.artifacts_of(outcome.trial_id, "tokens")
    assert set(read_tokens(tokens.path)) == {(t.session, t.turn) for t in turns}
    assert "TTFT first turn" in brief(store, outcome.trial_id)


def test_a_trial_whose_attention_fell_back_is_flagged_with_the_reason(tracking, monkeypatch):
    build = run_module.build_system

    def without_a_kernel(*arguments):
        system = build(*arguments)
        report = system.start()
        found = {"attention_backend": "reference", "attention_note": "Not native: No compiler.", "forward": "fused"}
        settings = {**report.settings, **found, "forward_note": "", "fell_back": True}
        monkeypatch.setattr(system, "start", lambda: replace(report, settings=settings))
        return system

    assert "fell_back" not in tracking.store.trial(run(tracking).trial_id).flags
    monkeypatch.setattr(run_module, "build_system", without_a_kernel)
    trial = tracking.store.trial(run(tracking, "force=true").trial_id)
    said = "attention_backend=reference and the fused forward served. Not native: No compiler."
    assert trial.flags["fell_back"] == said
    assert trial.engine["attention_backend"] == "reference"


def test_a_completed_trial_runs_again_by_force_or_with_other_code_alone(tracking, monkeypatch, capsys):
    first = run(tracking)
    again = run(tracking)
    assert (again.reused, again.trial_id) == (True, first.trial_id)
    assert run(tracking, "seed=1").trial_id != first.trial_id
    forced = run(tracking, "force=true")
    assert (forced.reused, tracking.store.trial(forced.trial_id).attempt) == (False, 2)
    monkeypatch.setattr("pensieve.lab.results.identity.code_hash", lambda _: "other")
    accepted = run(tracking, "resume=config")
    assert (accepted.reused, accepted.trial_id) == (True, forced.trial_id)
    assert not run(tracking).reused
    assert f"the code changed since trial {forced.trial_id}" in capsys.readouterr().err


def test_ctrl_c_marks_the_trial_and_keeps_no_half_file(tracking, monkeypatch, pressed):
    def interrupt(*_args, **_kwargs):
        signal.raise_signal(signal.SIGINT)

    class Freed:
        """Raised where Python calls back, an interrupt would be printed and dropped."""

        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    remember_interrupts()
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "replay", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tracking)
    Freed()
    assert dropped == []
    with pytest.raises(KeyboardInterrupt):  # a second one waits until the first has been recorded
        raise_if_interrupted()
    trial = tracking.store.trial(1)
    assert trial.status == "interrupted"
    assert trial.error
    assert not list(tracking.outputs.rglob("*.parquet"))
    assert run(tracking).completed


def test_a_database_that_fails_late_does_not_hide_the_first_error(tracking, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise ResultsError("The disk is full.")

    monkeypatch.setattr(type(tracking.store), "add_metrics", refuse)
    monkeypatch.setattr(type(tracking.store), "finish_trial", refuse)
    assert run(tracking).error == "The disk is full."


def test_the_heart_beats_while_the_trial_lives(tracking):
    beats = []

    class Store:
        def heartbeat(self, trial_id):
            beats.append(trial_id)
            raise ResultsError("locked")  # a beat that fails must not stop the next

    with heartbeat(Store(), 7, interval_s=0.01):
        while len(beats) < 2:
            time.sleep(0.01)
    count = len(beats)
    time.sleep(0.05)
    assert len(beats) == count
    assert set(beats) == {7}


def test_the_database_is_where_tracking_and_the_environment_say(monkeypatch, tmp_path):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path / "never"))
    opened = open_tracking(checked().tracking)
    assert (opened.kept, opened.mlflow) == (False, False)
    assert open_tracking(checked().tracking).outputs == opened.outputs
    assert not (tmp_path / "never").exists()
    monkeypatch.delenv("PENSIEVE_DB_URL", raising=False)
    with pytest.raises(ConfigError, match="PENSIEVE_DB_URL"):
        open_tracking(checked("tracking=postgres").tracking)
    monkeypatch.setenv("PENSIEVE_DB_URL", f"sqlite:///{tmp_path / 'mine.db'}")
    assert os.fspath(open_tracking(checked("tracking=postgres").tracking).store.database.path) == str(
        tmp_path / "mine.db"
    )


def metrics(tracking, trial_id):
    return {(m.name, m.label): m.value for m in tracking.store.metrics_of(trial_id)}


def judged(store, sweep):
    [job] = store.trials_of_sweep(sweep)
    return {name: metric.value for (name, _), metric in job.metrics.items() if name in SLO_METRICS}


def rows(store):
    with store.database.reading() as connection:
        found = [connection.execute(select(table)).all() for table in (Trial.__table__, MetricRow.__table__)]
    return [str(row) for part in found for row in part]


def test_each_sweep_shows_a_trial_under_its_own_objective_and_no_row_of_it_changes(tracking):
    store = tracking.store

    def sweep(*overrides):
        given = dict(text.split("=") for text in overrides)
        number = store.open_sweep(str(overrides), "x", None, None, given, 1, "host", None)
        return number, run(tracking, *overrides, sweep_id=number)

    lenient, first = sweep("slo.ttft_ms=1e9")
    shown, stored = judged(store, lenient), rows(store)
    assert shown["slo_attainment"] == 1.0
    found = metrics(tracking, first.trial_id)
    strict, again = sweep(f"slo.ttft_ms={found['ttft_ms_p50', '']}", f"slo.tpot_ms={found['tpot_ms_mean', '']}")
    assert (again.reused, again.trial_id) == (True, first.trial_id)
    assert 0.0 < judged(store, strict)["slo_attainment"] < 1.0
    plain, _ = sweep("workload.users=2")
    assert judged(store, plain) == {}
    assert judged(ResultsStore(store.database.url), lenient) == shown
    assert [row for row in rows(store) if row in stored] == stored
    assert not any(name in row for row in rows(store) for name in SLO_METRICS)


@pytest.mark.parametrize(
    ("body", "says"), [("1 / 0", r"my_bad_policy\.py, line 4 \(order\), raised Zero"), ("float('nan')", "returned nan")]
)
def test_a_policy_that_fails_is_named_with_its_file(tracking, tmp_path, monkeypatch, body, says):
    (tmp_path / "my_bad_policy.py").write_text(
        "from pensieve.core.policies.lru import Lru\nclass Mine(Lru):\n    def order(self, session, chunk):\n"
        f"        return {body}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_bad_policy", raising=False)
    outcome = run(tracking, "eviction=lru", "eviction._target_=my_bad_policy.Mine")
    assert outcome.status == "failed"
    assert re.search(says, outcome.error), outcome.error


def test_a_forced_trial_and_a_failed_one_leave_an_older_sweep_as_it_was(tracking):
    store = tracking.store

    def opened(key):
        return store.open_sweep(key, key, None, None, {}, 1, "here", None)

    first = opened("first")
    shown = run(tracking, sweep_id=first).trial_id
    before = [(m.name, m.label, m.value) for m in store.metrics_of(shown)]
    second = opened("second")
    forced = run(tracking, "force=true", sweep_id=second).trial_id
    assert shown != forced
    assert [job.trial.id for job in store.trials_of_sweep(first)] == [shown]
    assert [job.trial.id for job in store.trials_of_sweep(second)] == [forced]
    assert [(m.name, m.label, m.value) for m in store.metrics_of(shown)] == before
    again = run(tracking, sweep_id=first)  # the same command, without force: what it shows stays
    assert (again.reused, again.trial_id) == (True, shown)
    assert run(tracking).trial_id == forced, "outside of a sweep the newest counts"


def test_a_cache_state_that_did_not_hold_invalidates_the_trial(tracking, monkeypatch):
    describe = ChatWorkload.describe
    monkeypatch.setattr(ChatWorkload, "describe", lambda self: replace(describe(self), cache_state="primed"))
    outcome = run(tracking)
    trial = tracking.store.trial(outcome.trial_id)
    assert not outcome.completed
    assert trial.status == "failed"
    assert "starts with a primed cache" in trial.error
    assert tracking.store.metrics_of(trial.id) == []
