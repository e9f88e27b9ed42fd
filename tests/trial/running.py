"""A trial of a composed configuration, in this process."""

from pensieve.lab.compose.settings import resolved
from pensieve.lab.trial.job import Job
from pensieve.lab.trial.run import run_trial
from tests.composed import SHORT, composed


def run(tracking, *overrides, words=SHORT, folder="x", **job):
    """Its outcome. words: before the overrides."""
    words = ("tracking=local", *words, *overrides)
    job = Job("test", tracking.outputs / "runs" / folder, resolved(composed(*words)), **job)
    return run_trial(job, tracking)
