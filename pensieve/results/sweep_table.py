"""The table of a sweep: its baselines side by side, one group for every combination of the other swept axes, and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from sqlalchemy import func, select

from pensieve.errors import ResultsError
from pensieve.request import is_measured
from pensieve.results.caveats import CAVEAT_COLUMNS, caveats, cut_short
from pensieve.results.frame import CONVERSATION, GAP_COLUMNS, START, gap_closed, values_of
from pensieve.results.headline import REFERENCE, advantages, headlines, last_turn_ratio, load_line
from pensieve.results.schema import Sweep, Trial, TurnRow
from pensieve.results.served_by import footer
from pensieve.results.store import JobResult, ResultsStore
from pensieve.results.tokens import TokenComparison, compare_tokens
from pensieve.results.trials import Evidence, TrialGroup, field_of
from pensieve.specs import ROUNDS_APART
from pensieve.statistics import FEWEST_GROUPS, PairedRatio, median
from pensieve.units import NONE, percent, three_digits
from pensieve.window import HALVES_MAY_DIFFER

if TYPE_CHECKING:
    import pandas as pd

_FIFTH = 4  # turns after the first one

_WINDOW_FLAGS = {
    "window": "Throughput is over all measured turns, with start-up and drain, where the load is too small for a window",
    "not_steady": "The window began before three mean conversation durations had passed",
    "late_warmup": "Warm-up turns were still running when the window began",
    "none_in_window": "No turn finished in the window, so there is no throughput",
    "few_turns": "Few turns finished in the window",
    "halves": f"The halves of the window differ by over {HALVES_MAY_DIFFER:.0%} in output tokens",
}
"""Flags of a trial's throughput window, as sentences under the table."""


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
    """One baseline in one group. TTFT: median ms over seeds, repeats and sessions; rates and throughput: mean of trials.

    first, fifth: of the conversation's measured turns; last: each conversation's own last measured turn.
    gap_closed: where eviction policies were compared, see frame.gap_closed.
    last_speedup: stateless's TTFT over this one's at the last turn that both measured, paired by seed and session.
    """

    group: Mapping[str, str]
    baseline: str
    trials: int
    seeds: int
    ttft_first_ms: float | None
    ttft_fifth_ms: float | None
    ttft_last_ms: float | None
    last_speedup: PairedRatio | None
    throughput_output_tok_s: float | None
    gpu_hit_rate: float | None
    cpu_hit_rate: float | None
    disk_hit_rate: float | None
    miss_rate: float | None
    bound_hit_rate: float | None
    gap_closed: PairedRatio | None
    outputs: OutputCheck | None


@dataclass(frozen=True, slots=True)
class SweepTable:
    """rows: in the order of the sweep's jobs. answers: what was found and what qualifies it, sentences that stand above
    the table. notes: sentences under it. advantages: of each group, see headline.advantages."""

    sweep: Sweep
    rows: Sequence[SweepRow]
    answers: Sequence[str]
    notes: Sequence[str]
    advantages: Sequence[tuple[Mapping[str, str], Mapping[str, PairedRatio]]]

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
        return Group(*parts, *(Text(note) for note in (*_notes_on_rows(self.rows), *self.notes)))

    def text(self, width: int = 110) -> str:
        """Without colour, for a file."""
        written = StringIO()
        Console(file=written, width=width, color_system=None).print(self.renderable)
        return written.getvalue()


def sweep_table(store: ResultsStore, sweep_id: int) -> SweepTable:
    """Compare the baselines of a sweep, by the trials that it shows. Raises ResultsError where there is no such sweep."""
    found = Evidence(store, sweep_id, *CAVEAT_COLUMNS, *GAP_COLUMNS)
    groups = found.groups()
    ttfts = [
        {name: values_of(found.turns(trials), "ttft_ms") for name, trials in group.trials.items()} for group in groups
    ]
    rows = [_row(found, group, name, own) for group, own in zip(groups, ttfts, strict=True) for name in group.trials]
    ratios = [advantages(own) for own in ttfts]
    answers = [*cut_short(groups), *headlines(found, ratios), *caveats(found, groups)]
    places = [group.at for group in groups]
    return SweepTable(found.sweep, rows, answers, _notes(found), list(zip(places, ratios, strict=True)))


