"""The verdict on a claim (holds, fails, inconclusive, not comparable) from its bounds and a measured interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "fails", "inconclusive", "not comparable"]
VERDICTS: tuple[Verdict, ...] = ("holds", "fails", "inconclusive", "not comparable")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values that satisfy a claim: low <= value <= high; an end of None is open.

    claimed: the number itself: the bound of a one-sided claim, the middle of "about x", the lower end of a range.
    shown: as people write it, such as "1.5 to 2.5".
    """

    low: float | None
    high: float | None
    claimed: float
    shown: str

    def __post_init__(self) -> None:
        assert self.low is not None or self.high is not None, "a claim that nothing could contradict"
        assert self.low is None or self.high is None or self.low <= self.high

    def contain(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True)
class Measured:
    """A value from the database. ci_*: its 95 % interval, None where none is due. n counts n_unit, from `seeds` seeds.

    trial_ids: every trial that it was computed from. about: a remark for the reader, such as the turn it belongs to.
    at_least: the value is a lower bound: loads between what was carried and what was refused, or beyond, were not tried.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    n: int
    n_unit: str
    seeds: int
    trial_ids: tuple[int, ...]
    about: str = ""
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    why: str


def judge(
    bounds: Bounds, measured: Measured | None, differences: Sequence[str], fewest_seeds: int = 1, gain: bool = False
) -> Judgement:
    """A claim holds, or fails, only where the whole interval lies on one side of its bounds.

    differences: the conditions of the claim that the trials do not meet, a clause each; any makes it not comparable.
    gain: more than what is claimed is better, and holds.
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
    if measured.at_least and (bounds.high is not None or not bounds.contain(low)):
        return Judgement("inconclusive", "it is at least that: larger loads, or some between, were not tried")
    if bounds.contain(low) and bounds.contain(high):
        return Judgement("holds", "the whole interval lies within the claim")
    if gain and bounds.high is not None and low > bounds.high:
        return Judgement("holds", "better than claimed: the whole interval lies above the claim")
    if gain and bounds.low is not None and low >= bounds.low:
        return Judgement("holds", "as claimed or better: the whole interval lies above the claim's lower bound")
    if bounds.high is not None and low > bounds.high:
        return Judgement("fails", "the whole interval lies above the claim")
    if bounds.low is not None and high < bounds.low:
        return Judgement("fails", "the whole interval lies below the claim")
    return Judgement("inconclusive", "the interval lies across the claim's bound")


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"
