"""How long sessions of one kind stay away: a life table that forgets, and what it is worth to wait for them.

Ages are seconds since a session's last turn ended, in bins whose width grows with the age (log time).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

_FIRST_S, _LAST_S, _RATIO = 1.0, 86_400.0, 1.4
AGES = tuple(_FIRST_S * _RATIO**power for power in range(1 + math.ceil(math.log(_LAST_S / _FIRST_S, _RATIO))))
"""Where one bin ends and the next begins; the first begins at 0 and the last has no end."""

BINS = len(AGES) + 1
_WIDTHS = [stop - start for start, stop in zip((0.0, *AGES), (*AGES, AGES[-1] * _RATIO), strict=True)]
_UNSEEN_HAZARDS = [0.25] + [0.1] * (BINS - 1)
"""Before anything was seen: in log time a return is as likely now as later, so the idle longest goes first. The first bin is
wider than the next ones."""
_UNSEEN_STRENGTH = 20.0  # sessions that this counts as
_NEIGHBOURS = (0.5, 0.25)  # what a session counts for in the bins beside, and in those beside them
_STALE_SHARE = 0.02  # of what was seen in all: that much news before rates are computed again
_ALIVE = 1e-300  # the share still away is never 0, so that a bin nobody reached has a rate too


class Habit:
    """Of the sessions of one kind: by age, how many returned in that bin, and how many outstayed it.

    `parent` is a wider kind that holds this one; it stands in for what was not seen here, as `strength` sessions would.
    Counts are in units that grow, so that what is old counts less (Forgetting). Bins are narrow, so that a peak keeps its
    place, and what happens in one says something of its neighbours.
    """

    def __init__(self, parent: Habit | None, strength: float) -> None:
        self.parent, self._strength = parent, strength
        self._widest: Habit = self if parent is None else parent._widest
        self.kinds: dict[Hashable, Habit] = {}
        self._returned, self._outstayed = [0.0] * BINS, [0.0] * BINS
        self._seen = 0.0
        self._rates: list[float] = []
        self._rates_from = 0.0  # what the widest kind had seen then

    def note(self, age_bin: int, returned: bool, unit: float) -> None:
        counts = self._returned if returned else self._outstayed
        counts[age_bin] += unit
        for distance, share in enumerate(_NEIGHBOURS, start=1):
            if age_bin >= distance:
                counts[age_bin - distance] += share * unit
            if age_bin + distance < BINS:
                counts[age_bin + distance] += share * unit
        self._seen += unit

    def hazards(self, unit: float) -> list[float]:
        """By bin: the chance that a session which reached it returns within it."""
        if self.parent is None:
            expected, weight = _UNSEEN_HAZARDS, _UNSEEN_STRENGTH * unit
        else:
            expected, weight = self.parent.hazards(unit), self._strength * unit
        return [
            (returned + weight * hazard) / (returned + outstayed + weight)
            for returned, outstayed, hazard in zip(self._returned, self._outstayed, expected, strict=True)
        ]

    def rate(self, age_bin: int, unit: float) -> float:
        """See rates_of; of a session of this age."""
        seen = self._widest._seen
        if not self._rates or seen > self._rates_from * (1 + _STALE_SHARE):
            self._rates, self._rates_from = rates_of(self.hazards(unit)), seen
        return self._rates[age_bin]

    def rescale(self, factor: float) -> None:
        self._returned = [count * factor for count in self._returned]
        self._outstayed = [count * factor for count in self._outstayed]
        self._seen, self._rates_from = self._seen * factor, self._rates_from * factor
        for habit in self.kinds.values():
            habit.rescale(factor)


def rates_of(hazards: Sequence[float]) -> list[float]:
    """By bin: returns a second of keeping, from there on, with the best time to give up.

    Whoever keeps a session that has reached bin b until the end of bin j, or until it returns, gets
    P(it returns by then) / E(seconds kept); the rate of b is the largest of these over j. It is the index of Gittins
    (1979): where room has one price a second, to keep exactly what has a rate above it is best. With falling hazards j = b; a
    session that is sure to return in an hour is worth keeping before anything happens.

    From the end backwards: a stretch whose rate is below that of the one behind it is best kept on into that one.
    """
    returns, seconds, away = [], [], 1.0
    for hazard, width in zip(hazards, _WIDTHS, strict=True):
        returns.append(away * hazard)
        seconds.append(away * width * (1 - hazard / 2))  # who returns does so halfway, on average
        away = max(away * (1 - hazard), _ALIVE)
    rates = [0.0] * BINS
    stretches: list[tuple[float, float]] = []
    for age_bin in reversed(range(BINS)):
        gained, kept_s = returns[age_bin], seconds[age_bin]
        while stretches and stretches[-1][0] * kept_s > gained * stretches[-1][1]:
            more, longer_s = stretches.pop()
            gained, kept_s = gained + more, kept_s + longer_s
        stretches.append((gained, kept_s))
        rates[age_bin] = gained / kept_s
    return rates


class Forgetting:
    """The unit in which the latest counts are: it doubles every `half_life` sessions."""

    def __init__(self, half_life: float) -> None:
        self.unit = 1.0
        self._growth = 2.0 ** (1.0 / half_life)

    def step(self, root: Habit) -> None:
        self.unit *= self._growth
        if self.unit > 1e100:  # long before numbers end
            root.rescale(1.0 / self.unit)
            self.unit = 1.0