def _row(found: Evidence, group: TrialGroup, baseline: str, ttfts: Mapping[str, pd.Series[float]]) -> SweepRow:
    trials, ttft = group.trials[baseline], ttfts[baseline].sort_index()
    turns = ttft.index.get_level_values("turn")
    first = min(turns, default=0)
    reference = REFERENCE if REFERENCE in group.trials else next(iter(group.trials))

    return SweepRow(
        group=group.at,
        baseline=baseline,
        trials=len(trials),
        seeds=len({trial.seed for trial in trials}),
        ttft_first_ms=_median(ttft[turns == first]),
        ttft_fifth_ms=_median(ttft[turns == first + _FIFTH]),
        ttft_last_ms=_median(ttft.groupby(level=CONVERSATION).last()),
        last_speedup=last_turn_ratio(ttfts[REFERENCE], ttft) if REFERENCE in ttfts and baseline != REFERENCE else None,
        throughput_output_tok_s=found.mean(trials, "throughput_output_tok_s"),
        gpu_hit_rate=found.mean(trials, "gpu_hit_rate"),
        cpu_hit_rate=found.mean(trials, "cpu_hit_rate"),
        disk_hit_rate=found.mean(trials, "disk_hit_rate"),
        miss_rate=found.mean(trials, "miss_rate"),
        bound_hit_rate=found.mean(trials, "bound_hit_rate"),
        gap_closed=_gap_closed(found, group, baseline),
        outputs=_check_outputs(found.store, reference, group.trials[reference], trials)
        if baseline != reference
        else None,
    )


def _gap_closed(found: Evidence, group: TrialGroup, baseline: str) -> PairedRatio | None:
    """None for START itself, and where its trials are not in the sweep."""
    if group.at.get("eviction", START) == START:
        return None
    at = {**group.at, "eviction": START}
    start = next((other.trials.get(baseline, ()) for other in found.groups() if other.at == at), ())
    bounds = found.by_seed(start, "bound_hit_rate")
    return gap_closed(found.turns(group.trials[baseline]), found.turns(start), bounds) if bounds else None


def _check_outputs(store: ResultsStore, reference: str, theirs: Sequence[Trial], ours: Sequence[Trial]) -> OutputCheck:
    by_seed = {(trial.seed, trial.repeat): trial for trial in theirs}
    if any(trial.simulated for trial in ours):
        return OutputCheck(reference, problem="simulated")
    found: list[TokenComparison] = []
    for trial in ours:
        other = by_seed.get((trial.seed, trial.repeat))
        paths = [store.artifacts_of(one.id, "tokens") for one in (other, trial) if one is not None]
        if other is not None and all(paths):
            try:
                found.append(compare_tokens(paths[0][0].path, paths[1][0].path))
            except ResultsError as error:
                return OutputCheck(reference, problem=str(error))
    compared = sum(part.turns_compared for part in found)
    if compared == 0:
        return OutputCheck(reference, problem="no tokens kept")
    margins = [part.worst.margin for part in found if part.worst]
    known = [margin for margin in margins if margin is not None]
    return OutputCheck(
        reference=reference,
        turns_compared=compared,
        turns_differing=sum(part.turns_differing for part in found),
        margin=max(known, default=None) if len(known) == len(margins) else None,
        exact=all(trial.dtype in (None, "float32") for trial in ours),
    )


def _notes(found: Evidence) -> list[str]:
    trials = found.trials
    notes = []
    simulated = sorted({trial.hardware for trial in trials if trial.simulated})
    if simulated:
        notes.append(f"Simulated on {', '.join(simulated)}: times come from a cost model, not from a device.")
    if any(trial.weights == "random" for trial in trials):
        speed = "" if simulated else ", speed is real"
        notes.append(f"Random weights: text is meaningless{speed}.")
    notes += footer(trials)
    preparing = _preparing_turns(found.store, trials)
    warmup = f"{preparing:,} warm-up turns are left out of all columns." if preparing else None
    notes += [note for note in (load_line(trials), _budgets(trials), warmup) if note]
    notes += _window_notes(trials)
    nothing_evicted = _nothing_evicted(found)
    return [*notes, *([nothing_evicted] if nothing_evicted else []), *_failures(found.sweep, found.jobs)]


def _preparing_turns(store: ResultsStore, trials: Sequence[Trial]) -> int:
    """The number of turns that are not measured: they prepare others."""
    query = select(TurnRow.phase, func.count()).where(TurnRow.trial_id.in_({trial.id for trial in trials}))
    with store.database.reading() as connection:
        phases = connection.execute(query.group_by(TurnRow.phase)).all()
    return sum(count for phase, count in phases if not is_measured(phase))


