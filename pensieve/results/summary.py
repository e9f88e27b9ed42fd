"""What a sweep says: its baselines side by side, one group for every combination of the other swept axes.

This page computes; results.comparison draws it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sqlalchemy import Row

from pensieve.errors import ResultsError
from pensieve.request import is_measured
from pensieve.results.schema import Sweep, Trial
from pensieve.results.store import JobResult, ResultsStore
from pensieve.results.tokens import TokenComparison, compare_tokens
from pensieve.results.window_notes import window_notes
from pensieve.statistics import PairedRatio, median, paired_ratio

REFERENCE = "stateless"
FIFTH = 4  # turns after the first one
_WITHIN_A_GROUP = ("seed", "repeat", "baseline")
_COLUMNS_AS_GROUPS = ("model", "cache", "eviction", "scheduler", "workload", "hardware")

TtftByTurn = dict[tuple[int, int, str], dict[int, float]]
"""(seed, repeat, session) -> turn -> ms, of measured turns that completed."""


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """Outputs held against another baseline's, token for token, over equal seeds and repeats.

    margin: the largest logit margin at the first difference of a session, None where nothing differs or it is unknown.
    exact: float32, where anything but a tie in rounding would be a fault. problem: why nothing could be compared.
    """

    reference: str
    turns_compared: int = 0
    turns_differing: int = 0
    margin: float | None = None
    exact: bool = True
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One baseline in one group. TTFT: median ms over seeds, repeats and sessions; rates and throughput: mean of trials.

    first, fifth: of the conversation's measured turns; last: each conversation's own last measured turn.
    *_speedup: how many times stateless's TTFT is of this one's, paired by seed and session (2: half the time).
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
    miss_rate: float | None
    bound_hit_rate: float | None
    outputs: OutputCheck | None
    gpu_tokens: int | None
    cpu_tokens: int | None
    working_set_tokens: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """rows: in the order of the sweep's jobs. notes: sentences that belong under the table."""

    sweep: Sweep
    rows: Sequence[ComparisonRow]
    notes: Sequence[str]


def compare(store: ResultsStore, sweep_id: int) -> Comparison:
    """Read a sweep's current trials and set its baselines side by side. Raises ResultsError without such a sweep."""
    sweep = store.sweep(sweep_id)
    jobs = store.trials_of_sweep(sweep_id)
    done = [job for job in jobs if job.trial is not None]
    ttfts = {job.trial.id: _ttft_of(store, job.trial) for job in done if job.trial}
    preparing = sum(left_out for _, left_out in ttfts.values())
    axes = varying_axes(sweep.overrides, [job.trial for job in done if job.trial])
    groups: dict[tuple[str, ...], dict[str, list[JobResult]]] = {}
    for job in done:
        assert job.trial is not None
        key = tuple(axis_value(job.trial, axis) for axis in axes)
        groups.setdefault(key, {}).setdefault(job.trial.baseline, []).append(job)
    rows = []
    for key, by_baseline in groups.items():
        pooled = {name: _pooled(ttfts[j.trial.id][0] for j in part if j.trial) for name, part in by_baseline.items()}
        group = dict(zip(axes, key, strict=True))
        for name, part in by_baseline.items():
            rows.append(_row(store, group, name, part, by_baseline, pooled))
    return Comparison(sweep, rows, _notes(sweep, jobs, preparing))


