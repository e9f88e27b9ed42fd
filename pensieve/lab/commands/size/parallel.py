"""Trials on simulated hardware, several at a time, each process running one after another."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path

from pensieve.lab.compose import check
from pensieve.lab.compose.explain import explain
from pensieve.lab.results.environment import Owner, this_process
from pensieve.lab.trial.job import Asked, Outcome
from pensieve.lab.trial.liveness import end_with
from pensieve.lab.trial.run import run_trial
from pensieve.lab.trial.terminal import note_interrupts, raise_if_interrupted
from pensieve.lab.trial.tracking import Tracking, open_tracking

log = logging.getLogger(__name__)


Perform = Callable[[Sequence[Asked]], Iterator[tuple[Asked, Outcome]]]
"""Runs trials and gives the outcome of each when it is there, in any order."""


@contextmanager
def performing(tracking: Tracking, processes: int) -> Iterator[Perform]:
    """So many trials at a time; with one, in this process. After Ctrl-C those under way are marked as interrupted."""
    if processes == 1:
        yield lambda trials: ((one, _outcome(one, tracking)) for one in trials)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=note_interrupts) as pool:

        def perform(trials: Sequence[Asked]) -> Iterator[tuple[Asked, Outcome]]:
            futures = {pool.submit(_perform, one, tracking.outputs, this_process()): one for one in trials}
            try:
                for future in as_completed(futures):
                    outcome = future.result()
                    if outcome is None:
                        raise KeyboardInterrupt
                    yield futures[future], outcome
            finally:  # whoever asked may have had enough
                for future in futures:
                    future.cancel()

        try:
            yield perform
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                if child.pid is not None:
                    os.kill(child.pid, signal.SIGINT)  # a terminal has told them already, another process has not
            raise


_ended = False
"""In a worker: Ctrl-C came, and trials that wait in its queue do not begin."""


def _perform(asked: Asked, outputs: Path, owner: Owner) -> Outcome | None:
    """Run a trial in a worker; None: it was interrupted."""
    global _ended
    end_with(owner)
    try:
        raise_if_interrupted()
        return None if _ended else _outcome(asked, open_tracking(check(asked.config), outputs))
    except KeyboardInterrupt:
        _ended = True
        return None


def _outcome(asked: Asked, tracking: Tracking) -> Outcome:
    try:
        asked.job.folder.mkdir(parents=True, exist_ok=True)
        return run_trial(check(asked.config), asked.config, tracking, asked.job, lambda _: None)
    except Exception as error:  # before there was a trial to record it in; the others go on
        log.info("%s could not begin its trial", asked.job.title, exc_info=error)
        return Outcome(0, "failed", error=explain(error))
