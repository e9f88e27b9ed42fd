"""A sweep as a headline, one table, and notes by their codes. What it found is a comparison a row, and a sentence of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from itertools import groupby
from math import inf
from statistics import geometric_mean
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.text import Text

from pensieve.errors import ResultsError, typed
from pensieve.lab.results.frame import (
    CONVERSATION,
    GAP_COLUMNS,
    OURS,
    PAPERS,
    REFERENCE,
    Frame,
    Panel,
    conversation_ends,
    conversation_means,
    found_more,
    paired,
    speed_up,
    values_of,
)
from pensieve.lab.results.notes import NOTE_COLUMNS, QUALIFY, Note, notes
from pensieve.lab.results.schema import Sweep, Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.tokens import TokenComparison, compare_tokens
from pensieve.lab.statistics import Estimate
from pensieve.units import NONE, grid, percent, three_digits

LAST_TTFT = "TTFT at the last turn"
TOKEN_LATENCY = "Latency a token"
RECOMPUTED = "History recomputed"
_PRINTED_ALIKE = 0.005  # of ratios: "1.00×"

Verdict = Literal["lower", "higher", "not told apart"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One quantity of `name` beside that of `other`, in one setting of the sweep.

    found: the other's value over this one's, paired by seed and conversation (unit ×); for RECOMPUTED this one's share of
    the history less the other's (unit points, 0.016 is 1.6 percentage points).
    """

    quantity: str
    at: Mapping[str, str]
    name: str
    other: str
    found: Estimate

    @property
    def in_points(self) -> bool:
        return self.quantity == RECOMPUTED

    @property
    def verdict(self) -> Verdict:
        """Of `name`. Without an interval the value alone decides, unless it would be printed as no difference."""
        ends = [end for end in (self.found.ci_low, self.found.ci_high) if end is not None]
        gains = [-one if self.in_points else one - 1.0 for one in ends or [self.found.value]]
        if not ends and not self.in_points and abs(gains[0]) < _PRINTED_ALIKE:
            return "not told apart"
        return "lower" if min(gains) > 0 else "higher" if max(gains) < 0 else "not told apart"

    @property
    def text(self) -> str:
        """ "4.35× lower than stateless (95 % CI 2.21–5.65)", "not told apart from gpu_only (1.04×, 95 % CI 0.95–1.13)".

        Beside a verdict points have no sign, and a ratio is above 1."""
        told, found = self.verdict != "not told apart", self.found
        ends = [one for one in (found.ci_low, found.ci_high) if one is not None]
        value, *ends = (self._beside_verdict(one) if told else one for one in (found.value, *ends))
        size, interval = self.sized(value), f"n = {found.independent}, no interval"
        if ends:
            between = " to " if self.in_points else "–"
            interval = f"95 % CI {between.join(self.sized(one).rstrip('× points') for one in sorted(ends))}"
        return (
            f"{size} {self.verdict} than {self.other} ({interval})"
            if told
            else f"not told apart from {self.other} ({size}, {interval})"
        )

    def _beside_verdict(self, value: float) -> float:
        return abs(value) if self.in_points else 1 / value if self.verdict == "higher" else value

    def sized(self, value: float) -> str:
        """In the finding's unit: "4.35×", "1.6 points"."""
        if self.in_points:
            return f"{100 * value + 0.0:.1f} points"
        return f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"


def findings(found: Frame, panels: Sequence[Panel]) -> list[Finding]:
    """Everything that a sweep compares. Where Pensieve ran beside others: its TTFT at the last turn. Where others ran without
    it: the latency a token beside the lowest. Where eviction policies were swept: the history that the paper's recomputes.
    Baselines that completed under half of their turns are left out."""
    with_ours = any(OURS in panel.trials and len(panel.trials) > 1 for panel in panels)
    latencies = [one for panel in panels for one in _latencies(found, panel, with_ours)]
    return [*latencies, *_beside_the_papers_policy(found, panels)]


