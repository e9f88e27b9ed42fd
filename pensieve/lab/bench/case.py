"""What a benchmark measures: a case with its limit, and the result of each backend; and both as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy import stats

from pensieve.errors import WorkerError
from pensieve.lab.metrics import metric_of
from pensieve.lab.statistics import CONFIDENCE, median
from pensieve.lab.tables import Table
from pensieve.units import NONE

OURS = "ours"


@dataclass(frozen=True, slots=True)
class Case:
    """One question that several backends answer in the same run.

    label: the metric's label in the database, and the case's name in the table. metric: the metric's name, which the registry
    knows; where more of it is better the limit is a ceiling.
    floor: the limit in `unit`, from physics measured in this run; floor_is: what it is made of, in words.
    parameters: the sizes that make up the case (batch, context, ...), JSON-ready: they identify the trial. ours: the backend
    that the others are the peers of. peer: the one without which the case is no benchmark; "": any one will do.
    """

    label: str
    floor: float
    floor_is: str
    metric: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ours: str = OURS
    peer: str = ""

    @property
    def unit(self) -> str:
        return metric_of(self.metric).unit

    @property
    def higher_is_better(self) -> bool:
        return metric_of(self.metric).better == "higher"


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of one backend in a case. values: one a repetition, in the case's unit; none where it failed.

    version: of the backend's package. engine: settings that it ran with. figures: further metrics of the same trial, such as
    the overlap of a pipelined copy. error: one sentence, where it failed.
    """

    backend: str
    values: Sequence[float] = ()
    version: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def value(self) -> float:
        """The median: a repetition that another process disturbed does not move it. Raises WorkerError where it failed."""
        if not self.values:
            raise WorkerError(f"{self.backend} gave nothing: {self.error}")
        return median(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """It holds the median of such repetitions 95 times in 100, whatever their distribution: the order statistics
        [k, n - k + 1] with the largest k that still gives 95 %. None for n < 6, where even lowest and highest do not."""
        ordered, n = sorted(self.values), len(self.values)
        # Fewer than k are below the median once in 40, at most.
        k = int(stats.binom.ppf((1.0 - CONFIDENCE) / 2, n, 0.5))
        return (ordered[k - 1], ordered[n - k]) if k else None


@dataclass(frozen=True, slots=True)
class Result:
    """A case with all its backends, measured beside each other."""

    case: Case
    measured: Sequence[Measured]

    @property
    def gaps(self) -> list[str]:
        """What keeps the case from being a benchmark, a sentence each: nothing of ours, or no peer."""
        ours = [one for one in self.measured if one.backend == self.case.ours]
        peers = [
            one for one in self.measured if one.backend == self.case.peer or (not self.case.peer and one not in ours)
        ]
        sides = {f"nothing was measured for {self.case.ours}": ours, "no peer ran beside it": peers}
        found = []
        for said, side in sides.items():
            if not any(one.values for one in side):
                why = "; ".join(f"{one.backend}: {one.error.rstrip('.')}" for one in side if one.error)
                found.append(f"{self.case.label}: {said}{f' ({why})' if why else ''}.")
        return found

    @property
    def remarks(self) -> list[str]:
        """What stands beside the numbers; and a sentence for each backend that is better than the limit, then none."""
        case, found = self.case, []
        for one in self.measured:
            parts = [one.error] if one.error else []
            figures = ((name, _number(value), metric_of(name).unit) for name, value in one.figures.items())
            parts += [f"{name.replace('_', ' ')} {value} {unit}".rstrip() for name, value, unit in figures]
            if parts:
                found.append(f"{case.label}, {one.backend}: {', '.join(parts)}")
            ratio = one.value / case.floor if one.values and case.floor else 1.0
            if ratio > 1.0 if case.higher_is_better else ratio < 1.0:
                found.append(
                    f"{case.label}: {one.backend} is at {ratio:.2f} of the limit ({case.floor_is}). So it is no limit: its "
                    "rates were measured too low in this run, or this backend does less work."
                )
        return found


def table(results: Sequence[Result]) -> Table:
    """A line a backend of a case: value with its spread, limit, ratio to it, and how many times better than the best peer."""
    return [_line(result, one) for result in results for one in result.measured]


def _line(result: Result, one: Measured) -> dict[str, str]:
    case = result.case
    low, high = one.interval or (None, None)
    return {
        "case": case.label if one is result.measured[0] else "",
        "backend": one.backend + (f" {one.version}" if one.version else ""),
        "value": _number(one.value) if one.values else NONE,
        "spread": NONE if low is None else f"{_number(low)}..{_number(high)}",
        "unit": case.unit,
        "limit": _number(case.floor),
        "of limit": f"{one.value / case.floor:.2f}" if one.values and case.floor else NONE,
        "of peer": _against_peers(result, one),
    }


def _against_peers(result: Result, one: Measured) -> str:
    case = result.case
    peers = [peer.value for peer in result.measured if peer.values and peer.backend != case.ours]
    if one.backend != case.ours or not one.values or not peers:
        return ""
    better = one.value / max(peers) if case.higher_is_better else min(peers) / one.value
    return f"{better:.2f}x"


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    if value != 0 and (abs(value) < 0.01 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
