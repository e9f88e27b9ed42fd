"""Trials on simulated hardware, several at a time, each process running one after another."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path

from pensieve.lab.compose import check
from pensieve.lab.compose.explain import explain
from pensieve.lab.results.environment import Owner, this_process
from pensieve.lab.trial.job import Asked, Outcome
from pensieve.lab.trial.liveness import end_with
from pensieve.lab.trial.run import run_trial
from pensieve.lab.trial.tracking import Tracking, open_tracking

log = logging.getLogger(__name__)


Perform = Callable[[Sequence[Asked]], Iterator[tuple[Asked, Outcome]]]
"""Runs trials and gives the outcome of each when it is there, in any order."""


@contextmanager
def performing(tracking: Tracking, processes: int) -> Iterator[Perform]:
    """So many trials at a time; with one, in this process. After Ctrl-C those under way are found dead in the database."""
    if processes == 1:
        yield lambda trials: ((one, _outcome(one, tracking)) for one in trials)
        return
    owner = (this_process(),)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin, initargs=owner)

    def perform(trials: Sequence[Asked]) -> Iterator[tuple[Asked, Outcome]]:
        futures = {pool.submit(_perform, one, tracking.outputs): one for one in trials}
        for future in as_completed(futures):
            yield futures[future], future.result()

    try:
        yield perform
    except BaseException:
        for child in active_children():
            child.kill()
        raise
    finally:  # whoever asked may have had enough
        pool.shutdown(cancel_futures=True)


def _begin(owner: Owner) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told too, and ends this process
    end_with(owner)


def _perform(asked: Asked, outputs: Path) -> Outcome:
    return _outcome(asked, replace(open_tracking(check(asked.config), outputs), mlflow=False))


def _outcome(asked: Asked, tracking: Tracking) -> Outcome:
    try:
        asked.job.folder.mkdir(parents=True, exist_ok=True)
        return run_trial(check(asked.config), asked.config, tracking, asked.job, lambda _: None)
    except Exception as error:  # before there was a trial to record it in; the others go on
        log.info("%s could not begin its trial", asked.job.title, exc_info=error)
        return Outcome(0, "failed", error=explain(error))
