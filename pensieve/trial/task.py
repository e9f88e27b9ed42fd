"""What a trial is part of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Job:
    """title: for the progress bar. folder: for its files.

    sweep_id: None for a single run. preflight: False where the sweep has done it for all its jobs. reproduces: the trial
    that is repeated, to be compared with.
    """

    title: str
    folder: Path
    sweep_id: int | None = None
    number: int = 0
    mlflow_run_id: str | None = None
    preflight: bool = True
    reproduces: int | None = None
