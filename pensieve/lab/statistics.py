"""Percentiles, means and rates with their intervals, and paired ratios.

Turns of one conversation are not independent (they share a history, and a slow turn delays the next), so an interval counts
groups: seeds, where there are several, else the conversations of the one seed. It is due from FEWEST_GROUPS groups on. That
never depends on the values: an interval given only where the seeds agree would be too narrow just then.

The method follows from the values that a quantity can take (Support); no end is outside of them.

- Any real number, and logarithms of paired ratios: Student's t on the sums of the groups.
- Zero and above (times, counts): the same on the logarithm of the mean. Student's t is too short on the side of the long
  tail, so that its reach is multiplied by 1 + the coefficient of variation, at most by 1.75.
- Shares: Jeffreys' interval of as many independent trials as the groups are worth (Korn and Graubard 1998).
- Percentiles: the order statistics at the ends of Clopper's and Pearson's interval of that share (Woodruff 1952). Beyond one
  there must be groups: 40 for p90, 400 for p99, 8 for the median.

tests/test_statistics.py measures how often they hold the truth; docs/numbers.md has what was found.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pensieve.errors import MissingSeries
from pensieve.units import NONE

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
FEWEST_GROUPS = 5
"""Independent groups (seeds, or conversations of one seed) below which nothing has an interval."""
_GROUPS_BEYOND = 4  # that a percentile with an interval has beyond it, on average
_MOST_SKEW = 0.75  # by how much the reach of Student's t is lengthened, at most
_FEW = 20  # groups from which on that falls with the root of their number, as the skewness of their mean does
_TAIL = (1.0 - CONFIDENCE) / 2


@dataclass(frozen=True, slots=True)
class Support:
    """The values that a quantity can take: low <= value <= high. It decides how an interval is made."""

    low: float
    high: float


REAL = Support(-math.inf, math.inf)
NONNEGATIVE = Support(0.0, math.inf)
SHARE = Support(0.0, 1.0)
PERCENT = Support(0.0, 100.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of `n` values in `groups` groups. ci_*: 95 % interval, None where too few groups are independent.

    Of a paired ratio n counts pairs of (seed, session), and groups their seeds.
    """

    value: float
    ci_low: float | None
    ci_high: float | None
    n: int
    groups: int

    @property
    def independent(self) -> int:
        """Of a paired ratio: seeds where there are several, else the conversations of the one."""
        return self.groups if self.groups > 1 else self.n


def nearest_rank(values: Sequence[float] | Floats, p: float) -> float:
    """The smallest value that at least a share `p` (0 < p <= 1) of the values does not exceed: always one of them."""
    assert 0.0 < p <= 1.0
    assert len(values) > 0
    place = rank(p, len(values)) - 1
    return float(np.partition(np.asarray(values, np.float64), place)[place])


def median(values: Sequence[float] | Floats) -> float:
    """The nearest-rank 50th percentile: of an even number of values the lower middle one."""
    return nearest_rank(values, 0.5)


def enough_for(p: float) -> int:
    """Values below which a percentile is flagged: ten of them must lie beyond it."""
    return math.ceil(10.0 / (1.0 - p) - 1e-9)


def has_interval(groups: int) -> bool:
    """Whether a mean, rate or ratio of so many independent groups gets one; a percentile may need more."""
    return groups >= FEWEST_GROUPS


