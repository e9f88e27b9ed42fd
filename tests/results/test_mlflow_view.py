from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pensieve.lab.results.mlflow_view import (
    data_files,
    is_param,
    note,
    sweep_name,
    sweep_tags,
    trial_name,
    trial_tags,
)
from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.trials import swept_axes
from tests.results.trials import trial_fields

BEGAN = datetime(2026, 11, 22, 3, 31, tzinfo=UTC)


def sweep(experiment: str | None = None, **overrides: str) -> Sweep:
    return Sweep(
        id=3, key="k", name="pensieve", experiment=experiment, command="python runners/run.py -m", overrides=overrides,
        git_commit="abc", started_at=BEGAN,
    )  # fmt: skip


def trial(**changed: object) -> Trial:
    return Trial(id=7, repeat=changed.pop("repeat", 0), error=None, **trial_fields(**changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({"seed": "0,1", "eviction": "lru,fifo", "baseline": "pensieve"}, "eviction=lru seed=0"),
        ({"seed": "0,1", "baseline": "pensieve,stateless"}, "pensieve seed=0"),
        ({"seed": "0,1", "workload.pressure": "1,2", "baseline": "a,b"}, "pensieve workload.pressure=2.0 seed=0"),
        ({"seed": "range(0,9)", "cache.gpu": "'1,024 tokens'"}, "pensieve seed=0"),
        ({"hydra.sweeper.n_trials": "1,2"}, "pensieve seed=0"),
        (None, "pensieve seed=0"),
    ],
)
def test_a_trial_is_called_by_its_place_on_the_swept_axes_and_a_sweep_by_them(
    overrides: dict[str, str] | None, name: str
) -> None:
    of = None if overrides is None else sweep(**overrides)
    assert trial_name(trial(eviction="lru"), of) == name
    assert trial_name(trial(eviction="lru", repeat=2), of) == f"{name} repeat=2"
    at = f"{BEGAN.astimezone():%Y-%m-%d %H:%M}"
    axes = {"seed": "0,1", "eviction": "lru,fifo", "cache": "demo"}
    assert sweep_name(sweep("ablation_eviction", **axes)) == f"ablation_eviction: eviction {at}"
    assert sweep_name(sweep(None, **axes)) == f"eviction {at}"
    assert sweep_name(sweep(None, cache="demo", seed="0,1")) == f"pensieve {at}"


def test_the_tags_are_those_that_the_ui_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    shown = {
        "mlflow.user": "ada", "mlflow.source.name": "runners/run.py", "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": "abc",
    }  # fmt: skip
    assert shown.items() <= sweep_tags(sweep()).items()
    changed = trial(git_commit="abc", environment={"command": "pensieve run seed=1", "git": {"dirty": True}})
    tags = trial_tags(changed, None, None, reused=False)
    assert {**shown, "mlflow.source.name": "pensieve", "pensieve.git_dirty": "true"}.items() <= tags.items()
    assert trial_tags(changed, sweep(), "p", reused=True)["mlflow.source.name"] == "runners/run.py"

    def nameless() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr("getpass.getuser", nameless)
    assert "mlflow.user" not in sweep_tags(sweep())


def test_parameters_data_and_description() -> None:
    told = ["workload._target_", "tracking.mlflow", "trial.retries", "force", "experiment_name", "hydra.job.name"]
    assert not any(is_param(name) for name in told)
    assert all(is_param(name) for name in ("workload.pressure", "cache.gpu", "slo.ttft_ms", "seed"))
    config = {"workload": {"path": "/data/share.json"}, "model": {"weights": "/models/x"}}
    environment = {"inputs": {"workload.path": "sha256:0123", "model.weights": "sha256:4567"}}
    read = [{"name": "share.json", "path": "/data/share.json", "sha256": "0123"}]
    assert data_files(trial(config=config, environment=environment)) == read and data_files(trial(environment={})) == []
    assert note(["Found.", "One seed."], "run.py -m") == "**Found.**\n\n- One seed.\n\n`run.py -m`"


def test_a_comma_within_a_value_is_no_axis() -> None:
    told = {"a": "1,2", "b": "[1,2]", "c": "'x,y'", "d": "choice(1)", "e": "{k: 1, l: 2}", "+f": "[1,2],[3]", "g": "x"}
    assert swept_axes(told) == ["a", "d", "f"]
