"""What a benchmark measures: a case with its limit and the result of each backend, timed in interleaved rounds, so that a
disturbance meets all of them alike; and cases as a table."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import torch
from scipy import stats

from pensieve.errors import WorkerError
from pensieve.lab.metrics import metric_of
from pensieve.lab.statistics import CONFIDENCE, median
from pensieve.units import NONE, Table, significant

OURS = "ours"
_WARM_CALLS = 2
_MOST_CALLS = 200


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
class Case:
    """One question that several backends answer in the same run.

    label: the metric's label in the database, and the case's name in the table. metric: the metric's name, which the registry
    knows; where more of it is better the limit is a ceiling.
    floor: the limit in `unit`, from physics measured in this run; floor_is: what it is made of, in words.
    parameters: the sizes that make up the case (batch, context, ...), JSON-ready: they identify the trial. ours: the backend
    that the others are the peers of. peer: the one without which the case is no benchmark; "": any one will do. measured: all
    backends, once they are.
    """

    label: str
    floor: float
    floor_is: str
    metric: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    ours: str = OURS
    peer: str = ""
    measured: Sequence[Measured] = ()

    @property
    def unit(self) -> str:
        return metric_of(self.metric).unit

    @property
    def higher_is_better(self) -> bool:
        return metric_of(self.metric).better == "higher"

    @property
    def gaps(self) -> list[str]:
        """What keeps the case from being a benchmark, a sentence each: nothing of ours, or no peer."""
        ours = [one for one in self.measured if one.backend == self.ours]
        peers = [one for one in self.measured if one.backend == self.peer or (not self.peer and one not in ours)]
        sides = {f"nothing was measured for {self.ours}": ours, "no peer ran beside it": peers}
        found = []
        for said, side in sides.items():
            if not any(one.values for one in side):
                why = "; ".join(f"{one.backend}: {one.error.rstrip('.')}" for one in side if one.error)
                found.append(f"{self.label}: {said}{f' ({why})' if why else ''}.")
        return found

    @property
    def remarks(self) -> list[str]:
        """What stands beside the numbers; and a sentence for each backend that is better than the limit, then none."""
        found = []
        for one in self.measured:
            parts = [one.error] if one.error else []
            figures = ((name, significant(value), metric_of(name).unit) for name, value in one.figures.items())
            parts += [f"{name.replace('_', ' ')} {value} {unit}".rstrip() for name, value, unit in figures]
            if parts:
                found.append(f"{self.label}, {one.backend}: {', '.join(parts)}")
            ratio = one.value / self.floor if one.values and self.floor else 1.0
            if ratio > 1.0 if self.higher_is_better else ratio < 1.0:
                found.append(
                    f"{self.label}: {one.backend} is at {ratio:.2f} of the limit ({self.floor_is}). So it is no limit: its "
                    "rates were measured too low in this run, or this backend does less work."
                )
        return found


def table(cases: Sequence[Case]) -> Table:
    """A line a backend of a case: value with its spread, limit, ratio to it, and how many times better than the best peer."""
    return [_line(case, one) for case in cases for one in case.measured]


def _line(case: Case, one: Measured) -> dict[str, str]:
    peers = [peer.value for peer in case.measured if peer.values and peer.backend != case.ours]
    of_peer = ""
    if one.backend == case.ours and one.values and peers:
        of_peer = f"{one.value / max(peers) if case.higher_is_better else min(peers) / one.value:.2f}x"
    return {
        "case": case.label if one is case.measured[0] else "",
        "backend": one.backend + (f" {one.version}" if one.version else ""),
        "value": significant(one.value) if one.values else NONE,
        "spread": "..".join(map(significant, one.interval)) if one.interval else NONE,
        "unit": case.unit,
        "limit": significant(case.floor),
        "of limit": f"{one.value / case.floor:.2f}" if one.values and case.floor else NONE,
        "of peer": of_peer,
    }


# Times


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all its work; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Measured]:
    """The milliseconds that each way returns, once a round, each round beginning with another one. A round before warms up,
    and does not count. A way that raises has its error in place of values, and the others go on."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    errors: dict[str, str] = {}
    order = deque(ways)
    for number in range(-1, rounds):
        for name in order:
            if name not in errors:
                try:
                    values[name].append(ways[name]())
                except Exception as error:  # a backend may refuse in any way it likes
                    errors[name] = explain(error)
        order.rotate(-1 if number >= 0 else 0)
    return {
        name: Measured(name, () if name in errors else took[1:], error=errors.get(name))
        for name, took in values.items()
    }


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, at_least_ms: float = 5.0
) -> dict[str, Measured]:
    """Milliseconds a call of each run, as in_turn.

    A run shorter than `at_least_ms` is called several times in a row, and the time is divided. On a GPU the time is the
    device's (events on the current stream around the calls), so a run that ends on other streams must make the current one
    wait for them; on a CPU it is the wall's. Call under torch.inference_mode() where gradients are not wanted.
    """
    return in_turn({name: _several(run, device, at_least_ms) for name, run in runs.items()}, rounds)


def _several(run: Callable[[], object], device: torch.device, at_least_ms: float) -> Callable[[], float]:
    @cache
    def calls() -> int:
        for _ in range(_WARM_CALLS):  # compiles, chooses kernels, touches memory
            run()
        return max(1, min(_MOST_CALLS, round(at_least_ms / max(_timed(run, 1, device), 1e-4))))

    return lambda: _timed(run, calls(), device)


def _timed(run: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        began.record()
        for _ in range(calls):
            run()
        ended.record()
        torch.cuda.synchronize(device)
        return float(began.elapsed_time(ended)) / calls
    started = perf_counter()
    for _ in range(calls):
        run()
    return (perf_counter() - started) * 1e3 / calls


def explain(error: BaseException) -> str:
    """The first line of what was raised, with its kind."""
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return f"the device ran out of memory ({text})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
