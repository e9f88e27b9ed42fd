"""When a trial has to be over, in real seconds whatever its own clock says."""

from __future__ import annotations

import time

from pensieve.errors import TrialTimeout


class Deadline:
    """Runs from when it is made. timeout_s: trial.timeout_s; None: never."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._ends = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def check(self) -> None:
        """Raises TrialTimeout once the time is up."""
        if self.left_s == 0.0:
            raise TrialTimeout(
                f"The trial ran past trial.timeout_s={self._timeout_s:g}; raise it, or ask for less work a trial."
            )