def _latencies(found: Frame, panel: Panel, with_ours: bool) -> Iterator[Finding]:
    quantity, column = (LAST_TTFT, "ttft_ms") if with_ours else (TOKEN_LATENCY, "normalized_latency_ms")
    lost = found.mostly_lost(panel)
    values = {name: values_of(found.turns(trials), column) for name, trials in panel.trials.items() if name not in lost}
    level = {name: _geometric_mean(conversation_means(own).values()) for name, own in values.items()}
    of = OURS if with_ours else min(level, key=lambda name: level[name] or inf, default="")
    for name in sorted(values.keys() - {of}, key=lambda name: (name != REFERENCE, list(values).index(name))):
        if of in values:
            pairs = paired(values[name], values[of])
            ratio = speed_up(conversation_ends(pairs, last=True) if with_ours else pairs)
            if ratio is not None:
                yield Finding(quantity, panel.group, of, name, ratio)


def _beside_the_papers_policy(found: Frame, panels: Sequence[Panel]) -> list[Finding]:
    """Nothing where nobody recomputed anything, or where a baseline served less than was asked."""
    made = []
    for panel in panels:
        baseline = OURS if OURS in panel.trials else next(iter(panel.trials))
        if panel.group.get("eviction") != PAPERS:
            continue
        turns = found.turns(panel.trials[baseline])
        for other in panels:
            if other is panel or {**other.group, "eviction": PAPERS} != panel.group or baseline not in other.trials:
                continue
            more = found_more(found.turns(other.trials[baseline]), turns)
            shares = [found.mean(one.trials[baseline], "miss_rate") for one in (panel, other)]
            if more is not None and any(shares):
                made.append(Finding(RECOMPUTED, panel.group, PAPERS, other.group["eviction"], more))
    return made


def headline(found: Frame, made: Sequence[Finding]) -> str | None:
    """The sweep in one sentence: its first quantity, or over several settings in how many it is lower. Where nothing is
    compared, no more than that it is simulated, and None for a real one."""
    simulated = "Simulated." if found.trials and all(trial.simulated for trial in found.trials) else ""
    if not made:
        return simulated or None
    told = [one for one in made if one.quantity == made[0].quantity]
    settings = {tuple(one.at.items()) for one in told}
    if len(settings) == 1:
        at = "".join(f", {axis}={value}" for axis, value in told[0].at.items() if value != told[0].name)
        each = f"{told[0].name} {', '.join(one.text for one in told)}"
    else:
        at = f" over {len(settings)} settings"
        sides: dict[tuple[str, str], list[Finding]] = {}
        for one in told:
            sides.setdefault((one.name, one.other), []).append(one)
        by_name = groupby(sides.items(), key=lambda side: side[0][0])
        each = "; ".join(f"{name} {', '.join(_over_settings(own) for _, own in its)}" for name, its in by_name)
    return f"{simulated} {told[0].quantity}{at}: {each}.".strip()


def _over_settings(own: Sequence[Finding]) -> str:
    values = [one.found.value for one in own]
    lower = sum(one.verdict == "lower" for one in own)
    return f"lower than {own[0].other} in {lower} of {len(own)} ({own[0].sized(min(values))} to {own[0].sized(max(values))})"


# The table

