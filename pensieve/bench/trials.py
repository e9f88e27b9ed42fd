"""Trials that a bench command runs: recorded like any others, and as part of the command."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pensieve.bench.session import Bench
from pensieve.compose import check, resolved
from pensieve.trial import Job, run_trial
from pensieve.trial.job import Outcome


def outcome_of(bench: Bench, cfg: Any, title: str) -> Outcome:
    """Run this composed configuration; an error of the trial is in the outcome."""
    number = len(bench.records.trials)
    folder = bench.tracking.outputs / "runs" / "bench" / f"{bench.records.sweep_id}-{number}"
    job = Job(title=title, folder=folder, sweep_id=bench.records.sweep_id, number=number, preflight=False)
    outcome = run_trial(check(cfg), resolved(cfg), replace(bench.tracking, mlflow=False), job, bench.say)
    if outcome.trial_id:
        bench.records.link(outcome.trial_id)
    return outcome
