"""A trial in MLflow: one on a real device is shown while it runs, and every one is copied when it has ended.

Copied at once, or when the results have been printed, since importing mlflow takes longer than a simulated trial. A process
that is killed loses only the copy: the trial's row shows no run then, and the same command writes it.

Nothing of what is shown may be in what is measured. MLflow is imported by another process, once for all trials of this one,
and before a trial is measured; then the serving loop appends turns to a queue, and a thread writes a line to a pipe every
INTERVAL_S.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType

from pensieve.errors import PensieveError
from pensieve.lab.results.mlflow_live import ENDED, READY, LiveTarget, begin_line, end_line, step_line
from pensieve.lab.results.mlflow_view import Served, served, trial_name, trial_tags
from pensieve.lab.trial.job import Job
from pensieve.lab.trial.mlflow_process import Writer, start_writer
from pensieve.lab.trial.samples import Occupancy
from pensieve.lab.trial.terminal import interrupts_held
from pensieve.lab.trial.tracking import Tracking
from pensieve.serve.record import TurnRecord

INTERVAL_S = 5.0
READY_S = 60.0  # how long a trial waits for a busy machine to import MLflow
LAST_LINES_S = 10.0

log = logging.getLogger(__name__)


# -- when it has ended --------------------------------------------------------------------------------------------------


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
    from pensieve.lab.results.mlflow_runs import log_trial

    tracking = one.tracking
    try:
        log_trial(tracking.outputs, tracking.store, one.trial_id, one.experiment_name, parent_run_id, one.reused)
    except PensieveError as error:
        log.error("trial %s is not in MLflow: %s", one.trial_id, error)


# -- while it runs ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _writer() -> Writer | None:
    """Return the writer that all trials of this process share."""
    return start_writer()


class LiveRun:
    """A trial's run in MLflow, from when the model loads (the block is entered) to when its replay has ended.

    Where the writer fails or is late, the trial goes on without it; its copy in MLflow, which follows, is complete.
    """

    def __init__(self, tracking: Tracking, trial_id: int, experiment_name: str, job: Job) -> None:
        trial = tracking.store.trial(trial_id)
        sweep = None if job.sweep_id is None else tracking.store.sweep(job.sweep_id)
        self._target = LiveTarget(
            outputs=str(tracking.outputs),
            experiment=experiment_name,
            name=trial_name(trial, sweep),
            tags=trial_tags(trial, sweep, job.mlflow_run_id, reused=False),
            began_ms=int(trial.started_at.timestamp() * 1000),
        )
        self._writer = _writer()
        self._turns: deque[Served] = deque()
        self._occupancy: Occupancy | None = None
        self._began_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tell, name=f"mlflow-{trial_id}", daemon=True)

    def __enter__(self) -> LiveRun:
        self._guarded(begin_line(self._target))
        return self

    def watch(self, occupancy: Occupancy) -> None:
        """The replay begins: wait until the writer has imported what it needs, then tell it what happens."""
        if self._writer is not None and not self._writer.answered(READY, READY_S):
            self._give_up("it did not begin")
        self._occupancy, self._began_s = occupancy, time.monotonic()
        self._thread.start()

    def finished(self, turn: TurnRecord) -> None:
        """Queue a finished turn; called by the replay for each."""
        one = served(turn)
        if one is not None:
            self._turns.append(one)

    def end(self) -> None:
        """The replay has ended: tell the rest, and wait until it is written, so that nobody else writes to this run."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(LAST_LINES_S)
        if self._writer is None:
            return
        if not self._thread.is_alive():
            self._guarded(end_line())
        if self._writer is not None and not self._writer.answered(ENDED, LAST_LINES_S):
            self._give_up("it did not end in time")
        self._writer = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _tell(self) -> None:
        waiting = True
        while waiting:
            waiting = not self._stop.wait(INTERVAL_S)
            latest = self._occupancy.latest if self._occupancy is not None else None
            turns = [self._turns.popleft() for _ in range(len(self._turns))]
            step = max(1, round(time.monotonic() - self._began_s))
            self._guarded(step_line(step, turns, latest[1] if latest else {}))

    def _guarded(self, line: str) -> None:
        if self._writer is None:
            return
        try:
            self._writer.send(line)
        except OSError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        """For this trial: the next one starts another writer."""
        log.info("MLflow shows no more of this trial while it runs: %s", why)
        writer, self._writer = self._writer, None
        _writer.cache_clear()
        if writer is not None:
            writer.kill()
