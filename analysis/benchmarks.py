"""Parts of an engine measured alone, case by case: what each backend made of it, beside its limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from analysis import style
from analysis.forms import Form
from analysis.quantities import moved
from analysis.registry import Plot, Row
from analysis.sweep import Cell, Panel, Source
from pensieve.errors import MissingSeries
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.store import JobResult
from pensieve.lab.statistics import Estimate, paired_ratio

SEQUENTIAL, PIPELINED = "sequential", "pipelined"
Measured = tuple[JobResult, MetricValue]

# A backend has one colour everywhere: ours those of Pensieve, and plain ones that of the baseline that forgets.
_COLOURS = {
    "ours": style.COLOURS["pensieve"],
    "triton": style.COLOURS["pensieve"],
    "pipelined": style.COLOURS["pensieve"],
    "reference": style.COLOURS["stateless"],
    "sequential": style.COLOURS["stateless"],
    "contiguous": "#E69F00",
    "copied_out": "#D55E00",
    "one_at_a_time": "#332288",
    "one_run": "#56B4E9",
    "transformers": "#882255",
}


def cases(source: Source, form: Form, *, target: str, needed: Sequence[str] = ()) -> Iterator[Plot]:
    """Every case with all its backends, as multiples of its limit, in the order in which they were measured. needed: only
    cases of these backends, which must have all of them.

    Raises MissingSeries where a case has no limit, or lacks a backend that is needed or asked for; a peer that this machine
    does not have is absent, and the caption says so.
    """
    found, absent = _measured(source, target, needed)
    every = [one for own in found.values() for one in own]
    names = sorted({name for job, metric in every for name in _beside(job, metric)})
    rows = [row for own in found.values() for row in _case(own, names)]
    counts = sorted(row["n"] for row in rows)
    limits = " / ".join(dict.fromkeys(row["floor_is"] for row in rows if row["floor_is"]))
    backends = dict.fromkeys(job.last.baseline for job, _ in every)
    words = {
        "n": str(counts[0]) if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}",
        "limits": limits or "see the CSV",
        "without": "".join(f"; without {name}: {why}" for name, why in absent.items() if name not in backends),
    }
    trials = {job.trial.id: job.trial for job, _ in every if job.trial}
    cells = [Cell(name, {}, [one for one in trials.values() if one.baseline == name]) for name in backends]
    yield Plot(Panel(source.sweep, {}, cells, source.trace(list(trials.values()))), rows, words=words)


def _measured(source: Source, target: str, needed: Sequence[str]) -> tuple[dict[str, list[Measured]], dict[str, str]]:
    """By case, and the backends that could not run here, with why."""
    command = f"python runners/bench.py target={target}"
    jobs = [job for job in source.jobs if job.last.workload == f"bench_{target}"]
    chosen = [job for job in jobs if not source.wanted or job.last.baseline in {*source.wanted, *needed}]
    found: dict[str, list[Measured]] = {}
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
    return found, absent


def _beside(job: JobResult, metric: MetricValue) -> dict[str, float | None]:
    """Further numbers about it, by name."""
    return {name: one.value for (name, of), one in job.metrics.items() if of == metric.label and name != metric.name}


def _case(measured: Sequence[Measured], names: Sequence[str]) -> Iterator[Row]:
    """time: the median over repetitions; over_floor: that over the case's limit, which was measured in the same run."""
    floor = next(metric.limit_value for _, metric in measured if metric.limit_value)
    floor_is = str((measured[0][0].last.flags or {}).get("floor_is", ""))
    faster = _speed_up(measured)
    for job, metric in measured:
        backend, figures = job.last.baseline, _beside(job, metric)
        time = Estimate(metric.value or 0.0, metric.ci_low, metric.ci_high, metric.n or 0, 1)
        over = moved(time, lambda own: own / floor)
        text = f"{digits(time.value)} {metric.unit}"
        if faster is None:
            text += f" ({digits(over.value)}×)"
        elif backend == PIPELINED:
            overlap = figures.get("overlap_pct")
            text += f", {faster.value:.2f}× faster" + ("" if overlap is None else f", {overlap:.0f} % overlap")
        yield {
            "case": metric.label,
            "backend": backend,
            "unit": metric.unit,
            "time": time.value,
            "ci_low": time.ci_low,
            "ci_high": time.ci_high,
            "n": time.n,
            "floor": floor,
            "over_floor": over,
            "floor_is": floor_is,
            **{name: figures.get(name) for name in names},
            "trials": str(job.trial.id if job.trial else ""),
            **_speed_columns(faster),
            "_section": metric.label,
            "_name": backend,
            "_colour": _COLOURS.get(backend) or style.colour(backend),
            "_over_floor_text": text,
        }


def _speed_up(measured: Sequence[Measured]) -> Estimate | None:
    """How many times as long the sequential one takes, paired by repetition, since the two were interleaved."""
    values = {
        job.last.baseline: [
            float(one) for one in ((job.trial and job.trial.engine) or {}).get("values") or [metric.value]
        ]
        for job, metric in measured
    }
    if not {SEQUENTIAL, PIPELINED} <= set(values):
        return None
    sides = ({(0, str(at)): one for at, one in enumerate(values[name])} for name in (SEQUENTIAL, PIPELINED))
    return paired_ratio(*sides)


def _speed_columns(faster: Estimate | None) -> Mapping[str, float | None]:
    if faster is None:
        return {}
    return {"speed_up": faster.value, "speed_up_ci_low": faster.ci_low, "speed_up_ci_high": faster.ci_high}


def digits(value: float) -> str:
    """Three of them, without an exponent."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"
