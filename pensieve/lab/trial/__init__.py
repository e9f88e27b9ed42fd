"""Run one trial and record it; run a sweep of trials.

The public names are resolved on first use: a command that is mistyped does not wait for the libraries of a trial.
"""

from typing import TYPE_CHECKING

from pensieve.lazy import from_modules

if TYPE_CHECKING:
    from pensieve.lab.trial.job import Job
    from pensieve.lab.trial.run import run_trial

__getattr__ = from_modules(__name__, {"Job": "pensieve.lab.trial.job", "run_trial": "pensieve.lab.trial.run"})

__all__ = ["Job", "run_trial"]
