"""Parts of an engine measured alone, case by case: what each backend made of it, beside its limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure as Picture

from analysis import marks, style
from analysis.marks import Bar, Group
from analysis.registry import Figure, Plot, figure
from analysis.sweep import Cell, Panel, Source
from pensieve.errors import MissingSeries
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.store import JobResult
from pensieve.lab.statistics import Estimate, PairedRatio, paired_ratio

SEQUENTIAL, PIPELINED = "sequential", "pipelined"

# A backend has one colour everywhere: ours those of Pensieve, and plain ones that of the baseline that forgets.
_COLOURS = {
    "ours": style.COLOURS["pensieve"],
    "triton": style.COLOURS["pensieve"],
    "pipelined": style.COLOURS["pensieve"],
    "reference": style.COLOURS["stateless"],
    "sequential": style.COLOURS["stateless"],
    "contiguous": "#E69F00",
    "varlen": "#009E73",
    "flashinfer": "#CC79A7",
    "copied_out": "#D55E00",
    "one_at_a_time": "#332288",
    "one_run": "#56B4E9",
    "transformers": "#882255",
}


@dataclass(frozen=True, slots=True)
class Timed:
    """What one backend made of a case. time: the median over repetitions, in `unit`; values: each of them, in order.
    figures: the further numbers about it, by name."""

    backend: str
    trial: int
    time: Estimate
    unit: str
    values: Sequence[float]
    figures: dict[str, MetricValue]


@dataclass(frozen=True, slots=True)
class BenchCase:
    """floor: the limit that was measured in the same run, in the same unit; floor_is: what it is made of."""

    label: str
    floor: float
    floor_is: str
    timed: Sequence[Timed]

    def of(self, backend: str) -> Timed | None:
        return next((one for one in self.timed if one.backend == backend), None)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The cases of one target in one sweep. absent: backends that could not run here, and why."""

    panel: Panel
    cases: Sequence[BenchCase]
    absent: dict[str, str]

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(one.backend for case in self.cases for one in case.timed))


def _command(target: str) -> str:
    return f"python runners/bench.py target={target}"


def _figure(target: str, title: str, shows: str) -> Callable[[Callable[[Source], Iterator[Plot]]], Figure]:
    workload = f"bench_{target}"
    return figure(
        target,
        title,
        shows=shows,
        command=_command(target),
        applies=lambda source: source.has_workload(workload),
        workload=workload,
    )


@_figure("kernel", "Attention, by backend", "attention by backend beside its limit")
def kernel(source: Source) -> Iterator[Plot]:
    def text(case: BenchCase, one: Timed) -> str:
        """The time, and how many times the limit it is."""
        return f"{digits(one.time.value)} {one.unit} ({digits(one.time.value / case.floor)}×)"

    found = read(source, "kernel")
    lead = "Median over the limit measured in the same run (red), with the 95 % interval of the median; "
    yield Plot(found.panel, _draw(found, text), lead + _small_print(found), _rows(found))


@_figure("swap", "Restoring KV: in sequence, and pipelined", "swapping in sequence and pipelined, beside its limit")
def swap(source: Source) -> Iterator[Plot]:
    found = read(source, "swap", (SEQUENTIAL, PIPELINED))
    speeds = {case.label: speed_up(case) for case in found.cases}

    def text(case: BenchCase, one: Timed) -> str:
        said = f"{digits(one.time.value)} {one.unit}"
        if one.backend != PIPELINED:
            return said
        said += f", {speeds[case.label].ratio:.2f}× faster"
        overlap = one.figures.get("overlap_pct")
        return said if overlap is None or overlap.value is None else f"{said}, {overlap.value:.0f} % overlap"

    lead = (
        "Median over the limit measured in the same run (red), with the 95 % interval of the median. Faster: sequential "
        "over pipelined, repetition by repetition. Overlap: as the benchmark counted it. "
    )
    rows = [
        {
            **row,
            "speed_up": speeds[row["case"]].ratio,
            "speed_up_ci_low": speeds[row["case"]].ci_low,
            "speed_up_ci_high": speeds[row["case"]].ci_high,
        }
        for row in _rows(found)
    ]
    yield Plot(found.panel, _draw(found, text), lead + _small_print(found), rows)


def speed_up(case: BenchCase) -> PairedRatio:
    """How many times as long the sequential one takes, paired by repetition, since the two were interleaved."""
    sequential, pipelined = case.of(SEQUENTIAL), case.of(PIPELINED)
    assert sequential is not None and pipelined is not None, "read has made sure of both"
    sides = [{(0, str(place)): value for place, value in enumerate(one.values)} for one in (sequential, pipelined)]
    return paired_ratio(*sides)


