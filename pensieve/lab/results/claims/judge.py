"""Judges every claim by the trials of one sweep (holds, fails, inconclusive, not comparable: from its bounds and a measured
interval), and records the verdicts in table `claim`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from pensieve.errors import MissingSeries
from pensieve.lab.results.claims.claim import Bounds, Claim, Values, unmet
from pensieve.lab.results.claims.measures import MEASURES, Measured, Sides
from pensieve.lab.results.frame import Frame, TrialGroup
from pensieve.lab.results.schema import ClaimRow, Trial
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.trials import mixtures, varying_axes

Verdict = Literal["holds", "fails", "inconclusive", "not comparable"]
VERDICTS: tuple[Verdict, ...] = ("holds", "fails", "inconclusive", "not comparable")


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    why: str


@dataclass(frozen=True, slots=True)
class Judged:
    """One claim in one group of the sweep. name: the claim's, with the group's values where the sweep has several.

    ours, theirs: the baselines compared. measured: also given where conditions differ, but not where the workload does.
    differences: why it is not comparable, a clause each.
    """

    name: str
    claim: Claim
    group: str
    ours: str | None
    theirs: str | None
    measured: Measured | None
    judgement: Judgement
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
        over = _axis(claim, evidence)
        groups = evidence.groups(over)
        judged = [_judged(claim, evidence, group, over, len(groups) > 1) for group in groups]
        comparable = [one for one in judged if one.judgement.verdict != "not comparable"]
        found += comparable or [min(judged, key=lambda one: len(one.differences), default=_without_trials(claim))]
    return found


def record_claims(store: ResultsStore, sweep_id: int, judged: Sequence[Judged]) -> None:
    """Replace the sweep's rows with one for each verdict. trial_ids: of the measurement, else empty."""
    rows = [
        {
            "sweep_id": sweep_id,
            "name": one.name,
            "claimed": one.claim.claimed.bounds().claimed,
            "measured": one.measured.value if one.measured else None,
            "ci_low": one.measured.ci_low if one.measured else None,
            "ci_high": one.measured.ci_high if one.measured else None,
            "n": one.measured.n if one.measured else None,
            "verdict": one.judgement.verdict,
            "trial_ids": list(one.measured.trial_ids) if one.measured else [],
        }
        for one in judged
    ]
    with store.database.writing() as connection:
        connection.execute(delete(ClaimRow).where(ClaimRow.sweep_id == sweep_id))
        if rows:
            connection.execute(insert(ClaimRow), rows)


def recorded_claims(store: ResultsStore, sweep_id: int) -> Sequence[ClaimRow]:
    """The recorded verdicts of the sweep, in order of name."""
    query = select(ClaimRow).where(ClaimRow.sweep_id == sweep_id).order_by(ClaimRow.name)
    with store.database.reading() as connection, Session(connection, expire_on_commit=False) as session:
        rows = session.scalars(query).all()
        session.expunge_all()
    return rows


def _axis(claim: Claim, evidence: Frame) -> str | None:
    """The field of `over` that the sweep varies; its first where none is."""
    varied = varying_axes(evidence.sweep.overrides, evidence.trials)
    return next((axis for axis in claim.over if axis in varied), claim.over[0] if claim.over else None)


def _judged(claim: Claim, evidence: Frame, group: TrialGroup, over: str | None, several: bool) -> Judged:
    group = _of_workload(claim, group)
    ours, theirs = group.first_of(claim.of), group.first_of(claim.against)
    absent = [
        f"no completed trial of {' or '.join(wanted)} in this sweep"
        for wanted, name in ((claim.of, ours), (claim.against, theirs))
        if wanted and name is None
    ]
    sides = Sides(evidence, group.trials[ours] if ours else (), group.trials[theirs] if theirs else (), over)
    trials: Sequence[Trial] = [*sides.ours, *sides.theirs] or [one for own in group.trials.values() for one in own]
    reasons = [
        *absent,
        *unmet(claim.conditions, trials),
        *(f"the sweep holds {one.what}" for one in mixtures(trials)),
    ]
    simulated = any(trial.simulated for trial in trials)
    measured = None
    if not absent and not unmet(_workload_of(claim), trials):
        try:
            measured = MEASURES[claim.measure](sides, **claim.arguments)
        except MissingSeries as error:
            reasons.append(str(error).rstrip("."))
    name = f"{claim.name} ({group.name})" if several and group.name else claim.name
    judgement = judge(claim.claimed.bounds(), measured, reasons, claim.seeds)
    return Judged(name, claim, group.name, ours, theirs, measured, judgement, tuple(reasons), simulated)


def _of_workload(claim: Claim, group: TrialGroup) -> TrialGroup:
    """The group with the trials of the claim's workload alone, if there are any: a benchmark's sweep holds several."""
    wanted = _workload_of(claim)
    asked = {name: [t for t in trials if not unmet(wanted, [t])] for name, trials in group.trials.items()}
    asked = {name: trials for name, trials in asked.items() if trials}
    return TrialGroup(group.at, asked) if asked else group


def _workload_of(claim: Claim) -> Mapping[str, Values]:
    return {field: wanted for field, wanted in claim.conditions.items() if field == "workload"}


def _without_trials(claim: Claim) -> Judged:
    why = "no trial of this sweep is completed"
    judgement = Judgement("not comparable", why)
    return Judged(claim.name, claim, "", None, None, None, judgement, (why,), False)


def judge(bounds: Bounds, measured: Measured | None, differences: Sequence[str], fewest_seeds: int = 1) -> Judgement:
    """A claim holds, or fails, only where the whole interval lies on one side of its bounds.

    differences: the conditions of the claim that the trials do not meet, a clause each; any makes it not comparable.
    """
    if differences:
        return Judgement("not comparable", "; ".join(differences))
    if measured is None or not math.isfinite(measured.value):
        return Judgement("not comparable", "the trials give no value for it")
    if measured.seeds < fewest_seeds:
        return Judgement("inconclusive", f"{_seeds(measured.seeds)}, and {fewest_seeds} are needed")
    low, high = measured.ci_low, measured.ci_high
    if low is None or high is None:
        return Judgement("inconclusive", f"no interval: n = {measured.n} {measured.n_unit}, {_seeds(measured.seeds)}")
    if bounds.contain(low) and bounds.contain(high):
        return Judgement("holds", "the whole interval lies within the claim")
    if bounds.high is not None and low > bounds.high:
        return Judgement("fails", "the whole interval lies above the claim")
    if bounds.low is not None and high < bounds.low:
        return Judgement("fails", "the whole interval lies below the claim")
    return Judgement("inconclusive", "the interval lies across the claim's bound")


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"
