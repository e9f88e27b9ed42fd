"""Run one trial and record it; run a sweep of trials."""

from pensieve.trial.job import Job, Outcome
from pensieve.trial.run import run_trial
from pensieve.trial.sweep import run_job
from pensieve.trial.terminal import guarded

__all__ = ["Job", "Outcome", "guarded", "run_job", "run_trial"]
