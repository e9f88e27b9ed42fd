"""Copies trials to MLflow: at once, or when the results have been printed, since importing mlflow takes longer than a
simulated trial.

A simulated trial by itself is copied by another process, which imports mlflow while the trial runs. Where that one ends
without an answer, or none comes in time, it is killed and this one copies; what it could not do it says, and that is logged.

What waits is written before the process ends, also by an error or Ctrl-C. A process that is killed loses only the copy: the
trial's row shows no run then, and the same command writes it.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass

from pensieve.errors import PensieveError
from pensieve.results.mlflow_live import COPIED, NOT_COPIED, CopyTarget, copy_line, open_line
from pensieve.trial.job import Job
from pensieve.trial.mlflow_process import Writer, import_beside, take_beside
from pensieve.trial.terminal import interrupts_held
from pensieve.trial.tracking import Tracking

COPIED_S = 180.0  # longer than anybody waits for the lock of a store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    tracking: Tracking
    trial_id: int
    experiment_name: str
    parent_run_id: str | None
    reused: bool


_waiting: deque[_Waiting] = deque()


def open_beside(tracking: Tracking) -> None:
    """A trial begins: have another process open the store meanwhile, where that is sooner."""
    writer = import_beside() if tracking.mlflow else None
    if writer is not None:
        writer.sent(open_line(tracking.outputs))


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
    writer = take_beside()
    try:
        while _waiting:
            with interrupts_held():
                one = _waiting.popleft()
                parent = parent_run_id or one.parent_run_id
                if writer is None or parent is not None or one.reused:
                    _copy(one, parent)
                elif not _answered(one, writer):
                    writer.kill()  # first: two processes would write to one run
                    writer = None
                    _copy(one, parent)
    finally:
        if writer is not None:
            writer.kill()  # it has nothing more to write


def _answered(one: _Waiting, writer: Writer) -> bool:
    """Have a trial that is in no sweep copied by the other process, and log why it could not; False without an answer."""
    tracking = one.tracking
    url = tracking.store.database.url.render_as_string(hide_password=False)
    if not writer.sent(copy_line(CopyTarget(str(tracking.outputs), url, one.trial_id, one.experiment_name))):
        return False
    answer = writer.answer((COPIED, NOT_COPIED), COPIED_S)
    if answer is not None and answer.startswith(NOT_COPIED):
        from pensieve.results.mlflow_store import say_not_logged

        say_not_logged(answer.removeprefix(NOT_COPIED))
    return answer is not None


def _copy(one: _Waiting, parent_run_id: str | None) -> None:
    from pensieve.results.mlflow_runs import log_trial

    tracking = one.tracking
    try:
        log_trial(tracking.outputs, tracking.store, one.trial_id, one.experiment_name, parent_run_id, one.reused)
    except PensieveError as error:
        log.error("trial %s is not in MLflow: %s", one.trial_id, error)
