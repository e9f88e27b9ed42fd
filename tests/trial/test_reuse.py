"""Trials of a sweep share the model in memory; what they record is what each would have recorded alone."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from pensieve.device import shelf
from pensieve.errors import ConfigError
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import resolved
from pensieve.lab.results.store import open_store
from pensieve.lab.results.tokens import read_tokens
from pensieve.lab.trial import run as isolate
from pensieve.lab.trial import sweep as sweep_module
from pensieve.lab.trial.command import Jobs
from pensieve.lab.trial.job import Job, Outcome, Tracking
from pensieve.lab.trial.run import run_trial
from tests.composed import checked, composed

REAL = (
    "hardware=cpu", "hardware.threads=1", "model.architecture.num_hidden_layers=1", "trial.exclusive=false",
    "workload.users=2", "workload.min_turns=2", "workload.max_turns=2", "workload.max_new_tokens=6",
    "workload.pressure=0", "workload.think_time_s=0", "workload.request_interval=0", "tracking=local",
    "tracking.mlflow=false",
)  # fmt: skip
COUNTED = ("session", "turn", "prompt_tokens", "history_tokens", "new_tokens", "output_tokens", "output_sha256")
MEASURED = ("model_reused", "model_load_s", "cost")  # at each start


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    yield open_store(tmp_path)
    isolate.end_kept()
    shelf.empty()
    shelf._open.clear()


def run(store, tmp_path, name, *overrides, sweep=None):
    config = resolved(composed(*REAL, *overrides))
    job = Job(name, tmp_path / name, config, sweep_id=sweep)
    outcome = run_trial(job, Tracking(tmp_path, store, False, True))
    assert outcome.completed, outcome.error
    return store.trial(outcome.trial_id)


def load_s(store, trial):
    return next(metric.value for metric in store.metrics_of(trial.id) if metric.name == "load_s")


@pytest.mark.slow
def test_a_trial_with_the_model_of_the_one_before_is_the_same_trial(store, tmp_path):
    """The one before has another cache. One user: a row's last bits depend on how many there are beside it, and with two
    users that depends on the time."""
    one = "workload.users=1"
    alone = run(store, tmp_path, "alone", one)
    with shelf.open_shelf():
        other = run(store, tmp_path, "other", one, "cache.gpu='8192 tokens'")
        again = run(store, tmp_path, "again", one, "force=true")
    assert [t.engine["model_reused"] for t in (alone, other, again)] == [False, False, True]
    assert load_s(store, alone) > 0 and load_s(store, other) > 0 and load_s(store, again) is None
    assert again.engine["model_load_s"] == other.engine["model_load_s"] != alone.engine["model_load_s"]
    assert again.fingerprint == alone.fingerprint != other.fingerprint
    assert again.platform == alone.platform
    kept = [{k: v for k, v in t.engine.items() if k not in MEASURED} for t in (alone, again)]
    assert kept[0] == kept[1]
    assert store.turns_of(alone.id, *COUNTED) == store.turns_of(again.id, *COUNTED) != []
    tokens, theirs = (read_tokens(store.artifacts_of(t.id, "tokens")[0].path) for t in (alone, again))
    assert tokens.keys() == theirs.keys() and len(tokens) >= 4
    for turn, own in tokens.items():
        assert list(own.token_ids) == list(theirs[turn].token_ids)
        assert list(own.margins) == list(theirs[turn].margins)


def test_a_failed_trial_leaves_no_model_to_the_next_one(store, tmp_path, monkeypatch):
    from pensieve.lab.trial import run as run_module

    def fails(*_):
        assert shelf.kept_host_bytes() > 0
        raise RuntimeError("it broke")

    monkeypatch.setattr(run_module.Attempt, "_replay", fails)
    with shelf.open_shelf():
        with pytest.raises(AssertionError, match="it broke"):
            run(store, tmp_path, "first")
        assert shelf.kept_host_bytes() == 0


def test_a_job_of_a_launcher_ends_the_process_it_started_and_needs_the_folder_of_its_sweep(
    store, tmp_path, monkeypatch
):
    """Nobody else would end it, and its model would stay on the device."""
    monkeypatch.setattr(sweep_module, "in_turn", lambda _: False)
    config = OmegaConf.create({"hydra": {"overrides": {"task": [], "hydra": []}}})
    sweep_module.open_sweep(config, Jobs((), {}, ((),)), [composed(*REAL)], [plan_trial(checked(*REAL))])
    told = config.hydra.overrides.hydra[0].partition("=")[2].strip("'")
    here = SimpleNamespace(job=SimpleNamespace(num=0), overrides=config.hydra.overrides)
    here.runtime = SimpleNamespace(output_dir=str(tmp_path / "job"))
    monkeypatch.setattr(sweep_module.HydraConfig, "get", lambda: here)
    ended, jobs = [], []
    monkeypatch.setattr(sweep_module, "end_kept", lambda: ended.append(True))
    monkeypatch.setattr(sweep_module, "outcome_of", lambda job, *_: jobs.append(job) or Outcome(0, "failed"))
    monkeypatch.setenv(sweep_module.MEMBERSHIP, told)
    sweep_module.run_composed(composed(*REAL))
    assert ended and jobs[0].sweep_id == 1
    monkeypatch.setenv(sweep_module.MEMBERSHIP, told.replace(str(tmp_path), "/nowhere"))  # on another machine
    with pytest.raises(ConfigError, match=r"/nowhere .* PENSIEVE_OUTPUTS"):
        sweep_module.run_composed(composed(*REAL))


def test_the_model_that_was_kept_makes_room_where_other_processes_load_it(store, tmp_path, monkeypatch):
    from pensieve.lab.trial import run as run_module

    class Met(Exception):
        """The trial has gone far enough."""

    def starts(*_):
        raise Met(f"kept: {shelf.kept_host_bytes()} bytes")

    monkeypatch.setattr("pensieve.lab.compose.plan.cores", lambda: 2)
    monkeypatch.setattr(run_module, "_system", starts)
    words = (*REAL, "hardware.gpus=2")
    with shelf.open_shelf():
        shelf.take_model(shelf.ModelAsked(plan_trial(checked(*REAL)).model, "random", None, None, 0, "cpu", 1))
        job = Job("a", tmp_path / "a", resolved(composed(*words)))
        outcome = run_trial(job, Tracking(tmp_path, store, False, True))
    assert outcome.error is not None and "kept: 0 bytes" in outcome.error
