"""Published numbers compared with those of a sweep: the entries of a file of claims, what they can ask of the database, and a
verdict for each (holds, fails, inconclusive, not comparable), from its bounds and a measured interval.

Over turns intervals count seeds where there are several, else conversations. Of numbers that a trial has once an interval
comes from seeds alone, and only from enough of them.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from sqlalchemy import delete, insert

from pensieve.errors import ConfigError, MissingSeries
from pensieve.lab.metrics import metric_of
from pensieve.lab.results.frame import (
    Frame,
    Panel,
    axis_value,
    by_round,
    conversation_ends,
    conversation_means,
    field_of,
    mixtures,
    paired,
    positive_ratio,
    speed_up,
    values_of,
    varying_axes,
)
from pensieve.lab.results.schema import ClaimRow, Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.statistics import Estimate, has_interval, paired_ratio
from pensieve.units import number

if TYPE_CHECKING:
    import pandas as pd

# Measures: from rows to a value with its interval

Pairs = dict[tuple[int, int], float]
"""(seed, repeat) -> value."""

Which = int | Literal["first", "last"] | None


@dataclass(frozen=True, slots=True)
class Sides:
    """Trials of one group. theirs: empty where nothing is compared. over: the axis that the trials may differ in."""

    evidence: Frame
    ours: Sequence[Trial]
    theirs: Sequence[Trial] = ()
    over: str | None = None

    def at(self, trial: Trial) -> float:
        """The trial's place on the axis. Raises MissingSeries where it has none."""
        assert self.over is not None, "the claim names no axis"
        if (found := number(axis_value(trial, self.over))) is None:
            raise MissingSeries(f"{self.over} is not set to a number")
        return found

    def values(self, trials: Sequence[Trial], column: str, **where: str | None) -> pd.Series[float]:
        """A column of the trials' turns, of those with this label or phase; indexed by frame.KEY."""
        turns = self.evidence.turns(trials)
        for name, wanted in where.items():
            turns = turns if wanted is None else turns[turns[name] == wanted]
        return values_of(turns, column)


@dataclass(frozen=True, slots=True)
class Measured:
    """What the trials give. found.n counts n_unit, found.groups seeds."""

    found: Estimate
    n_unit: str


def speedup(
    sides: Sides, column: str = "ttft_ms", turn: Which = None, label: str | None = None, phase: str | None = None
) -> Measured:
    """How many times theirs is of ours, over the turns that both have: one ratio a conversation, geometric mean.

    turn: its number in the conversation, or "first" or "last" of those that both have; None: the mean of all of them.
    label, phase: of the turns that count; None: any.
    """
    sought = {"label": label, "phase": phase}
    pairs = paired(*(sides.values(trials, column, **sought) for trials in (sides.theirs, sides.ours)))
    if isinstance(turn, str):
        pairs = conversation_ends(pairs, last=turn == "last")
    elif turn is not None:
        pairs = pairs[pairs.index.get_level_values("turn") == turn]
    of = "" if turn is None else f" at turn {turn}"
    return _measured(speed_up(pairs), "conversations", f"no conversation has {column}{of} in both")


def label_ratio(sides: Sides, label: str, to: str, column: str) -> Measured:
    """Within ours: turns with this label over turns labelled `to`, paired by conversation."""
    a, b = (conversation_means(sides.values(sides.ours, column, label=one)) for one in (label, to))
    lacks = f"no conversation has {column} of turns labelled {label} and {to}"
    return _measured(positive_ratio(a, b), "conversations", lacks)


def axis_ratio(sides: Sides, phase: str, column: str = "ttft_ms") -> Measured:
    """Turns of a phase at the largest value of the axis, over those at its smallest: paired by seed and round."""
    places = [sides.at(trial) for trial in sides.ours]
    last, first = (
        by_round(sides.values([one for one in sides.ours if sides.at(one) == end], column, phase=phase))
        for end in (max(places), min(places))
    )
    found = paired_ratio(last, first, of="means") if max(places) > min(places) and last.keys() & first.keys() else None
    return _measured(found, "rounds", f"no round has {column} in phase {phase} at two values of {sides.over}")