def _row(
    store: ResultsStore,
    group: Mapping[str, str],
    baseline: str,
    jobs: Sequence[JobResult],
    by_baseline: Mapping[str, Sequence[JobResult]],
    pooled: Mapping[str, TtftByTurn],
) -> ComparisonRow:
    trials = [job.trial for job in jobs if job.trial]
    ttft = pooled[baseline]
    first = min((turn for turns in ttft.values() for turn in turns), default=0)
    reference = REFERENCE if REFERENCE in by_baseline else next(iter(by_baseline))
    stateless = pooled.get(REFERENCE) if baseline != REFERENCE else None
    outputs = _check_outputs(store, reference, by_baseline[reference], jobs) if baseline != reference else None
    return ComparisonRow(
        group=group,
        baseline=baseline,
        trials=len(trials),
        seeds=len({trial.seed for trial in trials}),
        ttft_first_ms=_median(turns[first] for turns in ttft.values() if first in turns),
        ttft_fifth_ms=_median(turns[first + FIFTH] for turns in ttft.values() if first + FIFTH in turns),
        ttft_last_ms=_median(turns[max(turns)] for turns in ttft.values()),
        last_speedup=_speedup(stateless, ttft) if stateless else None,
        throughput_output_tok_s=_mean(jobs, "throughput_output_tok_s"),
        gpu_hit_rate=_mean(jobs, "gpu_hit_rate"),
        cpu_hit_rate=_mean(jobs, "cpu_hit_rate"),
        miss_rate=_mean(jobs, "miss_rate"),
        bound_hit_rate=_mean(jobs, "bound_hit_rate"),
        outputs=outputs,
        gpu_tokens=trials[0].gpu_tokens,
        cpu_tokens=trials[0].cpu_tokens,
        working_set_tokens=max(
            (t.working_set_tokens for t in trials if t.working_set_tokens is not None), default=None
        ),
    )


def _ttft_of(store: ResultsStore, trial: Trial) -> tuple[TtftByTurn, int]:
    """TTFT of the measured turns, and how many turns that prepare others were left out."""
    found: TtftByTurn = defaultdict(dict)
    preparing = 0
    for row in store.turns_of(trial.id, "session", "turn", "phase", "status", "ttft_ms"):
        if not is_measured(row.phase):
            preparing += 1
        elif row.status == "completed" and row.ttft_ms is not None:
            found[trial.seed, trial.repeat, row.session][row.turn] = row.ttft_ms
    return dict(found), preparing


def _pooled(parts: Iterable[TtftByTurn]) -> TtftByTurn:
    return {key: turns for part in parts for key, turns in part.items()}


def _speedup(stateless: TtftByTurn, own: TtftByTurn) -> PairedRatio | None:
    """At the last turn that both measured of a session; repeats of a seed are averaged."""
    a, b = defaultdict(list), defaultdict(list)
    for key in stateless.keys() & own.keys():
        shared = stateless[key].keys() & own[key].keys()
        turn = max(shared, default=None)
        if turn is not None and stateless[key][turn] > 0 and own[key][turn] > 0:
            seed, _, session = key
            a[seed, session].append(stateless[key][turn])
            b[seed, session].append(own[key][turn])
    if not a:
        return None
    return paired_ratio({k: fmean(v) for k, v in a.items()}, {k: fmean(v) for k, v in b.items()})


def _check_outputs(
    store: ResultsStore, reference: str, theirs: Sequence[JobResult], ours: Sequence[JobResult]
) -> OutputCheck:
    by_seed = {(job.trial.seed, job.trial.repeat): job.trial for job in theirs if job.trial}
    pairs = [(by_seed.get((job.trial.seed, job.trial.repeat)), job.trial) for job in ours if job.trial]
    if any(trial.simulated for _, trial in pairs):
        return OutputCheck(reference, problem="simulated")
    found: list[TokenComparison] = []
    for other, trial in pairs:
        if other is None:
            continue
        paths = [store.artifacts_of(t.id, "tokens") for t in (other, trial)]
        if all(paths):
            try:
                found.append(compare_tokens(paths[0][0].path, paths[1][0].path))
            except ResultsError as error:
                return OutputCheck(reference, problem=str(error))
    compared = sum(part.turns_compared for part in found)
    if compared == 0:
        return OutputCheck(reference, problem="no tokens kept")
    worst = [part.worst for part in found if part.worst]
    unknown = any(difference.margin is None for difference in worst)
    return OutputCheck(
        reference=reference,
        turns_compared=compared,
        turns_differing=sum(part.turns_differing for part in found),
        margin=None if unknown else max((d.margin for d in worst if d.margin is not None), default=None),
        exact=all(trial.dtype in (None, "float32") for _, trial in pairs),
    )


