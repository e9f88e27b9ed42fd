"""What a measure reads: the trials that a claim is about, and those it holds them against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sqlalchemy import Row

from pensieve.errors import MissingSeries
from pensieve.results.claims.evidence import Evidence
from pensieve.results.claims.verdict import Measured
from pensieve.results.schema import Trial
from pensieve.results.summary import axis_value
from pensieve.statistics import Estimate, PairedRatio

Pairs = dict[tuple[int, str], float]
"""(seed, "session/repeat") -> value."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Trials of one group. theirs: empty where nothing is compared. over: the axis that the trials may differ in."""

    evidence: Evidence
    ours: Sequence[Trial]
    theirs: Sequence[Trial] = ()
    over: str | None = None

    def at(self, trial: Trial) -> float:
        """The trial's place on the axis. Raises MissingSeries where it has none."""
        assert self.over is not None, "the claim names no axis"
        try:
            return float(axis_value(trial, self.over))
        except ValueError:
            raise missing(f"{self.over} is not set to a number") from None

    def turns(self, trials: Iterable[Trial]) -> Iterable[tuple[Trial, Row[Any]]]:
        return ((trial, row) for trial in trials for row in self.evidence.turns(trial))

    @property
    def trial_ids(self) -> tuple[int, ...]:
        return tuple(sorted({trial.id for trial in chain(self.ours, self.theirs)}))


def conversation(trial: Trial, session: str) -> tuple[int, str]:
    return trial.seed, f"{session}/{trial.repeat}"


def value_of(row: Any, column: str) -> float | None:
    """A column of `turn`, or one of two numbers made of them: normalized_latency_ms and wire_bytes_per_token."""
    tokens = row.output_tokens
    if column == "normalized_latency_ms":
        return row.latency_ms / tokens if row.latency_ms is not None and tokens else None
    if column == "wire_bytes_per_token":
        counted = row.sent_bytes is not None and row.received_bytes is not None
        return (row.sent_bytes + row.received_bytes) / tokens if counted and tokens else None
    value = getattr(row, column, None)
    return None if value is None else float(value)


def of_ratio(
    ratio: PairedRatio, sides: Sides, n_unit: str = "conversations", about: str = "", scale: float = 1.0
) -> Measured:
    low, high = ratio.ci_low, ratio.ci_high
    return Measured(
        ratio.ratio * scale,
        None if low is None else low * scale,
        None if high is None else high * scale,
        ratio.n,
        n_unit,
        ratio.n_seeds,
        sides.trial_ids,
        about,
    )


def of_estimate(estimate: Estimate, sides: Sides, n_unit: str, about: str = "") -> Measured:
    return Measured(
        estimate.value, estimate.ci_low, estimate.ci_high, estimate.n, n_unit, estimate.groups, sides.trial_ids, about
    )


def missing(what: str) -> MissingSeries:
    return MissingSeries(what)