def numbered(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """The groups that values belong to, numbered from 0 as they first occur."""
    first = np.full(groups.max(initial=-1) + 1, len(groups))
    first[groups[::-1]] = np.arange(len(groups))[::-1]
    there = np.flatnonzero(first < len(groups))
    first[there[np.argsort(first[there])]] = np.arange(len(there))
    return first[groups]


def flat(groups: Mapping[Any, Sequence[float]]) -> tuple[Floats, NDArray[np.int64]]:
    """The values of all groups, and the number of each one's group; groups without a value have none."""
    filled = [np.asarray(values, np.float64) for values in groups.values() if len(values)]
    return np.concatenate(filled), np.repeat(np.arange(len(filled)), [len(values) for values in filled])


def sums_of(values: Floats, groups: NDArray[np.int64]) -> Floats:
    """The sum of each group."""
    return np.bincount(groups, values).astype(np.float64)  # of no values it makes whole numbers


def estimate_mean(values: Floats, groups: NDArray[np.int64], support: Support = NONNEGATIVE) -> Estimate:
    """Mean over all values. groups: the conversation, or the seed, of each, numbered from 0."""
    ends = np.cumsum(counts := np.bincount(groups)).tolist()
    ordered = values[np.argsort(groups, kind="stable")].tolist()
    sums = np.array([math.fsum(ordered[start:stop]) for start, stop in pairwise([0, *ends])])
    return Estimate(*_ratio(sums, counts.astype(np.float64), support), len(values), len(sums))


def estimate_rate(parts: Floats, wholes: Floats) -> Estimate:
    """Sum of parts over sum of wholes, one pair a group; n is the sum of wholes."""
    parts, wholes = parts[wholes > 0], wholes[wholes > 0]
    n = float(wholes.sum())
    return Estimate(*_ratio(parts, wholes, SHARE, n), int(n), len(wholes))


def rate_by_seed(groups: Mapping[tuple[int, str], tuple[float, float]]) -> Estimate:
    """The same of a pair for each (seed, session); n counts sessions, groups seeds."""
    kept = {key: pair for key, pair in groups.items() if pair[1] > 0}
    parts, wholes = (_by_seed({key: pair[index] for key, pair in kept.items()}) for index in (0, 1))
    trials = math.fsum(whole for _, whole in kept.values())
    return Estimate(*_ratio(parts, wholes, SHARE, trials), len(kept), len({seed for seed, _ in kept}))


def estimate_percentiles(values: Floats, groups: NDArray[np.int64], ps: Sequence[float]) -> list[Estimate]:
    """Nearest-rank percentiles over all values, one Estimate for each p in (0, 1]. groups: as of estimate_mean."""
    n_groups = int(groups.max()) + 1
    return _percentiles(values, groups, ps, n_groups, n_groups)


def estimate_percentiles_by_seed(
    groups: Mapping[tuple[int, str], Sequence[float]], ps: Sequence[float]
) -> list[Estimate]:
    """Nearest-rank percentiles over all values of each (seed, session), one Estimate for each p in (0, 1]. n counts values,
    groups counts seeds."""
    filled = {key: groups[key] for key in sorted(groups) if len(groups[key])}
    values, sessions = flat(filled)
    seeds = np.unique([seed for seed, _ in filled], return_inverse=True)[1]
    independent = seeds[sessions] if seeds[-1] else sessions
    return _percentiles(values, independent, ps, len(filled), int(seeds[-1]) + 1)


def _percentiles(
    values: Floats, members: NDArray[np.int64], ps: Sequence[float], sessions: int, groups: int
) -> list[Estimate]:
    """members: the group of each value that is independent. sessions, groups: how many there are in all, and how many the
    estimates count."""
    sizes, ranked, n = np.bincount(members), np.sort(values), len(values)
    found = []
    for p in ps:
        value = float(ranked[rank(p, n) - 1])
        low = high = None
        if has_interval(len(sizes)) and _enough_beyond(len(sizes), sessions, p):
            below = np.bincount(members[values <= value], minlength=len(sizes))
            first, last = _clopper_pearson(p, _worth(below, sizes, n, p))
            low = float(ranked[max(math.floor(first * n), 1) - 1])
            high = float(ranked[min(math.ceil(last * n), n) - 1])
        found.append(Estimate(value, low, high, n, groups))
    return found


def paired_ratio(
    a: Mapping[tuple[int, Any], float],
    b: Mapping[tuple[int, Any], float],
    *,
    of: Literal["pairs", "means"] = "pairs",
    support: Support = NONNEGATIVE,
) -> Estimate:
    """a over b, paired by (seed, session); keys that only one of them has are left out.

    of="pairs": geometric mean of the pairs' ratios (all values positive), so that a/b is exactly 1 / (b/a) and one slow
    conversation does not decide. of="means": mean of a over mean of b, for counts that may be zero; support: of that ratio.
    Raises MissingSeries where no pair is left.
    """
    keys = sorted(a.keys() & b.keys())
    if not keys:
        raise MissingSeries("The two baselines share no (seed, session); run them with the same seeds and workload.")
    if of == "pairs":
        assert all(a[key] > 0 and b[key] > 0 for key in keys), "ratios of pairs need positive values"
        tops, bottoms = (
            _by_seed(each) for each in ({key: math.log(a[key] / b[key]) for key in keys}, dict.fromkeys(keys, 1.0))
        )
        value, low, high = (None if end is None else math.exp(end) for end in _ratio(tops, bottoms, REAL))
        assert value is not None
    else:
        tops, bottoms = (_by_seed({key: each[key] for key in keys}) for each in (a, b))
        value, low, high = _ratio(tops, bottoms, support)
    return Estimate(value, low, high, len(keys), len({seed for seed, _ in keys}))


def rank(p: float, n: int) -> int:
    """Of the nearest-rank percentile among n values in order, from 1."""
    # The guard: 0.07 * 100 is a hair above 7. numpy's inverted_cdf has none, and takes the eighth value of 100 there.
    return max(1, math.ceil(p * n - 1e-9))


def _by_seed(values: Mapping[tuple[int, Any], float]) -> Floats:
    """Of each seed the sum; of a single one its values, by session."""
    seeds: dict[int, list[float]] = {}
    for seed, session in sorted(values):
        seeds.setdefault(seed, []).append(values[seed, session])
    return np.array(next(iter(seeds.values())) if len(seeds) == 1 else [math.fsum(own) for own in seeds.values()])


def _enough_beyond(groups: int, sessions: int, p: float) -> bool:
    """Whether a percentile has groups on both sides of it; the median may have conversations of several seeds."""
    return (sessions if p == 0.5 else groups) * min(p, 1.0 - p) >= _GROUPS_BEYOND - 1e-9


def _ratio(
    top: Floats, bottom: Floats, support: Support, trials: float = math.inf
) -> tuple[float, float | None, float | None]:
    """Sum of top over sum of bottom (both by independent group), with its interval where one is due. trials: the most
    independent ones that a share can be of."""
    assert len(top) > 0, "an estimate needs data; the caller reports null without it"
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(top.sum() / bottom.sum())
    if not has_interval(len(top)) or not math.isfinite(value):
        return value, None, None
    if math.isfinite(support.high):
        scale = support.high
        parts = top / scale
        worth = _worth(parts, bottom, trials, value / scale)
        low, high = _jeffreys(value / scale, worth / _skew_of_shares(parts, bottom, 1.0 - worth / trials) ** 2)
        return value, min(low * scale, value), max(high * scale, value)
    groups = len(top)
    error = math.sqrt(float(((top - value * bottom) ** 2).sum()) * groups / (groups - 1)) / abs(float(bottom.sum()))
    reach = _student(groups - 1) * error
    if support.low != 0.0:
        return value, max(value - reach, support.low), value + reach
    if value <= 0.0:  # all are 0, and nothing tells how large one could be
        return value, None, None
    return value, value * math.exp(-_skew(bottom) * reach / value), value * math.exp(_skew(top) * reach / value)


def _skew(values: Floats) -> float:
    """What the reach of Student's t is multiplied with on the side of the long tail. The skewness itself is not told by few
    values; that of times grows with their coefficient of variation, which is."""
    if len(values) < 2:
        return 1.0
    return 1.0 + min(_MOST_SKEW, float(values.std(ddof=1) / values.mean())) * min(1.0, math.sqrt(_FEW / len(values)))


def _skew_of_shares(parts: Floats, wholes: Floats, apart: float) -> float:
    """The same of shares, of what fewer have, over the groups that have it. apart: how much of what the shares differ by is
    of the groups, and not of the single trials, which Jeffreys' interval allows for."""
    rarer = parts if 2 * parts.sum() <= wholes.sum() else wholes - parts
    return 1.0 + (_skew(rarer[rarer > 0]) - 1.0) * max(0.0, apart)


def _worth(parts: Floats | NDArray[np.int64], wholes: Floats | NDArray[np.int64], trials: float, p: float) -> float:
    """How many independent trials the groups are worth of which `parts` of `wholes` have a property, at most `trials`.

    The groups that have it, or lack it, where these are few, are the degrees of freedom: what the others are off tells
    nothing of how the property clusters.
    """
    groups = len(parts)
    if not 0.0 < p < 1.0:
        return groups
    share = parts.sum() / wholes.sum()
    variance = float(((parts - share * wholes) ** 2).sum()) * groups / (groups - 1) / float(wholes.sum()) ** 2
    worth = min(p * (1.0 - p) / variance, trials) if variance > 0.0 else trials
    both = min(int((parts > 0).sum()), int((parts < wholes).sum()))
    freedom = max(1, min(both, groups - 1))
    return worth * (NormalDist().inv_cdf(1.0 - _TAIL) / _student(freedom)) ** 2


def _jeffreys(p: float, trials: float) -> tuple[float, float]:
    # Groups are alike but for rounding, in which the beta distribution has no quantile (scipy's is NaN from 1e16 on).
    if math.isinf(trials) or p * (1.0 - p) * trials > 1e14:
        return p, p
    from scipy.special import betaincinv  # takes longer to import than all that is above

    have, lack = p * trials + 0.5, (1.0 - p) * trials + 0.5
    low, high = (float(betaincinv(have, lack, tail)) for tail in (_TAIL, 1.0 - _TAIL))
    return (low if p > 0.0 else 0.0), (high if p < 1.0 else 1.0)


def _clopper_pearson(p: float, trials: float) -> tuple[float, float]:
    """Of a share strictly between 0 and 1."""
    from scipy.special import betaincinv

    have, lack = p * trials, (1.0 - p) * trials
    return float(betaincinv(have, lack + 1.0, _TAIL)), float(betaincinv(have + 1.0, lack, 1.0 - _TAIL))


@lru_cache(maxsize=64)
def _student(freedom: int) -> float:
    """The quantile of Student's t that bounds a CONFIDENCE interval."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1.0 - _TAIL))


def estimated(found: Estimate | None) -> str:
    """A value, its interval below it; a dash where there is none."""
    if found is None:
        return NONE
    digits = 0 if abs(found.value) >= 99.95 else 1 if abs(found.value) >= 9.995 else 2
    if found.ci_low is None or found.ci_high is None:
        return _text(found.value, digits)
    return f"{_text(found.value, digits)}\n[{_text(found.ci_low, digits)}, {_text(found.ci_high, digits)}]"


def _text(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")  # + 0.0: no negative zero
