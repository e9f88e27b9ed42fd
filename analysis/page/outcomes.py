"""What came of a sweep, as tables: baselines side by side, or the cases of a benchmark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from analysis.page.document import Table
from analysis.page.particulars import UPFRONT
from analysis.sweep import Source
from pensieve.lab.results.sweep_table import SweepRow, cells_of, sweep_table
from pensieve.units import NONE, three_digits

_IN_A_TABLE = ("not_completed", "never_begun")  # what did not complete has one of its own


def answers(source: Source) -> Sequence[str]:
    """What was found, in a sentence; of a benchmark its table alone says it."""
    found = None if _benchmark(source) else sweep_table(source.store, source.sweep.id).headline
    return [found] if found else []


def results(source: Source) -> list[Table]:
    """Baselines side by side, at every combination of the other swept axes."""
    if _benchmark(source):
        return _cases(source)
    rows = sweep_table(source.store, source.sweep.id).rows
    return [_comparison(rows)] if rows else []


def notes(source: Source) -> list[str]:
    """The notes that do not stand above the tables, a sentence each."""
    told = sweep_table(source.store, source.sweep.id).notes
    found = [note.text for note in told if not note.above and note.code not in (*UPFRONT, *_IN_A_TABLE)]
    if source.trials and not _benchmark(source):
        found.insert(0, "TTFT counts from the intended arrival, with queueing. Rates are shares of history tokens.")
    return found


def estimated(value: float, low: float | None, high: float | None, unit: str = "") -> str:
    """A value with its unit, and its interval, with as many digits as tell them apart."""
    ends = [abs(x) for x in (value, low, high) if x is not None]
    digits = 0 if max(ends) >= 1000 or max(ends) == 0 else 1 if max(ends) >= 100 else 2 if max(ends) >= 0.995 else 3
    interval = f" [{low:,.{digits}f}, {high:,.{digits}f}]" if low is not None and high is not None else ""
    return f"{with_unit(f'{value:,.{digits}f}', unit)}{interval}"


def with_unit(number: str, unit: str) -> str:
    return f"{number}×" if unit == "x" else f"{number} {unit}".rstrip()


def _benchmark(source: Source) -> bool:
    return bool(source.trials) and all(trial.workload.startswith("bench_") for trial in source.trials)


def _comparison(rows: Sequence[SweepRow]) -> Table:
    named = ({**row.group, "baseline": row.baseline} for row in rows)
    lines = [name | cells for name, cells in zip(named, cells_of(rows), strict=True)]
    return Table(lines, "Baselines side by side", words=len(rows[0].group) + 1)


def _cases(source: Source) -> list[Table]:
    """Of a benchmark: each case with what its backends made of it, beside the limit."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    for job in source.jobs:
        for (name, case), metric in sorted(job.metrics.items()):
            if job.trial is not None and metric.value is not None:
                limit = NONE if metric.limit_value is None else with_unit(three_digits(metric.limit_value), metric.unit)
                value = estimated(metric.value, metric.ci_low, metric.ci_high, metric.unit)
                line = {"case": case or NONE, "backend": job.trial.baseline, "metric": name}
                found[job.trial.workload].append({**line, "value\n95 % interval": value, "limit": limit})
    return [Table(sorted(lines, key=lambda line: line["case"]), name, words=3) for name, lines in found.items()]
