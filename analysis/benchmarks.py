"""Parts of an engine measured alone, case by case: what each backend made of it, beside its limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis import marks, style
from analysis.marks import Bar, Group
from analysis.quantities import moved
from analysis.registry import Plot
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
    """What one backend made of a case. time: the median over repetitions; over: that over the case's limit, which was
    measured in the same run. row: of the CSV. values: of the repetitions. figures: further numbers about it, by name."""

    case: str
    backend: str
    job: JobResult
    time: Estimate
    over: Estimate
    row: dict[str, Any]
    values: Sequence[float]
    figures: dict[str, float | None]

    @property
    def said(self) -> str:
        return f"{digits(self.time.value)} {self.row['unit']}"


def kernel(source: Source) -> Iterator[Plot]:
    """Beside a bar the time, and how many times the limit it is."""
    cases, absent = read(source, "kernel")
    lead = "Median over the limit measured in the same run (red), with the 95 % interval of the median; "
    texts = {id(one): f"{one.said} ({digits(one.over.value)}×)" for timed in cases.values() for one in timed}
    yield _plot(source, cases, absent, texts, lead, {})


def swap(source: Source) -> Iterator[Plot]:
    cases, absent = read(source, "swap", (SEQUENTIAL, PIPELINED))
    speeds = {case: speed_up(timed) for case, timed in cases.items()}
    texts = {}
    for case, timed in cases.items():
        for one in timed:
            texts[id(one)] = one.said
            if one.backend == PIPELINED:
                overlap = one.figures.get("overlap_pct")
                texts[id(one)] += f", {speeds[case].ratio:.2f}× faster"
                texts[id(one)] += "" if overlap is None else f", {overlap:.0f} % overlap"
    lead = (
        "Median over the limit measured in the same run (red), with the 95 % interval of the median. Faster: sequential "
        "over pipelined, repetition by repetition. Overlap: as the benchmark counted it. "
    )
    more = {
        case: {"speed_up": one.ratio, "speed_up_ci_low": one.ci_low, "speed_up_ci_high": one.ci_high}
        for case, one in speeds.items()
    }
    yield _plot(source, cases, absent, texts, lead, more)


def speed_up(timed: Sequence[Timed]) -> PairedRatio:
    """How many times as long the sequential one takes, paired by repetition, since the two were interleaved."""
    of = {one.backend: one for one in timed}
    sides = ({(0, str(at)): value for at, value in enumerate(of[name].values)} for name in (SEQUENTIAL, PIPELINED))
    return paired_ratio(*sides)


def read(source: Source, target: str, needed: Sequence[str] = ()) -> tuple[dict[str, list[Timed]], dict[str, str]]:
    """The cases of a target, and the backends that could not run here, with why. needed: only cases of these backends, which
    must have all of them.

    Raises MissingSeries where a case has no limit, or lacks a backend that is needed or asked for; a peer that this
    machine does not have is absent, and the figure says so.
    """
    command = f"python runners/bench.py target={target}"
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
    if needed:
        found = {label: own for label, own in found.items() if any(job.last.baseline in needed for job, _ in own)}
    if not found:
        again = source.sweep.command or command
        raise MissingSeries(f"Sweep {source.sweep.id} has no completed case of {target}; run `{again}`.")
    for label, measured in found.items():
        for backend in (*needed, *source.wanted):
            if backend not in {job.last.baseline for job, _ in measured}:
                why = f" ({absent[backend]})" if backend in absent else ""
                raise MissingSeries(
                    f"Sweep {source.sweep.id} has no {target} measurement of {backend} for {label}{why}; run `{command}`."
                )
        if not any(metric.limit_value for _, metric in measured):
            raise MissingSeries(
                f"Case {label} of {target} in sweep {source.sweep.id} has no limit beside it; run `{command}`."
            )
    cases = {label: [_timed(*one, measured) for one in measured] for label, measured in found.items()}
    ran = {one.backend for timed in cases.values() for one in timed}
    return cases, {name: why for name, why in absent.items() if name not in ran}


def _timed(job: JobResult, metric: MetricValue, beside: Sequence[tuple[JobResult, MetricValue]]) -> Timed:
    assert job.trial is not None and metric.value is not None
    floor = next(one.limit_value for _, one in beside if one.limit_value)
    floor_is = str((beside[0][0].last.flags or {}).get("floor_is", ""))
    time = Estimate(metric.value, metric.ci_low, metric.ci_high, metric.n or 0, 1)
    over = moved(time, lambda own: own / floor)
    row = {
        "case": metric.label,
        "backend": job.last.baseline,
        "unit": metric.unit,
        "time": time.value,
        "ci_low": time.ci_low,
        "ci_high": time.ci_high,
        "n": time.n,
        "floor": floor,
        "over_floor": over.value,
        "floor_is": floor_is,
    }
    values = [float(value) for value in (job.trial.engine or {}).get("values") or [metric.value]]
    figures = {name: one.value for (name, of), one in job.metrics.items() if of == metric.label and name != metric.name}
    return Timed(metric.label, job.last.baseline, job, time, over, row, values, figures)


def colour(backend: str) -> str:
    """The same in every figure; a backend that is not known here gets one by its name."""
    return _COLOURS.get(backend) or style.colour(backend)


def digits(value: float) -> str:
    """Three of them, without an exponent."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _plot(
    source: Source,
    cases: Mapping[str, Sequence[Timed]],
    absent: Mapping[str, str],
    texts: Mapping[int, str],
    lead: str,
    more: Mapping[str, Mapping[str, Any]],
) -> Plot:
    """Every case with all its backends, as multiples of its limit, in the order in which they were measured; logarithmic from
    the limit on where some take more than ten times as long as others. more: further columns of a case."""
    every = [one for timed in cases.values() for one in timed]
    groups = {
        case: [
            Group(
                one.backend, (ink := colour(one.backend)), [Bar(one.over, ink, texts[id(one)], f"{one.backend}/{case}")]
            )
            for one in timed
        ]
        for case, timed in cases.items()
    }
    picture, grid = marks.bar_grid(list(groups.values()))
    overs = [one.over.value for one in every]
    wide = min(overs) > 0.9 and max(overs) > 12
    for [axes], (case, own) in zip(grid, groups.items(), strict=True):
        if wide:
            marks.plain_log(axes, "x")
        marks.bars(axes, own, origin=1.0 if wide else 0.0)
        axes.axvline(1.0, color=style.WARNING, linewidth=1.1, gid="limit")
        axes.set_title(case, fontsize=6.5, fontweight="bold", color=style.GREY)
    grid[-1][0].set_xlabel("time over the limit (×)")
    names = sorted({name for one in every for name in one.figures})
    rows = [
        {
            **one.row,
            **{name: one.figures.get(name) for name in names},
            "trials": str(one.job.trial.id if one.job.trial else ""),
            **more.get(one.case, {}),
        }
        for one in every
    ]
    counts = [one.time.n for one in every]
    often = str(min(counts)) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    limits = " / ".join(dict.fromkeys(one.row["floor_is"] for one in every if one.row["floor_is"]))
    without = "".join(f"; without {name}: {why}" for name, why in absent.items())
    lead += f"n = {often} repetitions; limit: {limits or 'see the CSV'}{without}"
    backends = dict.fromkeys(one.backend for one in every)
    cells = [Cell(name, {}, [one.job for one in every if one.backend == name]) for name in backends]
    trials = {one.job.trial.id: one.job.trial for one in every if one.job.trial}
    return Plot(Panel(source.sweep, {}, cells, source.trace(list(trials.values()))), picture, lead, rows)
