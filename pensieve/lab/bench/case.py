"""What a benchmark measures: a case with its limit, and the result of each backend; and both as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from scipy import stats

from pensieve.errors import ConfigError
from pensieve.lab.metric_registry import metric_of
from pensieve.lab.results.environment import DISTRIBUTION, environment, gpus
from pensieve.lab.statistics import CONFIDENCE, median
from pensieve.units import NONE, format_bytes

OURS = "ours"
COLUMNS = ("case", "backend", "value", "spread", "unit", "limit", "value / limit", "against best peer", "beside")
WIDTH = 100
_NARROW = ("case", "backend", "value", "spread", "unit", "limit", "of limit", "of peer")


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


# As a table


def table(target: str, results: Sequence[Result]) -> RenderableType:
    """A row a backend of a case (see cells), at most WIDTH columns wide; what stands beside the numbers is below them."""
    shown = Table(title=f"bench {target}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in _NARROW:
        left = name in ("case", "backend", "unit")
        shown.add_column(name, justify="left" if left else "right", no_wrap=name not in ("case", "backend"))
    beside = []
    for result in results:
        for number, measured in enumerate(result.measured):
            *row, note = cells(result, measured, first=number == 0)
            shown.add_row(*row, end_section=measured is result.measured[-1])
            if note:
                beside.append(f"{result.case.label}, {measured.backend}: {note}")
    lines = [*beside, *(sentence for result in results for sentence in beyond_the_limit(result))]
    return Group(shown, *(Text(line) for line in lines))


def beyond_the_limit(result: Result) -> list[str]:
    """A sentence for each backend whose value is better than the limit, which then is none."""
    case, found = result.case, []
    for measured in result.measured:
        if not (case.floor and measured.values):
            continue
        ratio = measured.value / case.floor
        if ratio > 1.0 if case.higher_is_better else ratio < 1.0:
            made_of = f" ({case.floor_is})" if case.floor_is else ""
            found.append(
                f"{case.label}: {measured.backend} is at {ratio:.2f} of the limit{made_of}. So it is no limit: its rates "
                "were measured too low in this run, or this backend does less work."
            )
    return found


def cells(result: Result, measured: Measured, first: bool = True) -> tuple[str, ...]:
    """One row: value with its spread, limit, ratio to it, and how many times better than the best peer it is."""
    case = result.case
    name = case.label if first else ""
    backend = measured.backend + (f" {measured.version}" if measured.version else "")
    limit = _number(case.floor)
    if not measured.values:
        return (name, backend, NONE, "", case.unit, limit, NONE, NONE, measured.error or "")
    low, high = measured.interval or (None, None)
    ratio = f"{measured.value / case.floor:.2f}" if case.floor else NONE
    shown = [figure for figure in measured.figures if figure.shown]
    beside = ", ".join(f"{f.name.replace('_', ' ')} {f.remark}{_number(f.value)} {f.unit}".rstrip() for f in shown)
    spread = NONE if low is None else f"{_number(low)}..{_number(high)}"
    against = _against_peers(result, measured)
    return (name, backend, _number(measured.value), spread, case.unit, limit, ratio, against, beside)


def _against_peers(result: Result, measured: Measured) -> str:
    case = result.case
    peers = [m.value for m in result.measured if m.values and m.backend != case.ours]
    if measured.backend != case.ours or not peers:
        return ""
    if case.higher_is_better:
        return f"{measured.value / max(peers):.2f}x"
    return f"{min(peers) / measured.value:.2f}x"


def markdown(
    command: str,
    device: str,
    limits: Mapping[str, Any],
    results: Mapping[str, Sequence[Result]],
    sentences: Sequence[str],
) -> str:
    """The command, what it ran on, and a table a target."""
    found = environment()
    packages = found["packages"]
    lines = [f"`{command}`", "", f"- device: {device}"]
    lines += [
        f"- GPU: {gpu['name']}, {format_bytes(gpu['memory_bytes'] or 0)}, driver {gpu['driver']}, "
        f"SM clock {gpu['sm_mhz']} of {gpu['sm_mhz_max']} MHz, memory clock {gpu['memory_mhz']} MHz"
        for gpu in gpus()  # the clocks of now, not of a device that had nothing to do yet
    ]
    names = ("torch", "transformers", "triton", DISTRIBUTION)
    versions = ", ".join(f"{name} {packages[name]}" for name in names if name in packages)
    lines.append(f"- {versions}, Python {found['python']}, {found['torch_threads']} CPU thread(s)")
    lines.append(f"- commit {found['git']['commit'] or 'unknown'}{' with changes' if found['git']['dirty'] else ''}")
    lines += [f"- {name.replace('_', ' ')} measured in this run: {_rate(value)}" for name, value in limits.items()]
    for target, some in results.items():
        lines += ["", f"**{target}**", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        for result in some:
            lines += [f"| {' | '.join(cells(result, m))} |" for m in result.measured]
    beyond = [sentence for some in results.values() for result in some for sentence in beyond_the_limit(result)]
    if sentences or beyond:
        lines += ["", *(f"- {sentence}" for sentence in [*beyond, *sentences])]
    return "\n".join(lines) + "\n"


def append(path: Path, text: str) -> None:
    """Append text to the file, after an empty line; make the file if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text(encoding="utf-8").rstrip("\n") + "\n\n" if path.is_file() else ""
        path.write_text(before + text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"bench.markdown={path} cannot be written ({error.strerror}).") from None


def _number(value: float | None) -> str:
    if value is None:
        return NONE
    if value != 0 and (abs(value) < 0.01 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _rate(value: Any) -> str:
    return f"{value / 1e9:,.4g} x 10^9 a second" if isinstance(value, float) else str(value)
