"""What a benchmark measures: a case with its limit, and the result of each backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy import stats

from pensieve.lab.metric_registry import metric_of
from pensieve.lab.statistics import CONFIDENCE, median

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Case:
    """One question that several backends answer in the same run.

    label: the metric's label in the database, and the case's name in the table. metric: the metric's name, which the registry
    knows; where more of it is better the limit is a ceiling.
    floor: the limit in `unit`, from physics measured in this run; floor_is: what it is made of, in words.
    parameters: the sizes that make up the case (batch, context, ...), JSON-ready: they identify the trial. ours: the backend
    that the others are the peers of. needs: peers without which the case is no benchmark; none: any one will do.
    """

    label: str
    floor: float | None
    floor_is: str = ""
    metric: str = "time_ms"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ours: str = OURS
    needs: Sequence[str] = ()

    @property
    def unit(self) -> str:
        return metric_of(self.metric).unit

    @property
    def higher_is_better(self) -> bool:
        return metric_of(self.metric).better == "higher"


@dataclass(frozen=True, slots=True)
class Figure:
    """A further number about a measurement, such as the overlap of a pipelined copy: a metric of the same trial.

    shown: in the table too; False for details that only the database keeps. remark: before the value there, such as >=.
    """

    name: str
    value: float | None
    limit: float | None = None
    shown: bool = True
    remark: str = ""

    @property
    def unit(self) -> str:
        return metric_of(self.name).unit


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one backend in a case. values: one a repetition, in the case's unit; none where it failed.

    version: of the backend's package. engine: settings that it ran with. error: one sentence, where it failed.
    """

    backend: str
    values: Sequence[float] = ()
    version: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    error: str | None = None

    @property
    def value(self) -> float:
        """The median: a repetition that another process disturbed does not move it."""
        return median(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """It holds the median of such repetitions 95 times in 100, whatever their distribution: the order statistics
        [k, n - k + 1] with the largest k that still gives 95 %. None for n < 6, where even lowest and highest do not."""
        ordered, n = sorted(self.values), len(self.values)
        k = int(
            stats.binom.ppf((1.0 - CONFIDENCE) / 2, n, 0.5)
        )  # fewer than k are below the median once in 40, at most
        return (ordered[k - 1], ordered[n - k]) if k else None


@dataclass(frozen=True, slots=True)
class Result:
    """A case with all its backends, measured beside each other."""

    target: str
    case: Case
    measured: Sequence[Measured]

    @property
    def gaps(self) -> list[str]:
        """What keeps the case from being a benchmark, a sentence each: no limit, no peer, or a backend that failed."""
        name = f"{self.target} {self.case.label}"
        found = []
        if self.case.floor is None:
            found.append(f"{name}: no limit{f' ({self.case.floor_is})' if self.case.floor_is else ''}.")
        if not any(m.values for m in self.measured if m.backend == self.case.ours):
            found.append(f"{name}: nothing was measured for {self.case.ours}{self._why(ours=True)}.")
        if not any(m.values for m in self.measured if m.backend != self.case.ours):
            found.append(f"{name}: no peer ran beside it{self._why(ours=False)}.")
        for needed in self.case.needs:
            if not any(m.values for m in self.measured if m.backend == needed):
                reason = next((m.error for m in self.measured if m.backend == needed and m.error), "it was not tried")
                found.append(f"{name}: {needed} did not run beside it ({reason.rstrip('.')}).")
        return found

    def _why(self, ours: bool) -> str:
        errors = [
            f"{m.backend}: {m.error.rstrip('.')}"
            for m in self.measured
            if m.error and (m.backend == self.case.ours) == ours
        ]
        return f" ({'; '.join(errors)})" if errors else ""