def _budgets(trials: Sequence[Trial]) -> str | None:
    """The KV budget of each baseline and the working set of the workload, in tokens."""
    parts: dict[str, None] = {}
    for trial in trials:
        if trial.gpu_tokens is not None:
            cpu = f" + CPU {trial.cpu_tokens:,}" if trial.cpu_tokens else ""
            on_disk = int((trial.engine or {}).get("disk_tokens") or 0)
            disk = f" + disk {on_disk:,}" if on_disk else ""
            parts[f"{trial.baseline} GPU {trial.gpu_tokens:,}{cpu}{disk}"] = None
    sets = [trial.working_set_tokens for trial in trials if trial.working_set_tokens is not None]
    working = ""
    if sets:
        least, most = min(sets), max(sets)
        working = f"; working set {least:,}" + (f" to {most:,}" if most > least else "")
    return f"KV budgets in tokens: {', '.join(parts)}{working}." if parts else None


def _window_notes(trials: Sequence[Trial]) -> list[str]:
    """What qualifies the throughput column: a sentence for each flag, with the trials that have it by baseline."""
    notes = []
    totals = Counter(trial.baseline for trial in trials)
    for flag, sentence in _WINDOW_FLAGS.items():
        flagged = Counter(trial.baseline for trial in trials if flag in trial.flags)
        if flagged == totals:
            notes.append(f"{sentence}: all trials.")
        elif flagged:
            each = ", ".join(f"{name} {count} of {totals[name]}" for name, count in flagged.items())
            notes.append(f"{sentence}: {each}.")
    drained = {t.baseline: max(_drain(o) for o in trials if o.baseline == t.baseline) for t in trials if _drain(t) > 0}
    if drained:
        each = ", ".join(f"{name} {share:.0%}" for name, share in drained.items())
        notes.append(f"Output tokens after the window, which throughput leaves out, at most: {each}.")
    return notes


def _drain(trial: Trial) -> float:
    return float(trial.flags.get("drain_share") or 0.0)


def _nothing_evicted(found: Evidence) -> str | None:
    """A sweep without evictions says nothing about how Pensieve evicts."""
    ours = [trial for trial in found.trials if trial.baseline == "pensieve"]
    counts = [found.metric(trial, name) for trial in ours for name in ("evicted_chunks", "dropped_chunks")]
    if not counts or any(count is None or count > 0 for count in counts):
        return None
    pressure, gpu = (field_of(ours[0], name) for name in ("workload.pressure", "cache.gpu"))
    raise_ = (
        f"raise workload.pressure (now {pressure})" if pressure is not None else "add conversations to the workload"
    )
    lower = f"lower cache.gpu (now {gpu})" if gpu is not None else "lower cache.gpu"
    return (
        "Nothing was evicted: every conversation fitted into the GPU tier, so Pensieve's eviction was not put to work. "
        f"To see it, {raise_} or {lower}."
    )


def _failures(sweep: Sweep, jobs: Sequence[JobResult]) -> list[str]:
    notes = []
    for job in jobs:
        if job.last.status != "completed":
            trial = job.last
            why = f": {trial.error}" if trial.error else "."
            notes.append(f"Not completed: {trial.baseline}, seed {trial.seed} (job {job.job}) is {trial.status}{why}")
    missing = sweep.n_expected - len(jobs)
    if missing > 0:
        what = "have not begun yet." if sweep.status == "running" else "were never begun; run the same command again."
        notes.append(f"{missing} of {sweep.n_expected} trials {what}")
    return notes


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _table(group: Mapping[str, str], rows: Sequence[SweepRow], axes: str = "") -> Table:
    """A row for each baseline; with axes, for each value of these of the one baseline."""
    title = "  ".join(f"{axis}={value}" for axis, value in group.items())
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(f"\n{axes or 'baseline'}", no_wrap=True)
    with_ratio = any(row.last_speedup for row in rows)
    names = ["\nn", "TTFT ms\nfirst", "\nfifth", "\nlast"]
    names += [f"{REFERENCE} / this,\nlast turn, geo. mean"] if with_ratio else []
    on_disk = any(row.disk_hit_rate for row in rows)
    names += ["out\ntok/s", "GPU\nhit %", "CPU\nhit %", *(["disk\nhit %"] if on_disk else []), "miss\n%"]
    bounded = bool(axes) and any(row.bound_hit_rate is not None for row in rows)
    names += ["hits\n%", "bound\n%"] if bounded else []
    closed = any(row.gap_closed is not None for row in rows)
    names += [f"{START} to bound,\nclosed %"] if closed else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    checked = any(row.outputs and not row.outputs.problem for row in rows)
    if checked:
        table.add_column("\noutputs", justify="right", no_wrap=True)
    for row in rows:
        cells = [", ".join(row.group.values()) if axes else row.baseline, str(row.trials)]
        cells += [three_digits(ms) for ms in (row.ttft_first_ms, row.ttft_fifth_ms, row.ttft_last_ms)]
        cells += [_ratio(row.last_speedup, row.baseline == REFERENCE)] if with_ratio else []
        cells.append(three_digits(row.throughput_output_tok_s))
        disk = [row.disk_hit_rate] if on_disk else []
        cells += [percent(rate) for rate in (row.gpu_hit_rate, row.cpu_hit_rate, *disk, row.miss_rate)]
        cells += [percent(_hits(row)), percent(row.bound_hit_rate)] if bounded else []
        cells += [_closed(row.gap_closed)] if closed else []
        cells += [_outputs(row.outputs)] if checked else []
        table.add_row(*cells)
    return table