def varying_axes(overrides: Mapping[str, Any], trials: Sequence[Trial]) -> list[str]:
    """Of the sweep's overrides, those that took more than one value, outermost first as they were given."""
    keys = [key.lstrip("+") for key in overrides]
    axes = [key for key in keys if key not in _WITHIN_A_GROUP and key.split(".")[0].split("/")[0] != "hydra"]
    return [axis for axis in axes if len({axis_value(trial, axis) for trial in trials}) > 1]


def axis_value(trial: Trial, axis: str) -> str:
    """What a trial's configuration holds at an override's key: a group's option, or a field."""
    if axis in _COLUMNS_AS_GROUPS:
        return str(getattr(trial, axis))
    value: Any = trial.config
    for part in axis.replace("/", ".").split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return str(value.get("name", value)) if isinstance(value, Mapping) else str(value)


def measured_turns(store: ResultsStore, trial_id: int, *columns: str) -> list[Row[Any]]:
    """What counts: measured turns that completed. Rows have the columns as attributes, without
    names all of them."""
    chosen = dict.fromkeys(("phase", "status", *columns)) if columns else ()
    rows = store.turns_of(trial_id, *chosen)
    return [row for row in rows if row.status == "completed" and is_measured(row.phase)]


def _notes(sweep: Sweep, jobs: Sequence[JobResult], preparing: int) -> list[str]:
    trials = [job.trial for job in jobs if job.trial]
    notes = []
    simulated = sorted({trial.hardware for trial in trials if trial.simulated})
    if simulated:
        notes.append(f"Simulated on {', '.join(simulated)}: times come from a cost model, not from a device.")
    if any(trial.weights == "random" for trial in trials):
        speed = "" if simulated else ", speed is real"
        notes.append(f"Random weights: text is meaningless{speed}.")
    contended = sum(trial.contended for trial in trials)
    if contended:
        notes.append(
            f"{contended} trials shared their device with others (trial.exclusive=false): do not compare times."
        )
    budgets = _budgets(trials)
    if budgets:
        notes.append(budgets)
    if preparing:
        notes.append(f"{preparing:,} warm-up turns are left out of all columns.")
    notes += window_notes(trials)
    note = _nothing_evicted(jobs)
    if note:
        notes.append(note)
    return notes + _failures(sweep, jobs)


def _budgets(trials: Sequence[Trial]) -> str | None:
    """What each baseline could hold, in tokens, and what the workload asked for."""
    parts: dict[str, None] = {}
    for trial in trials:
        if trial.gpu_tokens is not None:
            cpu = f" + CPU {trial.cpu_tokens:,}" if trial.cpu_tokens else ""
            parts[f"{trial.baseline} GPU {trial.gpu_tokens:,}{cpu}"] = None
    sets = [trial.working_set_tokens for trial in trials if trial.working_set_tokens is not None]
    working = ""
    if sets:
        least, most = min(sets), max(sets)
        working = f"; working set {least:,}" + (f" to {most:,}" if most > least else "")
    return f"KV budgets in tokens: {', '.join(parts)}{working}." if parts else None


def _nothing_evicted(jobs: Sequence[JobResult]) -> str | None:
    """A sweep without pressure says nothing about how Pensieve evicts; the user should know before trusting it."""
    ours = [job for job in jobs if job.trial and job.trial.baseline == "pensieve"]
    counts = [job.value(name) for job in ours for name in ("evicted_chunks", "dropped_chunks")]
    if not counts or any(count is None or count > 0 for count in counts):
        return None
    trial = ours[0].trial
    assert trial is not None
    pressure = (trial.config.get("workload") or {}).get("pressure")
    gpu = (trial.config.get("cache") or {}).get("gpu")
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
        notes.append(f"{missing} of {sweep.n_expected} trials were never begun; run the same command again.")
    return notes


def _mean(jobs: Sequence[JobResult], name: str) -> float | None:
    values = [value for job in jobs if (value := job.value(name)) is not None]
    return fmean(values) if values else None


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None
