"""How far a trial is: a bar on a terminal, a line now and then in a log, nothing under pytest."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 5.0

Shown = Literal["bar", "lines", "nothing"]
"""How a trial's progress is shown: by a bar, which owns the terminal (in a log there are lines); by lines now and then, where
other trials run at the same time; or not at all."""


class TrialProgress:
    """Shows finished turns and their tokens; `total` None where nobody knows how many there will be.

    tokens/s are those of this machine's wall clock, simulated or not: they say how long the user will wait.
    """

    def __init__(self, title: str, total: int | None, stream: TextIO | None = None, shown: Shown = "bar") -> None:
        self._title, self._total, self._stream = title, total, stream or sys.stderr
        self._quiet = shown == "nothing" or ("PYTEST_CURRENT_TEST" in os.environ and stream is None)
        self._started = self._spoke = time.perf_counter()
        self._bar: Progress | None = None
        if not self._quiet and shown == "bar" and self._stream.isatty():
            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
            more = TextColumn("turns  {task.fields[rate]}"), TimeRemainingColumn()
            self._bar = Progress(*columns, *more, console=Console(file=self._stream), transient=True)
            self._bar.start()
            self._bar.add_task(title, total=total, rate="")

    def update(self, turns: int, tokens: int) -> None:
        """So many turns have finished, and so many output tokens have come, since the trial began."""
        now = time.perf_counter()
        elapsed = max(now - self._started, 1e-9)
        rate = f"{tokens / elapsed:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=turns, rate=rate)
        elif not self._quiet and now - self._spoke >= LINE_INTERVAL_S:
            self._spoke = now
            of, left = "", ""
            if self._total is not None:
                of = f" of {self._total}"
                left = f", about {elapsed / turns * (self._total - turns):.0f} s left" if turns else ""
            print(f"{self._title}: {turns}{of} turns, {rate}{left}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
