"""What the figures of benchmarks share: cases with their limits, and what each backend made of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from sqlalchemy import select

from analysis.drawing import command_line, style
from analysis.drawing.bars import Bar, Group, draw_groups, draw_limit, height_in, place_values
from analysis.drawing.provenance import trace
from analysis.drawing.publish import arrange
from analysis.drawing.source import Cell, Panel, Source
from pensieve.errors import MissingSeries, PensieveError
from pensieve.metrics import Metric
from pensieve.results.schema import Sweep, SweepTrial, Trial
from pensieve.results.store import JobResult, ResultsStore
from pensieve.statistics import Estimate

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
    figures: dict[str, Metric]


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


def command(target: str) -> str:
    return f"python runners/bench.py target={target}"


def main(figure: command_line.Figure, target: str, argv: Sequence[str] | None = None) -> int:
    """As command_line.main, but by default of the latest command that measured this target."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = command_line.parser(figure.shows).parse_args(given)
    if options.sweep is None:
        try:
            given.append(f"--sweep={_latest(command_line.chosen_store(options), target)}")
        except PensieveError as error:
            print(error, file=sys.stderr)
            return 1
    return command_line.main(figure, given)


def applies(source: Source, target: str) -> bool:
    return any(job.last.workload == f"bench_{target}" for job in source.jobs)


def read(source: Source, target: str, needed: Sequence[str] = ()) -> Benchmark:
    """The cases of a target. needed: only cases of these backends, which must have all of them.

    Raises MissingSeries where a case has no limit, or lacks a backend that is needed or asked for; a peer that this
    machine does not have is absent, and the figure says so.
    """
    jobs = [job for job in source.jobs if job.last.workload == f"bench_{target}"]
    chosen = [job for job in jobs if not source.wanted or job.last.baseline in {*source.wanted, *needed}]
    found: dict[str, list[tuple[JobResult, Metric]]] = {}
    absent: dict[str, str] = {}
    for job in chosen:
        bench = (job.last.config or {}).get("bench") or {}
        metric = job.metrics.get((bench.get("metric", ""), bench.get("case", "")))
        if job.trial is None or metric is None or metric.value is None:
            absent.setdefault(job.last.baseline, (job.last.error or "not measured").rstrip("."))
        else:
            found.setdefault(metric.label, []).append((job, metric))
    again = source.sweep.command or command(target)
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
                    f"`{command(target)}`."
                )
    cases = [_case(source, target, label, measured) for label, measured in found.items()]
    trials = {job.trial.id: job.trial for measured in found.values() for job, _ in measured if job.trial}
    origin = trace(source.store, source.sweep, list(trials.values()), allow_mixed=source.allow_mixed)
    backends = dict.fromkeys(one.backend for case in cases for one in case.timed)
    cells = [
        Cell(name, {}, [job for measured in found.values() for job, _ in measured if job.last.baseline == name])
        for name in backends
    ]
    return Benchmark(
        Panel(source.sweep, {}, cells, origin), cases, {k: v for k, v in absent.items() if k not in backends}
    )


def colour(backend: str) -> str:
    """The same in every figure; a backend that is not known here gets one by its name."""
    return _COLOURS.get(backend) or style.colour(backend)


def digits(value: float) -> str:
    """Three of them, without an exponent."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _floor_group(case: BenchCase, texts: dict[str, str]) -> list[Group]:
    """A case as bars: each backend's time over the floor, in the order in which they were measured. texts: beside the
    bars, by backend."""
    return [
        Group(
            one.backend,
            colour(one.backend),
            [Bar(_over(one.time, case.floor), colour(one.backend), texts[one.backend], f"{one.backend}/{case.label}")],
            case.label if index == 0 else "",
            close=True,
        )
        for index, one in enumerate(case.timed)
    ]


def rows(benchmark: Benchmark) -> list[dict[str, object]]:
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


def draw_cases(
    benchmark: Benchmark, title: str, lead: str, text_of: Callable[[BenchCase, Timed], str], margin_in: float
) -> tuple[Figure, str]:
    """Every case with all its backends, as multiples of its limit; and what the figure says below, from `lead` on.

    From the limit on and logarithmic where some take more than ten times as long as others. text_of: beside a bar.
    margin_in: inches above and below the bars.
    """
    groups: list[Group] = []
    for case in benchmark.cases:
        groups += _floor_group(case, {one.backend: text_of(case, one) for one in case.timed})
    figure, axes = style.new_figure(height_in=height_in(groups) + margin_in)
    overs = [one.time.value / case.floor for case in benchmark.cases for one in case.timed]
    wide = min(overs) > 0.9 and max(overs) > 12
    origin = 1.0 if wide else 0.0
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    draw_groups(axes, groups, origin=origin)
    draw_limit(axes, groups, 1.0, "limit")
    axes.set_xlabel("time over the limit (×)")
    lead += _small_print(benchmark)
    arrange(figure, benchmark.panel, title, lead, left=0.10 + style.name_room(benchmark.backends), right=0.08)
    place_values(figure, axes, groups, origin=origin)
    return figure, lead


def _small_print(benchmark: Benchmark) -> str:
    """How often each was repeated, what the limit is made of, and which backends are not there, and why."""
    counts = [one.time.n for case in benchmark.cases for one in case.timed]
    often = str(min(counts)) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    limits = " / ".join(dict.fromkeys(case.floor_is for case in benchmark.cases if case.floor_is))
    absent = "".join(f"; without {name}: {why}" for name, why in benchmark.absent.items())
    return f"n = {often} repetitions; limit: {limits or 'see the CSV'}{absent}"


def _latest(store: ResultsStore, target: str) -> int:
    found = (
        select(Sweep.id)
        .join(SweepTrial, SweepTrial.sweep_id == Sweep.id)
        .join(Trial, Trial.id == SweepTrial.trial_id)
        .where(Trial.workload == f"bench_{target}")
        .order_by(Sweep.started_at.desc(), Sweep.id.desc())
    )
    with store.database.reading() as connection:
        latest = connection.execute(found.limit(1)).scalar()
    if latest is None:
        raise MissingSeries(f"The results database has no measurement of {target}; run `{command(target)}`.")
    return int(latest)


def _case(source: Source, target: str, label: str, measured: Sequence[tuple[JobResult, Metric]]) -> BenchCase:
    floors = [metric.limit_value for _, metric in measured if metric.limit_value]
    if not floors:
        raise MissingSeries(
            f"Case {label} of {target} in sweep {source.sweep.id} has no limit beside it; run `{command(target)}`."
        )
    timed = []
    for job, metric in measured:
        assert job.trial is not None and metric.value is not None
        time = Estimate(metric.value, metric.ci_low, metric.ci_high, metric.n or 0, 1)
        figures = {name: one for (name, of), one in job.metrics.items() if of == label and name != metric.name}
        timed.append(Timed(job.last.baseline, job.trial.id, time, metric.unit, _values(job, metric), figures))
    said = next((str((job.last.flags or {}).get("floor_is", "")) for job, _ in measured), "")
    return BenchCase(label, floors[0], said, timed)


def _values(job: JobResult, metric: Metric) -> list[float]:
    assert job.trial is not None and metric.value is not None
    return [float(value) for value in (job.trial.engine or {}).get("values") or [metric.value]]


def _over(time: Estimate, floor: float) -> Estimate:
    low, high = (None if end is None else end / floor for end in (time.ci_low, time.ci_high))
    return Estimate(time.value / floor, low, high, time.n, time.groups)
