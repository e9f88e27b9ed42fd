"""How far a trial is: a bar on a terminal, a line now and then in a log, nothing under pytest."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 5.0

Shown = Literal["bar", "lines", "nothing"]
"""How a trial's progress is shown: by a bar, which owns the terminal (in a log there are lines); by lines now and then, where
other trials run at the same time; or not at all."""


class TrialProgress:
    """Counts finished turns and their tokens; `total` None where nobody knows how many there will be.

    tokens/s are those of this machine's wall clock, simulated or not: they say how long the user will wait.
    """

    def __init__(self, title: str, total: int | None, stream: TextIO | None = None, shown: Shown = "bar") -> None:
        self._title = title
        self._total = total
        self._stream = stream or sys.stderr
        self._quiet = shown == "nothing" or ("PYTEST_CURRENT_TEST" in os.environ and stream is None)
        self._turns = 0
        self._tokens = 0
        self._started = time.perf_counter()
        self._spoke = self._started
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if not self._quiet and shown == "bar" and self._stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("turns  {task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, rate="")

    def update(self, turns: int, tokens: int) -> None:
        """So many turns have finished, and so many output tokens have come, since the trial began."""
        self._turns, self._tokens = turns, tokens
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=turns, rate=self._rate())
        elif not self._quiet and time.perf_counter() - self._spoke >= LINE_INTERVAL_S:
            self._spoke = time.perf_counter()
            self._line()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _rate(self) -> str:
        elapsed = time.perf_counter() - self._started
        return f"{self._tokens / elapsed:,.0f} tok/s" if elapsed > 0 else ""

    def _line(self) -> None:
        elapsed = time.perf_counter() - self._started
        of = f" of {self._total}" if self._total is not None else ""
        left = ""
        if self._total is not None and self._turns:
            left = f", about {elapsed / self._turns * (self._total - self._turns):.0f} s left"
        print(f"{self._title}: {self._turns}{of} turns, {self._rate()}{left}", file=self._stream, flush=True)
