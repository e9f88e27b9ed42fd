"""What a sweep found: a comparison a row, and the one sentence made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, Literal

from pensieve.lab.results.frame import (
    PAPERS,
    Frame,
    TrialGroup,
    conversation_ends,
    found_more,
    paired,
    speed_up,
    values_of,
)
from pensieve.lab.statistics import Estimate

if TYPE_CHECKING:
    import pandas as pd

OURS = "pensieve"
REFERENCE = "stateless"
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
        told, points = self.verdict != "not told apart", self.in_points
        value, *ends = (one for one in (self.found.value, self.found.ci_low, self.found.ci_high) if one is not None)
        if told:
            value, *ends = (1 / one if self.verdict == "higher" and not points else abs(one) for one in (value, *ends))
        value_text, *shown = (f"{100 * one + 0.0:.1f}" if points else _times(one) for one in (value, *sorted(ends)))
        size = f"{value_text}{' points' if points else '×'}"
        interval = f"95 % CI {(' to ' if points else '–').join(shown)}" if shown else ""
        if not told:
            return f"not told apart from {self.other} ({', '.join(filter(None, (size, interval)))})"
        return f"{size} {self.verdict} than {self.other}{f' ({interval})' if interval else ''}"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"


def last_turn_ratio(a: pd.Series[float], b: pd.Series[float]) -> Estimate | None:
    """How many times a is of b, by frame.KEY, at the last turn of each conversation that both measured; see speed_up."""
    return speed_up(conversation_ends(paired(a, b), last=True))


def findings(found: Frame, groups: Sequence[TrialGroup]) -> list[Finding]:
    """Everything that a sweep compares. Where Pensieve ran beside others: its TTFT at the last turn. Where others ran without
    it: the latency a token beside the lowest. Where eviction policies were swept: the history that the paper's recomputes.
    Baselines that completed under half of their turns are left out."""
    with_ours = any(OURS in group.trials and len(group.trials) > 1 for group in groups)
    latencies = [
        one for group in groups for one in (_beside_ours(found, group) if with_ours else _beside_lowest(found, group))
    ]
    return [*latencies, *_beside_the_papers_policy(found, groups)]


def mostly_lost(found: Frame, group: TrialGroup) -> dict[str, tuple[int, int]]:
    """The baselines that completed under half of their turns: how many, of how many. Those few had the machine to
    themselves, so they are compared with nothing."""
    counts = {}
    for name, trials in group.trials.items():
        done = sum(int(found.metric(trial, "turns", "completed") or 0) for trial in trials)
        asked = done + found.incomplete(trials).total()
        if 2 * done < asked:
            counts[name] = (done, asked)
    return counts


def _beside_ours(found: Frame, group: TrialGroup) -> list[Finding]:
    lost = mostly_lost(found, group)
    if OURS not in group.trials or OURS in lost:
        return []
    ours = values_of(found.turns(group.trials[OURS]), "ttft_ms")
    others = sorted((name for name in group.trials if name != OURS), key=lambda name: name != REFERENCE)
    made = []
    for name in others:
        ratio = last_turn_ratio(values_of(found.turns(group.trials[name]), "ttft_ms"), ours)
        if name not in lost and ratio is not None:
            made.append(Finding(LAST_TTFT, group.at, OURS, name, ratio))
    return made


def _beside_lowest(found: Frame, group: TrialGroup) -> list[Finding]:
    lost = mostly_lost(found, group)
    read = Frame(found.store, found.sweep.id, "latency_ms", "output_tokens")
    values = {
        name: values_of(read.turns(trials), "normalized_latency_ms")
        for name, trials in group.trials.items()
        if name not in lost
    }
    values = {name: own for name, own in values.items() if (own > 0).any()}
    if len(values) < 2:
        return []
    first, *others = values
    beside = {name: ratio for name in others if (ratio := speed_up(paired(values[name], values[first]))) is not None}
    lowest = min([first, *beside], key=lambda name: log(beside[name].value) if name in beside else 0.0)
    return [
        Finding(TOKEN_LATENCY, group.at, lowest, name, ratio)
        for name in values
        if name != lowest and (ratio := speed_up(paired(values[name], values[lowest]))) is not None
    ]


def _beside_the_papers_policy(found: Frame, groups: Sequence[TrialGroup]) -> list[Finding]:
    """Nothing where nobody recomputed anything, or where a baseline served less than was asked."""
    made = []
    for group in groups:
        baseline = OURS if OURS in group.trials else next(iter(group.trials))
        if group.at.get("eviction") != PAPERS:
            continue
        turns = found.turns(group.trials[baseline])
        for other in groups:
            if other is group or {**other.at, "eviction": PAPERS} != group.at or baseline not in other.trials:
                continue
            more = found_more(found.turns(other.trials[baseline]), turns)
            shares = [found.mean(one.trials[baseline], "miss_rate") for one in (group, other)]
            if more is not None and any(shares):
                made.append(Finding(RECOMPUTED, group.at, PAPERS, other.at["eviction"], more))
    return made


def headline(found: Frame, made: Sequence[Finding]) -> str | None:
    """The sweep in one sentence; where it compares nothing, or policies in several settings, no more than that it is
    simulated, and None for a real one."""
    simulated = "Simulated. " if found.trials and all(trial.simulated for trial in found.trials) else ""
    nothing = simulated.strip() or None
    if not made:
        return nothing
    first = made[0]
    told = [one for one in made if one.quantity == first.quantity]
    names = Counter({tuple(one.at.items()): one.name for one in told}.values())
    if names.total() > 1 and first.in_points:
        return nothing
    if names.total() == 1:
        at = "".join(f", {axis}={value}" for axis, value in first.at.items() if value != first.name)
        each = f"{first.name} {', '.join(one.text for one in told)}{_without_interval(told)}"
    elif len(names) == 1:
        at = f" over {names.total()} settings"
        others = dict.fromkeys(one.other for one in told)
        own = ([one for one in told if one.other == other] for other in others)
        each = f"{first.name} {'; '.join(map(_over_settings, own))}"
    else:
        at = f" over {names.total()} settings"
        each = ", ".join(f"{name} lowest in {count}" for name, count in names.most_common())
    return f"{simulated}{first.quantity}{at}: {each}."


def _over_settings(own: Sequence[Finding]) -> str:
    sides = Counter(one.verdict for one in own)
    ends = (f(one.found.value for one in own) for f in (min, max))
    span = " to ".join(f"{_times(end)}×" for end in ends)
    if sides["lower"] == len(own):
        return f"{span} lower than {own[0].other}"
    counts = ", ".join(f"{side} in {sides[side]}" for side in ("higher", "not told apart") if sides[side])
    return f"lower than {own[0].other} in {sides['lower']} of {len(own)}, {counts} ({span})"


def _without_interval(made: Sequence[Finding]) -> str:
    if any(one.found.ci_low is not None for one in made):
        return ""
    fewest = min((one.found for one in made), key=lambda found: found.independent)
    return f" ({fewest.independent} {'seeds' if fewest.groups > 1 else 'conversations'}: no CI)"
