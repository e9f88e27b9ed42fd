"""Parts of an engine measured alone, case by case: what each backend made of it, beside its limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analysis import style
from analysis.forms import Form
from analysis.quantities import moved
from analysis.registry import Plot, Row
from analysis.sweep import Cell, Panel, Source
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.store import JobResult
from pensieve.lab.statistics import Estimate

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
    "transformers": "#882255",
}


def cases(source: Source, form: Form, *, target: str) -> Iterator[Plot]:
    """Every case that is a time with all its backends, as multiples of its limit, in the order in which they were measured.
    Raises MissingSeries where there is none; a backend that failed is left out, and the caption says why."""
    jobs = [job for job in source.jobs if job.last.baseline in source.baselines()]
    every = [(job, _main(job)) for job in jobs if job.last.workload == f"bench_{target}"]
    found = [(job, one) for job, one in every if one is not None and one.unit == "ms"]
    if not found:
        raise source.lacks(f"completed case of {target}")
    names = sorted({name for job, _ in found for name in _beside(job)})
    rows = [_row(job, one, names) for job, one in found]
    trials = [job.trial for job, _ in found if job.trial]
    backends = dict.fromkeys(trial.baseline for trial in trials)
    cells = [Cell(name, {}, [one for one in trials if one.baseline == name]) for name in backends]
    failed = {job.last.baseline: job.last.error for job, _ in every if job.last.error}
    left_out = [f"{name} ({why.rstrip('.')})" for name, why in failed.items() if name not in backends and why]
    counts = sorted(row["n"] for row in rows)
    words = {
        "n": "-".join(map(str, dict.fromkeys((counts[0], counts[-1])))),
        "limits": " / ".join(dict.fromkeys(row["floor_is"] for row in rows)),
    }
    yield Plot(Panel({}, cells, source.sweep, source.trace(trials), left_out), rows, words=words)


def _main(job: JobResult) -> MetricValue | None:
    """What the case is about; None where the backend gave nothing."""
    bench = (job.last.config or {}).get("bench") or {}
    metric = job.metrics.get((bench.get("metric", ""), bench.get("case", "")))
    return metric if job.trial and metric and metric.value is not None and metric.limit_value else None


def _beside(job: JobResult) -> dict[str, float | None]:
    """Further numbers about the case, by name."""
    main = (job.last.config or {})["bench"]["metric"]
    return {name: one.value for (name, _), one in job.metrics.items() if name != main}


def _row(job: JobResult, metric: MetricValue, names: Sequence[str]) -> Row:
    """time: the median over repetitions; over_floor: that over the case's limit, which was measured in the same run."""
    time, floor = (
        Estimate(metric.value or 0.0, metric.ci_low, metric.ci_high, metric.n or 0, 1),
        metric.limit_value or 1.0,
    )
    over, beside = moved(time, lambda own: own / floor), _beside(job)
    return {
        "case": metric.label,
        "backend": job.last.baseline,
        "unit": metric.unit,
        "time": time.value,
        "ci_low": time.ci_low,
        "ci_high": time.ci_high,
        "n": time.n,
        "floor": floor,
        "over_floor": over,
        "floor_is": str((job.last.flags or {}).get("floor_is", "")),
        **{name: beside.get(name) for name in names},
        "trials": str(job.trial.id if job.trial else ""),
        "_section": metric.label,
        "_name": job.last.baseline,
        "_colour": _COLOURS.get(job.last.baseline) or style.colour(job.last.baseline),
        "_over_floor_text": f"{digits(time.value)} {metric.unit} ({digits(over.value)}×)",
    }


def digits(value: float) -> str:
    """Three of them, without an exponent."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"
