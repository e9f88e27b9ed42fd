"""The comparison of a sweep as a terminal shows it, at 100 columns or more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pensieve.results.store import ResultsStore
from pensieve.results.summary import REFERENCE, Comparison, ComparisonRow, OutputCheck, compare
from pensieve.statistics import FEWEST_GROUPS, PairedRatio

NONE = "–"


@dataclass(frozen=True, slots=True)
class ComparisonTable:
    """renderable: for a rich console. comparison: the same as plain rows and sentences."""

    renderable: RenderableType
    comparison: Comparison

    def text(self, width: int = 110) -> str:
        """Without colour, for a file."""
        console = Console(file=StringIO(), width=width, color_system=None)
        console.print(self.renderable)
        written = console.file
        assert isinstance(written, StringIO)
        return written.getvalue()


def comparison_table(store: ResultsStore, sweep_id: int) -> ComparisonTable:
    """Raises ResultsError where there is no such sweep."""
    comparison = compare(store, sweep_id)
    parts: list[RenderableType] = []
    for group, rows in groupby(comparison.rows, key=lambda row: dict(row.group)):
        parts.append(_table(group, list(rows)))
    if not comparison.rows:
        parts.append(Text("No trial of this sweep is completed."))
    parts += [Text(note) for note in (*_outputs_notes(comparison.rows), *comparison.notes)]
    return ComparisonTable(Group(*parts), comparison)


def _table(group: dict[str, str], rows: list[ComparisonRow]) -> Table:
    title = "  ".join(f"{axis}={value}" for axis, value in group.items())
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("\nbaseline", no_wrap=True)
    with_ratio = any(row.last_speedup for row in rows)
    names = ["\nn", "TTFT ms\nfirst", "\nfifth", "\nlast"]
    names += [f"{REFERENCE} / this,\nlast turn"] if with_ratio else []
    names += ["out\ntok/s", "GPU\nhit %", "CPU\nhit %", "miss\n%"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    checked = any(row.outputs and not row.outputs.problem for row in rows)
    if checked:
        table.add_column("\noutputs", justify="right", no_wrap=True)
    for row in rows:
        cells = [row.baseline, str(row.trials)]
        cells += [_number(ms) for ms in (row.ttft_first_ms, row.ttft_fifth_ms, row.ttft_last_ms)]
        cells += [_ratio(row.last_speedup, row.baseline == REFERENCE)] if with_ratio else []
        cells.append(_number(row.throughput_output_tok_s))
        cells += [_percent(rate) for rate in (row.gpu_hit_rate, row.cpu_hit_rate, row.miss_rate)]
        cells += [_outputs(row.outputs)] if checked else []
        table.add_row(*cells)
    return table


def _outputs(check: OutputCheck | None) -> str:
    if check is None or check.problem:
        return NONE
    if check.turns_differing:
        return f"{check.turns_differing:,} differ"
    return "identical" if check.exact else "agree"


def _outputs_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    """Whether the baselines gave the same tokens: one sentence where all did, one for each that did not."""
    checked = [(row, row.outputs) for row in rows if row.outputs]
    compared = [(row, check) for row, check in checked if check.problem is None]
    differing = [(row, check) for row, check in compared if check.turns_differing]
    notes = []
    if compared and not differing:
        turns = sum(check.turns_compared for _, check in compared)
        word = "identical, token for token," if all(check.exact for _, check in compared) else "in agreement"
        notes.append(f"Outputs of all baselines are {word} in {turns:,} of {turns:,} turns compared.")
    for row, check in differing:
        where = "".join(f", {axis}={value}" for axis, value in row.group.items())
        margin = "is not known" if check.margin is None else f"is at most {check.margin:.1e}"
        notes.append(
            f"Outputs of {row.baseline}{where} differ from {check.reference} in {check.turns_differing:,} of "
            f"{check.turns_compared:,} turns; the logit margin at the first difference {margin} "
            "(near 0: a tie in rounding; larger: a fault)."
        )
    problems = {check.problem for _, check in checked if check.problem and check.problem != "simulated"}
    notes += [f"Outputs were not compared everywhere: {problem.rstrip('.')}." for problem in sorted(problems)]
    speedups = [row.last_speedup for row in rows if row.last_speedup]
    if speedups:
        notes.append(
            f"{REFERENCE} / this: how many times longer {REFERENCE} takes to the first token, at each conversation's last "
            f"turn, paired by seed and conversation{_interval_note(speedups)}."
        )
    bounds = {row.baseline: row.bound_hit_rate for row in rows if row.bound_hit_rate is not None}
    if bounds and len(rows) == len({row.baseline for row in rows}):  # several groups: it is in the database
        named = ", ".join(f"{baseline} {_percent(bound)}" for baseline, bound in bounds.items())
        notes.append(
            f"Offline bound, the most that GPU and CPU hits could have come to with this capacity, in %: {named}."
        )
    return notes


def _interval_note(ratios: Sequence[PairedRatio]) -> str:
    """What the brackets are, and what n counts where there are none."""
    several = any(ratio.n_seeds > 1 for ratio in ratios)
    over = "" if several else " over the conversations of one seed"
    notes = [f", with the 95 % interval{over}"] if any(ratio.ci_low is not None for ratio in ratios) else []
    if any(ratio.ci_low is None for ratio in ratios):
        unit = "seeds" if several else "conversations of one seed"
        notes.append(f"; n counts {unit}, no interval below {FEWEST_GROUPS}")
    return "".join(notes)


def _number(value: float | None) -> str:
    """Three digits or more, none of them noise."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f}"


def _ratio(ratio: PairedRatio | None, is_reference: bool) -> str:
    if ratio is None:
        return "1" if is_reference else NONE
    if ratio.ci_low is None or ratio.ci_high is None:
        return f"{ratio.ratio:.2f}, n = {ratio.groups}"
    digits = 2 if ratio.ci_high < 10 else 1
    return f"{ratio.ratio:.{digits}f} [{ratio.ci_low:.{digits}f}, {ratio.ci_high:.{digits}f}]"
