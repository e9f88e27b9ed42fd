"""What a trial is started with beside its configuration, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pensieve.lab.progress import Shown


@dataclass(frozen=True, slots=True)
class Job:
    """title: for the progress bar and messages. folder: for the trial's files.

    sweep_id: None for a single run. preflight: False where the sweep has done it for all its jobs. reproduces: the trial
    that this one repeats, to be compared with it. progress: of its turns, see progress.Shown. keeps: the process that an
    isolated trial runs in may stay for the next one, since whoever runs both ends it when they are over.
    """

    title: str
    folder: Path
    sweep_id: int | None = None
    number: int = 0
    preflight: bool = True
    reproduces: int | None = None
    progress: Shown = "bar"
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """A trial that another process is asked to run. config: resolved."""

    config: dict[str, Any]
    job: Job


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: completed, failed or interrupted. error: the sentence, where it is not completed.

    reused: the database held the trial already, and nothing ran. note: what a user should know besides. permanent: the
    same configuration would fail in the same way again, so that another attempt is wasted.
    """

    trial_id: int
    status: str
    reused: bool = False
    error: str | None = None
    note: str | None = None
    permanent: bool = False

    @property
    def completed(self) -> bool:
        return self.status == "completed"
