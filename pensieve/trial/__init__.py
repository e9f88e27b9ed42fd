"""One trial: compose, run, record; and what a sweep of them needs around it."""

from pensieve.trial.job import run_job
from pensieve.trial.outcome import Outcome
from pensieve.trial.run import run_trial
from pensieve.trial.task import Job
from pensieve.trial.terminal import guarded

__all__ = ["Job", "Outcome", "guarded", "run_job", "run_trial"]
