"""Run one trial and record it; run a sweep of trials.

The public names are resolved on first use: a command that is mistyped does not wait for the libraries of a trial.
"""

from typing import TYPE_CHECKING

from pensieve.lazy import from_modules

if TYPE_CHECKING:
    from pensieve.trial.job import Job
    from pensieve.trial.run import run_trial

__getattr__ = from_modules(__name__, {"Job": "pensieve.trial.job", "run_trial": "pensieve.trial.run"})

__all__ = ["Job", "run_trial"]
