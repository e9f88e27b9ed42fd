"""Run one trial and record it; run a sweep of trials.

The public names are resolved on first use: a command that is mistyped does not wait for the libraries of a trial.
"""

from typing import TYPE_CHECKING

from pensieve.lazy import from_modules

if TYPE_CHECKING:
    from pensieve.trial.hydra_app import run_job
    from pensieve.trial.job import Job, Outcome
    from pensieve.trial.run import run_trial
    from pensieve.trial.terminal import guarded

__getattr__ = from_modules(
    __name__,
    {
        "Job": "pensieve.trial.job",
        "Outcome": "pensieve.trial.job",
        "guarded": "pensieve.trial.terminal",
        "run_job": "pensieve.trial.hydra_app",
        "run_trial": "pensieve.trial.run",
    },
)

__all__ = ["Job", "Outcome", "guarded", "run_job", "run_trial"]
