"""Every claim held against one sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pensieve.errors import MissingSeries
from pensieve.results.claims.claim import Claim
from pensieve.results.claims.conditions import Limits, Values, differences
from pensieve.results.claims.evidence import Evidence, Group
from pensieve.results.claims.measures import MEASURES, Sides
from pensieve.results.claims.verdict import Judgement, Measured, judge
from pensieve.results.mixture import mixtures
from pensieve.results.schema import Trial
from pensieve.results.store import ResultsStore


@dataclass(frozen=True, slots=True)
class Judged:
    """One claim in one group of the sweep. name: the claim's, with the group's values where the sweep has several.

    ours, theirs: the baselines that were taken. measured: also where conditions differ, unless it is the workload that
    does: then the question is another. differences: why it is not comparable, a clause each.
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
    """In the order of the claims. One that no group of the sweep can speak to is said once, of the group that differs least.

    Raises ResultsError without such a sweep.
    """
    evidence = Evidence(store, sweep_id)
    found: list[Judged] = []
    for claim in claims:
        groups = evidence.groups(claim.over)
        judged = [_judged(claim, evidence, group, len(groups) > 1) for group in groups]
        telling = [one for one in judged if one.judgement.verdict != "not comparable"]
        found += telling or [min(judged, key=lambda one: len(one.differences), default=_without_trials(claim))]
    return found


def _judged(claim: Claim, evidence: Evidence, group: Group, several: bool) -> Judged:
    group = _asked(claim, group)
    ours, theirs = group.first_of(claim.of), group.first_of(claim.against)
    absent = [
        f"no completed trial of {' or '.join(wanted)} in this sweep"
        for wanted, name in ((claim.of, ours), (claim.against, theirs))
        if wanted and name is None
    ]
    sides = Sides(evidence, group.trials[ours] if ours else (), group.trials[theirs] if theirs else (), claim.over)
    trials: Sequence[Trial] = [*sides.ours, *sides.theirs] or [one for own in group.trials.values() for one in own]
    reasons = [
        *absent,
        *differences(claim.conditions, trials),
        *(f"the sweep holds {one.what}" for one in mixtures(trials)),
    ]
    simulated = any(trial.simulated for trial in trials)
    if simulated and not claim.simulated:
        reasons.append("times are simulated here, claimed for a real device")
    measured = None
    if not absent and not differences(_workload_of(claim), trials):
        try:
            measured = MEASURES[claim.measure](sides, **claim.arguments)
        except MissingSeries as error:
            reasons.append(str(error).rstrip("."))
    name = f"{claim.name} ({group.name})" if several and group.name else claim.name
    judgement = judge(claim.claimed.bounds(), measured, reasons, claim.seeds)
    return Judged(name, claim, group.name, ours, theirs, measured, judgement, tuple(reasons), simulated)


def _asked(claim: Claim, group: Group) -> Group:
    """The trials whose workload the claim is about, where there are any: a benchmark's sweep holds several."""
    wanted = _workload_of(claim)
    asked = {name: [t for t in trials if not differences(wanted, [t])] for name, trials in group.trials.items()}
    asked = {name: trials for name, trials in asked.items() if trials}
    return Group(group.at, asked) if asked else group


def _workload_of(claim: Claim) -> Mapping[str, Values | Limits]:
    return {field: wanted for field, wanted in claim.conditions.items() if field == "workload"}


def _without_trials(claim: Claim) -> Judged:
    why = "no trial of this sweep is completed"
    judgement = Judgement("not comparable", why)
    return Judged(claim.name, claim, "", None, None, None, judgement, (why,), False)