_OWN = "1"
_BOUND = "bound\n%"


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Outputs compared with the reference baseline's, token for token, over equal seeds and repeats.

    margin: the largest logit margin at the first difference of a session, None where nothing differs or it is unknown.
    exact: float32, where only a tie in rounding may differ. problem: why nothing could be compared.
    """

    reference: str
    turns_compared: int = 0
    turns_differing: int = 0
    margin: float | None = None
    exact: bool = True
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One baseline in one group. cells: by head, of means over its trials.

    ttft_last_ms: of each conversation's own last turn, the geometric mean over seeds, repeats and conversations. The ratio of
    two baselines' last turns is so the quotient of their numbers, where both measured the same conversations.
    beside_ours: its TTFT over Pensieve's at the last turn that both measured, paired by seed and conversation.
    """

    group: Mapping[str, str]
    baseline: str
    ttft_last_ms: float | None
    beside_ours: Estimate | None
    outputs: OutputCheck | None
    cells: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SweepTable:
    """rows: in the order of the sweep's jobs. headline: what was found, in a sentence; None where nothing is compared."""

    sweep: Sweep
    rows: Sequence[SweepRow]
    headline: str | None
    findings: Sequence[Finding]
    notes: Sequence[Note]

    @property
    def answers(self) -> list[str]:
        """The sentences above the table: what was found, and what would make its numbers mislead."""
        above = [note.text for note in self.notes if note.above]
        return [*([self.headline] if self.headline else []), *above]

    @property
    def renderable(self) -> RenderableType:
        """For a rich console of 100 columns or more."""
        parts: list[RenderableType] = [Text(answer) for answer in self.answers]
        if len({row.baseline for row in self.rows}) == 1 and len(self.rows) > 1:
            parts.append(_table({"baseline": self.rows[0].baseline}, self.rows, ", ".join(self.rows[0].group)))
        else:
            for group, rows in groupby(self.rows, key=lambda row: dict(row.group)):
                parts.append(_table(group, list(rows)))
        if not self.rows:
            parts.append(Text("No trial of this sweep is completed."))
        codes = list(dict.fromkeys(note.code for note in self.notes if note.code in QUALIFY))
        told = f"{len(codes)} note{'s' * (len(codes) != 1)}{': ' if codes else ''}{', '.join(codes)}"
        parts.append(Text(f"{told} ({typed('results')} notes {self.sweep.id})"))
        return Group(*parts)

    @property
    def particulars(self) -> RenderableType:
        """All findings and all notes, for `results.py notes`."""
        found = [
            {
                "quantity": one.quantity,
                "setting": ", ".join(f"{axis}={value}" for axis, value in one.at.items()),
                "of": one.name,
                "finding": one.text,
            }
            for one in self.findings
        ]
        told = [{"code": note.code, "text": note.text} for note in self.notes]
        parts: list[RenderableType] = [Text(self.headline)] if self.headline else []
        if found:
            parts.append(grid(found, "Findings", left=found[0], fold=True))
        parts.append(grid(told, "Notes", left=("text",), heads=False, fold=True) if told else Text("No notes."))
        return Group(*parts)

    def text(self, width: int = 110) -> str:
        """Without colour, for a file."""
        written = StringIO()
        Console(file=written, width=width, color_system=None).print(self.renderable)
        return written.getvalue()


def sweep_table(store: ResultsStore, sweep_id: int) -> SweepTable:
    """Compare the baselines of a sweep, by the trials that it shows. Raises ResultsError where there is no such sweep."""
    found = Frame(store, sweep_id, *NOTE_COLUMNS, *GAP_COLUMNS, "latency_ms", "output_tokens")
    panels = found.panels()
    made = findings(found, panels)
    rows = [_row(found, panel, name, made) for panel in panels for name in panel.trials]
    told = [*notes(found, panels), *_notes_on_outputs(rows)]
    return SweepTable(found.sweep, rows, headline(found, made), made, told)


def _row(found: Frame, panel: Panel, baseline: str, made: Sequence[Finding]) -> SweepRow:
    trials = panel.trials[baseline]
    ttft = values_of(found.turns(trials), "ttft_ms").sort_index()
    last_ms = _geometric_mean(ttft.groupby(level=CONVERSATION).last())
    reference = REFERENCE if REFERENCE in panel.trials else next(iter(panel.trials))
    beside = (f.found for f in made if f.quantity == LAST_TTFT and (f.at, f.other) == (panel.group, baseline))
    ratio, mean = next(beside, None), partial(found.mean, trials)
    outputs = _check_outputs(found.store, reference, panel.trials[reference], trials) if baseline != reference else None
    cells = {
        "\nn": str(len(trials)),
        "TTFT ms\np50": three_digits(mean("ttft_ms_p50")),
        "\np99": three_digits(mean("ttft_ms_p99")),
        "last\nturn": three_digits(last_ms),
        "last turn,\n× pensieve (CI)": _OWN if baseline == OURS else _ratio(ratio),
        "ITL ms\np50": three_digits(mean("itl_ms_p50")),
        " \np99": three_digits(mean("itl_ms_p99")),
        "out\ntok/s": three_digits(mean("throughput_output_tok_s")),
        "GPU\nhit %": percent(mean("gpu_hit_rate")),
        "CPU\nhit %": percent(mean("cpu_hit_rate")),
        "disk\nhit %": percent(mean("disk_hit_rate") or None),
        "miss\n%": percent(mean("miss_rate")),
        _BOUND: NONE if baseline == REFERENCE else percent(mean("bound_hit_rate")),
        "\noutputs": _outputs(outputs),
    }
    return SweepRow(panel.group, baseline, last_ms, ratio, outputs, cells)


