"""The small presets run with random weights and are recorded: python runners/run.py model=gpt2 model.weights=random."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.lab.compose import check, resolved
from pensieve.lab.trial.job import Job
from pensieve.lab.trial.run import run_trial
from pensieve.lab.trial.tracking import open_tracking
from tests.composed import composed
from tests.hub_cache import unreachable

LEAST = ("workload.conversations=2", "workload.min_turns=2", "workload.max_turns=2", "workload.max_new_tokens=4",
         "workload.warmup_turns=1", "workload.pressure=0", "workload.think_time_s=0", "workload.request_interval=0",
         "cache.gpu=768 tokens", "cache.cpu=256 tokens")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "opt_125m", "smollm2_135m"])
def test_a_small_preset_runs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path / "outputs"))
    asked = unreachable(monkeypatch, tmp_path / "hub")
    layers = {"gpt2": "n_layer"}.get(model, "num_hidden_layers")
    small = (f"model.architecture.{layers}=2", "hardware=cpu", f"model={model}", "model.weights=random", *LEAST)
    config = composed(*small)
    tracking = open_tracking(check(config), tmp_path / "outputs")
    outcome = run_trial(
        check(config), resolved(config), tracking, Job(title=model, folder=tmp_path / "run"), lambda _: None
    )
    assert outcome.completed, outcome.error
    trial = tracking.store.trial(outcome.trial_id)
    assert (trial.model, trial.weights, trial.status) == (model, "random", "completed")
    assert trial.engine["tokenizer"] == "bytes", "random weights download no tokenizer"
    assert trial.engine["workload"]["turns"] == 2 * 2 + 1
    assert asked == []
