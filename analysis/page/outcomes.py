"""What came of a sweep, as tables: baselines side by side, speed-ups by turn, or the cases of a benchmark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from analysis.page.document import Table
from analysis.page.particulars import UPFRONT
from analysis.sweep import Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.claims import Sides, Which, speedup
from pensieve.lab.results.findings import REFERENCE
from pensieve.lab.results.frame import Frame
from pensieve.lab.results.sweep_table import SweepRow, sweep_table
from pensieve.lab.results.trials import mixtures
from pensieve.units import NONE, percent, three_digits

_IN_A_TABLE = ("not_completed", "never_begun")  # what did not complete has one of its own

SPEEDUP_TURNS: Sequence[tuple[str, Which]] = (
    ("turn 1", 1),
    ("turn 5", 5),
    ("turn 10", 10),
    ("last", "last"),
    ("all", None),
)


def answers(source: Source) -> Sequence[str]:
    """What was found, in a sentence; of a benchmark its table alone says it."""
    found = None if _benchmark(source) else sweep_table(source.store, source.sweep.id).headline
    return [found] if found else []


def results(source: Source) -> list[Table]:
    """Baselines side by side, at every combination of the other swept axes; then the speed-ups by turn."""
    if _benchmark(source):
        return _cases(source)
    rows = sweep_table(source.store, source.sweep.id).rows
    return [*([_comparison(rows)] if rows else []), *_speedups(source)]


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
    axes = list(rows[0].group)
    on_disk = any(row.metrics["disk_hit_rate"] for row in rows)
    columns = [
        *((axis, "") for axis in axes), ("baseline", ""), ("trials", ""), ("TTFT p50", "ms"), ("TTFT p99", "ms"),
        ("TTFT last turn", "ms"), ("ITL p50", "ms"), ("ITL p99", "ms"), ("output", "tok/s"), ("GPU hit", "%"),
        ("CPU hit", "%"), *([("disk hit", "%")] if on_disk else []), ("miss", "%"), ("outputs", "held against the others"),
    ]  # fmt: skip
    texts = [[*row.group.values(), *_row(row, on_disk)] for row in rows]
    kept = [place for place in range(len(columns)) if any(text[place] != NONE for text in texts)]
    columns, texts = [columns[place] for place in kept], [[text[place] for place in kept] for text in texts]
    return Table(columns, texts, "Baselines side by side", words=len(axes) + 1)


def _row(row: SweepRow, on_disk: bool) -> list[str]:
    ttft, itl = ([row.metrics[f"{name}_ms_{p}"] for p in ("p50", "p99")] for name in ("ttft", "itl"))
    rates = ("gpu_hit_rate", "cpu_hit_rate", *(["disk_hit_rate"] if on_disk else []), "miss_rate")
    numbers = [*ttft, row.ttft_last_ms, *itl, row.metrics["throughput_output_tok_s"]]
    shares = [percent(row.metrics[name]) for name in rates]
    return [row.baseline, str(row.trials), *map(three_digits, numbers), *shares, _outputs(row)]


def _outputs(row: SweepRow) -> str:
    check = row.outputs
    if check is None or check.problem:
        return NONE
    if check.turns_differing:
        return f"{check.turns_differing:,} of {check.turns_compared:,} turns differ"
    return f"{'identical' if check.exact else 'agree'} in {check.turns_compared:,} turns"


def _speedups(source: Source) -> list[Table]:
    """How many times longer stateless takes to the first token, by turn; none where no conversation has two turns."""
    evidence = Frame(source.store, source.sweep.id)
    groups = evidence.groups(None)
    rows: list[tuple[list[str], list[str]]] = []
    for group in groups:
        reference = group.trials.get(REFERENCE)
        if reference is None or mixtures([trial for members in group.trials.values() for trial in members]):
            continue
        for name, members in group.trials.items():
            if name != REFERENCE:
                sides = Sides(evidence, members, reference)
                rows.append(([*group.at.values(), name], [_speedup(sides, turn) for _, turn in SPEEDUP_TURNS]))
    kept = [place for place in range(len(SPEEDUP_TURNS)) if any(row[place] != NONE for _, row in rows)]
    if len(kept) < 3:  # nothing but the last turn and all of them
        return []
    columns = [*((axis, "") for axis in groups[0].at), ("baseline", ""), *(_heading(SPEEDUP_TURNS[p]) for p in kept)]
    texts = [[*names, *(row[place] for place in kept)] for names, row in rows]
    return [Table(columns, texts, f"{REFERENCE} / this, time to first token", words=len(groups[0].at) + 1)]


def _heading(turn: tuple[str, Which]) -> tuple[str, str]:
    name, which = turn
    return (name, "") if isinstance(which, int) else (name, "turn" if which else "turns")


def _speedup(sides: Sides, turn: Which) -> str:
    try:
        found = speedup(sides, turn=turn)
    except MissingSeries:
        return NONE
    return estimated(found.value, found.ci_low, found.ci_high)


def _cases(source: Source) -> list[Table]:
    """Of a benchmark: each case with what its backends made of it, beside the limit."""
    found: dict[str, list[Sequence[str]]] = defaultdict(list)
    for job in source.jobs:
        for (name, case), metric in sorted(job.metrics.items()):
            if job.trial is not None and metric.value is not None:
                limit = NONE if metric.limit_value is None else with_unit(three_digits(metric.limit_value), metric.unit)
                value = estimated(metric.value, metric.ci_low, metric.ci_high, metric.unit)
                found[job.trial.workload].append([case or NONE, job.trial.baseline, name, value, limit])
    columns = [("case", ""), ("backend", ""), ("metric", ""), ("value", "95 % interval"), ("limit", "")]
    return [Table(columns, sorted(rows, key=lambda row: row[0]), workload, words=3) for workload, rows in found.items()]