def _check_outputs(store: ResultsStore, reference: str, theirs: Sequence[Trial], ours: Sequence[Trial]) -> OutputCheck:
    if any(trial.simulated for trial in ours):
        return OutputCheck(reference, problem="simulated")
    by_seed = {(trial.seed, trial.repeat): trial for trial in theirs}
    found: list[TokenComparison] = []
    try:
        for trial in ours:
            pair = filter(None, (by_seed.get((trial.seed, trial.repeat)), trial))
            paths = [artifact.path for one in pair for artifact in store.artifacts_of(one.id, "tokens")]
            found += [compare_tokens(*paths)] if len(paths) == 2 else []
    except ResultsError as error:
        return OutputCheck(reference, problem=str(error))
    compared, differing = (sum(getattr(one, name) for one in found) for name in ("turns_compared", "turns_differing"))
    if compared == 0:
        return OutputCheck(reference, problem="no tokens kept")
    margins = [one.margin for one in found if one.margin is not None]
    margin = max(margins) if len(margins) == len(found) else None
    return OutputCheck(reference, compared, differing, margin, all(t.dtype in (None, "float32") for t in ours))


def _geometric_mean(values: Iterable[float]) -> float | None:
    found = [value for value in values if value > 0]
    return geometric_mean(found) if found else None


def _table(group: Mapping[str, str], rows: Sequence[SweepRow], axes: str = "") -> RenderableType:
    """A row for each baseline; with axes, for each value of these of the one baseline."""
    names = [", ".join(row.group.values()) if axes else row.baseline for row in rows]
    every = zip(names, cells_of(rows, bound=bool(axes)), strict=True)
    lines = [{f"\n{axes or 'baseline'}": name, **cells} for name, cells in every]
    return grid(lines, "  ".join(f"{axis}={value}" for axis, value in group.items()))


def cells_of(rows: Sequence[SweepRow], bound: bool = False) -> list[dict[str, str]]:
    """By head, without columns in which no row has a value. bound: with that of each row."""
    every = [head for head in rows[0].cells if bound or head != _BOUND] if rows else []
    shown = [head for head in every if any(row.cells[head] not in (NONE, _OWN) for row in rows)]
    return [{head: row.cells[head] for head in shown} for row in rows]


def _outputs(check: OutputCheck | None) -> str:
    if check is None or check.problem:
        return NONE
    if check.turns_differing:
        return f"{check.turns_differing:,} differ"
    return "identical" if check.exact else "agree"


def _notes_on_outputs(rows: Sequence[SweepRow]) -> Iterator[Note]:
    """Whether the baselines gave the same tokens."""
    checked = [(row, row.outputs) for row in rows if row.outputs]
    compared = [check for _, check in checked if check.problem is None]
    if compared and not any(check.turns_differing for check in compared):
        exact = ", token for token" if all(check.exact for check in compared) else " (16 bits)"
        turns = sum(check.turns_compared for check in compared)
        yield Note("outputs_agree", (f"{turns:,} of {turns:,} turns compared{exact}",))
    for row, check in checked:
        if check.turns_differing:
            where = ", ".join([row.baseline, *(f"{axis}={value}" for axis, value in row.group.items())])
            margin = "unknown margin" if check.margin is None else f"margin at most {check.margin:.1e}"
            turns_of = f"{check.turns_differing:,} of {check.turns_compared:,} turns"
            code = "outputs_differ" if check.exact else "outputs_differ_16_bits"
            yield Note(code, (f"{check.reference}'s: {where} in {turns_of}, {margin}",))
    problems = {check.problem.rstrip(".") for _, check in checked if check.problem and check.problem != "simulated"}
    if problems:
        yield Note("outputs_not_compared", tuple(sorted(problems)))


def _ratio(found: Estimate | None) -> str:
    if found is None:
        return NONE
    if found.ci_low is None or found.ci_high is None:
        return f"{found.value:.2f}, n = {found.independent}"
    digits = 2 if found.ci_high < 10 else 1
    return f"{found.value:.{digits}f} ({found.ci_low:.{digits}f}–{found.ci_high:.{digits}f})"