def metric_ratio(sides: Sides, name: str, label: str = "") -> Measured:
    """How many times a metric of ours is of theirs, paired by seed: geometric mean."""
    found = positive_ratio(*(sides.evidence.metrics(trials, name, label) for trials in (sides.ours, sides.theirs)))
    return _measured(found, "trials", f"no seed has {name} of both")


def metric_value(sides: Sides, name: str, label: str = "") -> Measured:
    """A metric of ours: of one trial with the interval that the trial gives it, of several their mean."""
    values = sides.evidence.metrics(sides.ours, name, label)
    if len(values) == 1:
        [own] = [one for trial in sides.ours if (one := sides.evidence.recorded(trial).get((name, label)))]
        [value] = values.values()
        return Measured(Estimate(value, own.ci_low, own.ci_high, own.n or 0, 1), own.n_unit or "turns")
    ones, support = dict.fromkeys(values, 1.0), metric_of(name).support
    mean = paired_ratio(values, ones, of="means", support=support) if values else None
    return _measured(mean, "trials", f"no trial has {name}")


def throughput_at_latency_ratio(
    sides: Sides, limit: float, latency: str = "normalized_latency_ms_p90", throughput: str = "throughput_req_s"
) -> Measured:
    """Requests a second that ours finishes at this latency (ms), over theirs: paired by seed, from a sweep over rates."""
    ours, theirs = (
        rates_at(sides.evidence, [(sides.at(one), one) for one in trials], limit, latency, throughput)
        for trials in (sides.ours, sides.theirs)
    )
    lacks = f"{latency} of no seed crosses {limit:g} ms in both over the rates of this sweep"
    return _measured(positive_ratio(ours, theirs), "trials", lacks)


def _measured(found: Estimate | None, n_unit: str, lacks: str) -> Measured:
    """lacks: why nothing was found, which raises MissingSeries."""
    if found is None:
        raise MissingSeries(lacks)
    due = n_unit != "trials" or has_interval(found.groups)
    return Measured(found if due else replace(found, ci_low=None, ci_high=None), n_unit)


def rates_at(
    evidence: Frame, placed: Iterable[tuple[float, Trial]], limit: float, latency: str, throughput: str
) -> Pairs:
    """Each seed's throughput at which the latency passes the limit for good; a seed whose latency never does, or was never
    within it, is left out. placed: trials by their load. Between the last load at which the latency is within the limit and
    the next one, both are taken as linear."""
    curves: dict[tuple[int, int], list[tuple[float, float, float]]] = defaultdict(list)
    for at, trial in placed:
        x, y = evidence.metric(trial, throughput), evidence.metric(trial, latency)
        if x is not None and y is not None:
            curves[trial.seed, trial.repeat].append((at, x, y))
    found = Pairs()
    for key, curve in sorted(curves.items()):
        for (_, x, y), (_, next_x, next_y) in pairwise(sorted(curve)):
            if y <= limit < next_y:
                found[key] = x + (next_x - x) * (limit - y) / (next_y - y)
    return found


Measure = Callable[..., Measured]
"""(Sides, **arguments) -> Measured. Raises MissingSeries, with what is missing, where the rows cannot give a value."""

MEASURES: Mapping[str, Measure] = {
    one.__name__: one
    for one in (speedup, label_ratio, axis_ratio, metric_ratio, metric_value, throughput_at_latency_ratio)
}


# The entries of a file


