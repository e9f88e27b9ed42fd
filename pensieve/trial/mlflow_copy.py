"""Copies trials to MLflow: at once, or when the results have been printed, since importing mlflow takes longer than a
simulated trial.

What waits is written before the process ends, also by an error or Ctrl-C. A process that is killed loses only the copy: the
trial's row shows no run then, and the same command writes it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from pensieve.errors import PensieveError
from pensieve.trial.job import Job
from pensieve.trial.terminal import interrupts_held
from pensieve.trial.tracking import Tracking

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    tracking: Tracking
    trial_id: int
    experiment_name: str
    parent_run_id: str | None
    reused: bool


_waiting: deque[_Waiting] = deque()


def copy_trial(tracking: Tracking, trial_id: int, experiment_name: str, job: Job, reused: bool = False) -> None:
    """Copy a trial that has ended, or let it wait for copy_waiting where the job says so.

    What goes wrong in MLflow is logged and never changes the trial, whose record is the database.
    """
    if tracking.mlflow:
        one = _Waiting(tracking, trial_id, experiment_name, job.mlflow_run_id, reused)
        if job.mlflow_later:
            _waiting.append(one)
        else:
            _copy(one, one.parent_run_id)


def copy_waiting(parent_run_id: str | None = None) -> None:
    """Copy the trials that wait, under this parent. Ctrl-C ends it between two of them: no run is left half written."""
    while _waiting:
        with interrupts_held():
            one = _waiting.popleft()
            _copy(one, parent_run_id or one.parent_run_id)


def _copy(one: _Waiting, parent_run_id: str | None) -> None:
    from pensieve.results.mlflow_runs import log_trial

    tracking = one.tracking
    try:
        log_trial(tracking.outputs, tracking.store, one.trial_id, one.experiment_name, parent_run_id, one.reused)
    except PensieveError as error:
        log.error("trial %s is not in MLflow: %s", one.trial_id, error)
