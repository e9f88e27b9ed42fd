"""Shows a trial on a real device in MLflow while it runs; a simulated one is over before anybody could look.

Nothing of it may be in what is measured. MLflow is imported by another process, once for all trials of this one, and before
a trial is measured; then the serving loop appends turns to a queue, and a thread writes a line to a pipe every INTERVAL_S.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType

import pensieve
from pensieve.record import TurnRecord
from pensieve.results.mlflow_labels import trial_name, trial_tags
from pensieve.results.mlflow_live import ENDED, READY, LiveTarget, begin_line, end_line, step_line
from pensieve.results.mlflow_series import Served, served
from pensieve.trial.job import Job
from pensieve.trial.samples import Occupancy
from pensieve.trial.summary import installed
from pensieve.trial.tracking import Tracking

INTERVAL_S = 5.0
READY_S = 60.0  # how long a trial waits for a busy machine to import MLflow
LAST_LINES_S = 10.0
COMMAND = (sys.executable, "-m", "pensieve.results.mlflow_live")

log = logging.getLogger(__name__)


class Writer:
    """The other process. What it says on stderr is thrown away: the copy made here meets the same error and reports it."""

    def __init__(self) -> None:
        above = str(Path(pensieve.__file__).parents[1])
        path = os.pathsep.join(filter(None, [above, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._heard = b""  # of the next line

    def send(self, line: str) -> None:
        """Raises OSError where the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def sent(self, line: str) -> bool:
        """Whether the process is there to read it."""
        try:
            self.send(line)
        except OSError:
            return False
        return True

    def answered(self, word: str, within_s: float) -> bool:
        """Wait for this answer; False where it does not come in time, or the process has ended."""
        return self.answer((word,), within_s) is not None

    def answer(self, words: tuple[str, ...], within_s: float) -> str | None:
        """Wait for a line that begins with one of these words, whatever MLflow prints between; None where none comes in
        time, or the process has ended."""
        assert self._process.stdout is not None
        answers, ends = self._process.stdout.fileno(), time.monotonic() + within_s
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                if (said := line.decode(errors="replace")).startswith(words):
                    return said
                continue
            left_s = ends - time.monotonic()
            if left_s <= 0 or not select.select([answers], [], [], left_s)[0]:
                return None
            told = os.read(answers, 4096)
            if not told:
                return None
            self._heard += told

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def start_writer() -> Writer | None:
    """None where MLflow is not installed."""
    return Writer() if installed("mlflow") else None


@functools.lru_cache(maxsize=1)
def _writer() -> Writer | None:
    """One a process, for all of its trials."""
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
        """Called by the replay for each finished turn."""
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