def read(source: Source, target: str, needed: Sequence[str] = ()) -> Benchmark:
    """The cases of a target. needed: only cases of these backends, which must have all of them.

    Raises MissingSeries where a case has no limit, or lacks a backend that is needed or asked for; a peer that this
    machine does not have is absent, and the figure says so.
    """
    jobs = [job for job in source.jobs if job.last.workload == f"bench_{target}"]
    chosen = [job for job in jobs if not source.wanted or job.last.baseline in {*source.wanted, *needed}]
    found: dict[str, list[tuple[JobResult, MetricValue]]] = {}
    absent: dict[str, str] = {}
    for job in chosen:
        bench = (job.last.config or {}).get("bench") or {}
        metric = job.metrics.get((bench.get("metric", ""), bench.get("case", "")))
        if job.trial is None or metric is None or metric.value is None:
            absent.setdefault(job.last.baseline, (job.last.error or "not measured").rstrip("."))
        else:
            found.setdefault(metric.label, []).append((job, metric))
    again = source.sweep.command or _command(target)
    if needed:
        found = {
            label: measured
            for label, measured in found.items()
            if any(job.last.baseline in needed for job, _ in measured)
        }
    if not found:
        raise MissingSeries(f"Sweep {source.sweep.id} has no completed case of {target}; run `{again}`.")
    for label, measured in found.items():
        have = {job.last.baseline for job, _ in measured}
        for backend in (*needed, *source.wanted):
            if backend not in have:
                why = f" ({absent[backend]})" if backend in absent else ""
                raise MissingSeries(
                    f"Sweep {source.sweep.id} has no {target} measurement of {backend} for {label}{why}; run "
                    f"`{_command(target)}`."
                )
    cases = [_case(source, target, label, measured) for label, measured in found.items()]
    trials = {job.trial.id: job.trial for measured in found.values() for job, _ in measured if job.trial}
    backends = dict.fromkeys(one.backend for case in cases for one in case.timed)
    cells = [
        Cell(name, {}, [job for measured in found.values() for job, _ in measured if job.last.baseline == name])
        for name in backends
    ]
    panel = Panel(source.sweep, {}, cells, source.trace(list(trials.values())))
    return Benchmark(panel, cases, {name: why for name, why in absent.items() if name not in backends})


def colour(backend: str) -> str:
    """The same in every figure; a backend that is not known here gets one by its name."""
    return _COLOURS.get(backend) or style.colour(backend)


def digits(value: float) -> str:
    """Three of them, without an exponent."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _draw(benchmark: Benchmark, text_of: Callable[[BenchCase, Timed], str]) -> Picture:
    """Every case with all its backends, as multiples of its limit, in the order in which they were measured.

    From the limit on and logarithmic where some take more than ten times as long as others. text_of: beside a bar.
    """
    sections = [
        [
            Group(
                one.backend,
                colour(one.backend),
                [
                    Bar(
                        _over(one.time, case.floor),
                        colour(one.backend),
                        text_of(case, one),
                        f"{one.backend}/{case.label}",
                    )
                ],
            )
            for one in case.timed
        ]
        for case in benchmark.cases
    ]
    picture, grid = marks.bar_grid(sections)
    overs = [one.time.value / case.floor for case in benchmark.cases for one in case.timed]
    wide = min(overs) > 0.9 and max(overs) > 12
    for [axes], case, groups in zip(grid, benchmark.cases, sections, strict=True):
        if wide:
            marks.plain_log(axes, "x")
        marks.bars(axes, groups, origin=1.0 if wide else 0.0)
        axes.axvline(1.0, color=style.WARNING, linewidth=1.1, gid="limit")
        axes.set_title(case.label, fontsize=6.5, fontweight="bold", color=style.GREY)
    grid[-1][0].set_xlabel("time over the limit (×)")
    return picture


def _rows(benchmark: Benchmark) -> list[dict[str, Any]]:
    """For the CSV: a line for each backend of each case, with every further number that any of them has."""
    names = sorted({name for case in benchmark.cases for one in case.timed for name in one.figures})
    return [
        {
            "case": case.label,
            "backend": one.backend,
            "unit": one.unit,
            "time": one.time.value,
            "ci_low": one.time.ci_low,
            "ci_high": one.time.ci_high,
            "n": one.time.n,
            "floor": case.floor,
            "over_floor": one.time.value / case.floor,
            "floor_is": case.floor_is,
            **{name: one.figures[name].value if name in one.figures else None for name in names},
            "trials": str(one.trial),
        }
        for case in benchmark.cases
        for one in case.timed
    ]


def _small_print(benchmark: Benchmark) -> str:
    """How often each was repeated, what the limit is made of, and which backends are not there, and why."""
    counts = [one.time.n for case in benchmark.cases for one in case.timed]
    often = str(min(counts)) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    limits = " / ".join(dict.fromkeys(case.floor_is for case in benchmark.cases if case.floor_is))
    absent = "".join(f"; without {name}: {why}" for name, why in benchmark.absent.items())
    return f"n = {often} repetitions; limit: {limits or 'see the CSV'}{absent}"


def _case(source: Source, target: str, label: str, measured: Sequence[tuple[JobResult, MetricValue]]) -> BenchCase:
    floors = [metric.limit_value for _, metric in measured if metric.limit_value]
    if not floors:
        raise MissingSeries(
            f"Case {label} of {target} in sweep {source.sweep.id} has no limit beside it; run `{_command(target)}`."
        )
    timed = []
    for job, metric in measured:
        assert job.trial is not None and metric.value is not None
        time = Estimate(metric.value, metric.ci_low, metric.ci_high, metric.n or 0, 1)
        figures = {name: one for (name, of), one in job.metrics.items() if of == label and name != metric.name}
        timed.append(Timed(job.last.baseline, job.trial.id, time, metric.unit, _values(job, metric), figures))
    said = next((str((job.last.flags or {}).get("floor_is", "")) for job, _ in measured), "")
    return BenchCase(label, floors[0], said, timed)


def _values(job: JobResult, metric: MetricValue) -> list[float]:
    assert job.trial is not None and metric.value is not None
    return [float(value) for value in (job.trial.engine or {}).get("values") or [metric.value]]


def _over(time: Estimate, floor: float) -> Estimate:
    low, high = (None if end is None else end / floor for end in (time.ci_low, time.ci_high))
    return Estimate(time.value / floor, low, high, time.n, time.groups)