class Claimed(BaseModel):
    """The values that satisfy a claim, both ends included; infinite where it is open. published: a number within them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    low: float = -math.inf
    high: float = math.inf
    published: float | None = None

    @property
    def number(self) -> float:
        """What was published: the bound of a one-sided claim, the lower end of a range, or a number within it."""
        ends = (end for end in (self.low, self.high) if math.isfinite(end))
        return next(ends, math.nan) if self.published is None else self.published

    @property
    def shown(self) -> str:
        """As people write it, such as "1.5 to 2.5"."""
        if math.isinf(self.low) or math.isinf(self.high):
            return f"{'>' if math.isinf(self.high) else '<'} {_text(self.number)}"
        between = f"{_text(self.low)} to {_text(self.high)}"
        return between if self.published is None else f"{_text(self.published)} ({between})"


Values = tuple[str | float | bool | None, ...]


class Claim(BaseModel):
    """One entry: all that a verdict needs beside the trials.

    measure, arguments: one of MEASURES. of, against: baselines; the first one that the sweep has
    is taken. over: the swept field that the measure reads along, the first of these that the sweep varies; the sweep's other
    axes make groups, judged one by one.
    conditions: column of table `trial` (or dotted field of its configuration) -> the values that count, patterns such as
    "*A100*" included. seeds: the fewest that decide it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    text: str
    source: str
    measure: str
    arguments: dict[str, Any] = {}
    of: tuple[str, ...]
    against: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    claimed: Claimed
    unit: str
    conditions: dict[str, Values] = {}
    seeds: int = Field(default=3, ge=1)

    @model_validator(mode="after")
    def _can_be_measured(self) -> Claim:
        if self.measure not in MEASURES:
            raise ValueError(f"there is no measure {self.measure}; there are: {', '.join(sorted(MEASURES))}")
        unknown = sorted(set(self.arguments) - set(inspect.signature(MEASURES[self.measure]).parameters) - {"sides"})
        if unknown:
            raise ValueError(f"the measure {self.measure} takes no {', '.join(unknown)}")
        return self


def read_claims(path: Path) -> Sequence[Claim]:
    """The claims of a YAML file, in its order. Raises ConfigError with one sentence about the first thing wrong."""
    try:
        claims = TypeAdapter(list[Claim]).validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"The claims of {path} cannot be read: {' '.join(str(error).split())}.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"Claim {where or 'list'} (from 0 on) of {path.name} cannot be used: {what}.") from None
    names = [one.name for one in claims]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{path.name} has two claims called {twice}; name one of them otherwise.")
    return claims


def unmet(conditions: Mapping[str, Values], trials: Sequence[Trial]) -> list[str]:
    """A clause for each condition that one of the trials does not meet. Fields are columns, or dotted configuration."""
    found = []
    for field, wanted in conditions.items():
        values = [field_of(trial, field) for trial in trials]
        if strange := list(dict.fromkeys(_shown(value) for value in values if not _meets(value, wanted))):
            claimed = " or ".join(_shown(value) for value in wanted)
            found.append(f"{field} is {', '.join(strange)} here, claimed for {claimed}")
    return found


def _meets(value: Any, wanted: Values) -> bool:
    return any(
        fnmatchcase(str(value), one) if isinstance(one, str) else value == one and (value is None) == (one is None)
        for one in wanted
    )


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value) if isinstance(value, bool) or not isinstance(value, int | float) else _text(value)