def _hits(row: SweepRow) -> float | None:
    """On all tiers together, which is what the bound bounds."""
    if row.gpu_hit_rate is None or row.cpu_hit_rate is None:
        return None
    return row.gpu_hit_rate + row.cpu_hit_rate + (row.disk_hit_rate or 0.0)


def _closed(share: PairedRatio | None) -> str:
    if share is None:
        return NONE
    if share.ci_low is None or share.ci_high is None:
        return f"{100 * share.ratio:.0f}, n = {share.groups}"
    return f"{100 * share.ratio:.0f} [{100 * share.ci_low:.0f}, {100 * share.ci_high:.0f}]"


def _outputs(check: OutputCheck | None) -> str:
    if check is None or check.problem:
        return NONE
    if check.turns_differing:
        return f"{check.turns_differing:,} differ"
    return "identical" if check.exact else "agree"


def _notes_on_rows(rows: Sequence[SweepRow]) -> list[str]:
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
            f"(near 0: a tie in rounding{'; larger: a fault' if check.exact else ''})."
        )
    if any(not check.exact for _, check in differing):
        notes.append(ROUNDS_APART)
    problems = {check.problem for _, check in checked if check.problem and check.problem != "simulated"}
    notes += [f"Outputs were not compared everywhere: {problem.rstrip('.')}." for problem in sorted(problems)]
    speedups = [row.last_speedup for row in rows if row.last_speedup]
    if speedups:
        notes.append(
            f"{REFERENCE} / this: how many times longer {REFERENCE} takes to the first token, at each conversation's last "
            "turn, paired by seed and conversation: the geometric mean of these ratios, which is not the ratio of the "
            f"medians{_interval_note(speedups)}."
        )
    bounds = {row.baseline: row.bound_hit_rate for row in rows if row.bound_hit_rate is not None}
    if bounds and len(rows) > 1 and len({row.baseline for row in rows}) == 1:
        notes.append("bound: the most that hits could have come to with this capacity, knowing the future.")
        if any(row.gap_closed is not None for row in rows):
            notes.append(
                f"{START} to bound, closed: (hits - {START}'s hits) / (bound - {START}'s hits), paired by seed and "
                "conversation, with the 95 % interval."
            )
    elif bounds and len(rows) == len({row.baseline for row in rows}):  # several groups: it is in the database
        named = ", ".join(f"{baseline} {percent(bound)}" for baseline, bound in bounds.items())
        notes.append(f"Offline bound, the most that hits could have come to with this capacity, in %: {named}.")
    return notes


def _interval_note(ratios: Sequence[PairedRatio]) -> str:
    """What the brackets hold, and what n counts where there is no interval."""
    several = any(ratio.n_seeds > 1 for ratio in ratios)
    over = "" if several else " over the conversations of one seed"
    notes = [f", with the 95 % interval{over}"] if any(ratio.ci_low is not None for ratio in ratios) else []
    if any(ratio.ci_low is None for ratio in ratios):
        unit = "seeds" if several else "conversations of one seed"
        notes.append(f"; n counts {unit}, no interval below {FEWEST_GROUPS}")
    return "".join(notes)


def _ratio(ratio: PairedRatio | None, is_reference: bool) -> str:
    if ratio is None:
        return "1" if is_reference else NONE
    if ratio.ci_low is None or ratio.ci_high is None:
        return f"{ratio.ratio:.2f}, n = {ratio.groups}"
    digits = 2 if ratio.ci_high < 10 else 1
    return f"{ratio.ratio:.{digits}f} [{ratio.ci_low:.{digits}f}, {ratio.ci_high:.{digits}f}]"
