"""trial.profile=true: the trace is an artifact, and the trial is never taken for one whose timings count."""

from tests.trial.running import run

REAL = (
    "hardware=cpu", "hardware.threads=1", "model.architecture.num_hidden_layers=1", "tracking.mlflow=false",
    "trial.exclusive=false", "workload.users=2", "workload.min_turns=2", "workload.max_turns=2",
    "workload.max_new_tokens=6", "workload.pressure=0", "workload.think_time_s=0", "workload.request_interval=0",
)  # fmt: skip


def test_a_profiled_trial_leaves_a_trace_and_is_no_other_trials_result(tracking):
    store = tracking.store
    outcome = run(tracking, "trial.profile=true", words=REAL)
    assert outcome.completed, outcome.error
    profiled = store.trial(outcome.trial_id)
    assert profiled.flags["profiled"] is True
    (trace,) = store.artifacts_of(profiled.id, "trace")
    assert trace.path.name == "trace.json.gz" and trace.path.is_file() and trace.sha256
    again = run(tracking, "trial.profile=true", words=REAL)
    assert again.reused
    plain = run(tracking, words=REAL)
    assert not plain.reused
    trial = store.trial(plain.trial_id)
    assert "profiled" not in trial.flags and store.artifacts_of(trial.id, "trace") == []
    assert trial.config_hash != profiled.config_hash
