"""What became of a trial, for whoever started it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: completed, failed or interrupted. error: the sentence, where it is not completed.

    reused: the trial was there already, and nothing ran. note: what a user should know besides. permanent: the same
    configuration would fail in the same way again, so that another attempt is wasted.
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