def _text(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


# Verdicts

Verdict = Literal["holds", "fails", "inconclusive", "not comparable"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Judged:
    """One claim in one group of the sweep. name: the claim's, with the group's values where the sweep has several.

    ours, theirs: the baselines compared. measured: also given where conditions differ, but not where the workload does;
    trial_ids: of every trial that it was computed from. differences: why it is not comparable, a clause each.
    """

    name: str
    claim: Claim
    group: str
    ours: str | None
    theirs: str | None
    measured: Measured | None
    trial_ids: tuple[int, ...]
    verdict: Verdict
    why: str
    differences: tuple[str, ...]
    simulated: bool


def judge_sweep(store: ResultsStore, sweep_id: int, claims: Sequence[Claim]) -> Sequence[Judged]:
    """A verdict for each claim and group of the sweep, in the order of the claims. A claim that is not comparable in any
    group is listed once, for the group with the fewest differences.

    Raises ResultsError without such a sweep.
    """
    evidence = Frame(store, sweep_id)
    found: list[Judged] = []
    for claim in claims:
        varied = varying_axes(evidence.sweep.overrides, evidence.trials)
        over = next((axis for axis in claim.over if axis in varied), claim.over[0] if claim.over else None)
        panels = evidence.panels(*([over] if over else [])) or [Panel({}, ())]
        judged = [_judged(claim, evidence, panel, over, len(panels) > 1) for panel in panels]
        comparable = [one for one in judged if one.verdict != "not comparable"]
        found += comparable or [min(judged, key=lambda one: len(one.differences))]
    return found


def record_claims(store: ResultsStore, sweep_id: int, judged: Sequence[Judged]) -> None:
    """Replace the sweep's rows with one for each verdict. trial_ids: of the measurement, else empty."""
    rows = [
        {
            "sweep_id": sweep_id,
            "name": one.name,
            "claimed": one.claim.claimed.number,
            "verdict": one.verdict,
            **{name: getattr(one.measured and one.measured.found, name, None) for name in ("ci_low", "ci_high", "n")},
            "measured": one.measured.found.value if one.measured else None,
            "trial_ids": list(one.trial_ids),
        }
        for one in judged
    ]
    with store.database.writing() as connection:
        connection.execute(delete(ClaimRow).where(ClaimRow.sweep_id == sweep_id))
        if rows:
            connection.execute(insert(ClaimRow), rows)


def _judged(claim: Claim, evidence: Frame, panel: Panel, over: str | None, several: bool) -> Judged:
    """A benchmark's sweep holds several workloads: the trials of the claim's own are taken, if there are any."""
    workload = {field: wanted for field, wanted in claim.conditions.items() if field == "workload"}
    of_workload = {name: [t for t in trials if not unmet(workload, [t])] for name, trials in panel.trials.items()}
    asked = {name: trials for name, trials in of_workload.items() if trials} or panel.trials
    ours, theirs = (next((name for name in wanted if name in asked), None) for wanted in (claim.of, claim.against))
    absent = [
        f"no completed trial of {' or '.join(wanted)} in this sweep"
        for wanted, name in ((claim.of, ours), (claim.against, theirs))
        if wanted and name is None
    ]
    sides = Sides(evidence, asked[ours] if ours else (), asked[theirs] if theirs else (), over)
    trials: Sequence[Trial] = [*sides.ours, *sides.theirs] or [one for own in asked.values() for one in own]
    reasons = [*absent, *unmet(claim.conditions, trials), *(f"the sweep holds {one.what}" for one in mixtures(trials))]
    measured = None
    if not absent and not unmet(workload, trials):
        try:
            measured = MEASURES[claim.measure](sides, **claim.arguments)
        except MissingSeries as error:
            reasons.append(str(error).rstrip("."))
    name = f"{claim.name} ({panel.text})" if several and panel.text else claim.name
    verdict, why = judge(claim.claimed, measured, reasons, claim.seeds)
    ids = tuple(sorted({trial.id for trial in (*sides.ours, *sides.theirs)})) if measured else ()
    simulated = any(trial.simulated for trial in trials)
    return Judged(name, claim, panel.text, ours, theirs, measured, ids, verdict, why, tuple(reasons), simulated)


def judge(
    claimed: Claimed, measured: Measured | None, differences: Sequence[str], fewest_seeds: int = 1
) -> tuple[Verdict, str]:
    """A claim holds, or fails, only where the whole interval lies on one side of its bounds.

    differences: the conditions of the claim that the trials do not meet, a clause each; any makes it not comparable.
    """
    if differences:
        return "not comparable", "; ".join(differences)
    if measured is None or not math.isfinite(measured.found.value):
        return "not comparable", "the trials give no value for it"
    found, seeds = measured.found, "one seed" if measured.found.groups == 1 else f"{measured.found.groups} seeds"
    if found.groups < fewest_seeds:
        return "inconclusive", f"{seeds}, and {fewest_seeds} are needed"
    if found.ci_low is None or found.ci_high is None:
        return "inconclusive", f"no interval: n = {found.n} {measured.n_unit}, {seeds}"
    if claimed.low <= found.ci_low and found.ci_high <= claimed.high:
        return "holds", "the whole interval lies within the claim"
    if found.ci_low > claimed.high:
        return "fails", "the whole interval lies above the claim"
    if found.ci_high < claimed.low:
        return "fails", "the whole interval lies below the claim"
    return "inconclusive", "the interval lies across the claim's bound"
