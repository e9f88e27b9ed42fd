"""Percentiles, intervals by resampling, and paired ratios.

Turns of one conversation are not independent (they share a history, and a slow turn delays the next), so an interval
resamples whole conversations; across trials it resamples seeds first, then the conversations of each drawn seed.
Percentile intervals of few groups are too narrow; they are widened to what Student's t would ask for that many groups
(the expanded percentile interval of Hesterberg, The American Statistician 69(4), 2015). Nothing makes up for three
seeds that differ more than their conversations do: such a 95 % interval holds the truth nine times in ten. Every
function draws from a generator of its own: equal data gives equal intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pensieve.errors import MissingSeries

Floats = NDArray[np.float64]

RESAMPLES = 2000
CONFIDENCE = 0.95
_BLOCK = 2_000_000  # elements of one resampling matrix: 16 MB
_WORK = 50_000_000  # elements that the percentiles of one series may touch; longer series get fewer resamples
_FEWEST = 200


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of `n` values in `groups` groups. ci_*: None where fewer than two groups leave nothing to draw."""

    value: float
    ci_low: float | None
    ci_high: float | None
    n: int
    groups: int


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How many times a is of b, over `n` pairs of (seed, session) from `n_seeds` seeds."""

    ratio: float
    ci_low: float | None
    ci_high: float | None
    n: int
    n_seeds: int


@dataclass(frozen=True, slots=True)
class Line:
    """The least-squares line through `n` points of `groups` seeds. r_squared: None where all y are equal."""

    slope: Estimate
    intercept: Estimate
    r_squared: float | None
    n: int
    groups: int


def nearest_rank(values: Sequence[float], p: float) -> float:
    """The smallest value that at least a share `p` (0 < p <= 1) of the values does not exceed: always one of them."""
    assert 0.0 < p <= 1.0
    assert len(values) > 0
    return float(sorted(values)[_rank(p, len(values)) - 1])


def enough_for(p: float) -> int:
    """Values below which a percentile is flagged: ten of them must lie beyond it."""
    return math.ceil(10.0 / (1.0 - p) - 1e-9)


def bootstrap_mean(groups: Mapping[str, Sequence[float]], *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Mean over all values, resampling groups (conversations)."""
    filled = [values for values in groups.values() if len(values)]
    sums = np.array([math.fsum(values) for values in filled])
    counts = np.array([len(values) for values in filled], dtype=np.float64)
    return _ratio_of_sums(sums, counts, int(counts.sum()), resamples, seed)


def bootstrap_rate(groups: Mapping[str, tuple[float, float]], *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Sum of numerators over sum of denominators, given as one pair a group; n is the sum of denominators."""
    pairs = np.array([pair for pair in groups.values() if pair[1] > 0], dtype=np.float64).reshape(-1, 2)
    return _ratio_of_sums(pairs[:, 0], pairs[:, 1], int(pairs[:, 1].sum()), resamples, seed)


def bootstrap_percentiles(
    groups: Mapping[str, Sequence[float]], ps: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> list[Estimate]:
    """Nearest-rank percentiles over all values, one Estimate for each p in (0, 1], resampling groups."""
    filled = [np.asarray(values, dtype=np.float64) for values in groups.values() if len(values)]

    def weights(resamples: int) -> Floats:
        return _draws(np.random.default_rng(seed), len(filled), resamples)

    return _percentiles(filled, ps, weights, resamples, groups=len(filled), independent=len(filled))


def bootstrap_percentile_by_seed(
    values: Mapping[tuple[int, str], float], p: float, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Nearest-rank percentile of one value for each (seed, session), resampling seeds first, then sessions."""
    by_seed = _by_seed(values)
    point = nearest_rank(list(values.values()), p)
    if len(values) < 2:
        return Estimate(point, None, None, len(values), len(by_seed))
    replicates = np.empty(resamples)
    step = max(1, _BLOCK // len(values))
    rng = np.random.default_rng(seed)
    flat = np.concatenate(by_seed)
    order = np.argsort(flat, kind="stable")
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        weights = _nested_draws(rng, by_seed, count)[:, order]
        replicates[start : start + count] = _weighted_percentiles(flat[order], weights, [p])[0]
    low, high = _interval(replicates, _independent_groups(by_seed))
    return Estimate(point, low, high, len(values), len(by_seed))


def bootstrap_percentiles_by_seed(
    groups: Mapping[tuple[int, str], Sequence[float]], ps: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> list[Estimate]:
    """Nearest-rank percentiles over all values of each (seed, session), one Estimate for each p in (0, 1], resampling
    seeds first, then sessions. n counts values, groups counts seeds."""
    keys = [key for key in sorted(groups) if len(groups[key])]
    centres = _by_seed({key: float(np.mean(groups[key])) for key in keys})

    def weights(resamples: int) -> Floats:
        return _nested_draws(np.random.default_rng(seed), centres, resamples)

    filled = [np.asarray(groups[key], dtype=np.float64) for key in keys]
    seeds, independent = len({key[0] for key in keys}), _independent_groups(centres)
    return _percentiles(filled, ps, weights, resamples, groups=seeds, independent=independent)


def _percentiles(
    filled: Sequence[Floats],
    ps: Sequence[float],
    weights_of: Callable[[int], Floats],
    resamples: int,
    groups: int,
    independent: float,
) -> list[Estimate]:
    """Over all values of `filled`, whose members are drawn together: weights_of(count) gives [count, members].

    groups: as the estimates say. independent: how many there are to draw from.
    """
    values = np.concatenate(filled)
    member = np.repeat(np.arange(len(filled)), [len(part) for part in filled])
    order = np.argsort(values, kind="stable")
    values, member = values[order], member[order]
    n = len(values)
    points = [float(values[_rank(p, n) - 1]) for p in ps]
    if len(filled) < 2:
        return [Estimate(point, None, None, n, groups) for point in points]
    resamples = max(min(resamples, _FEWEST), min(resamples, _WORK // n))
    weights = weights_of(resamples)
    replicates = np.empty((len(ps), resamples))
    step = max(1, _BLOCK // n)
    for start in range(0, resamples, step):
        replicates[:, start : start + step] = _weighted_percentiles(
            values, weights[start : start + step][:, member], ps
        )
    ends = [_interval(row, independent) for row in replicates]
    return [Estimate(point, low, high, n, groups) for point, (low, high) in zip(points, ends, strict=True)]


def paired_ratio(
    a: Mapping[tuple[int, str], float],
    b: Mapping[tuple[int, str], float],
    *,
    of: Literal["pairs", "means"] = "pairs",
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> PairedRatio:
    """a over b, paired by (seed, session); keys that only one of them has are left out.

    of="pairs": geometric mean of the pairs' ratios (all values positive), so that a/b is exactly 1 / (b/a) and one slow
    conversation does not decide. of="means": mean of a over mean of b, for counts that may be zero.
    Raises MissingSeries where no pair is left.
    """
    keys = sorted(a.keys() & b.keys())
    if not keys:
        raise MissingSeries("The two baselines share no (seed, session); run them with the same seeds and workload.")
    if of == "pairs":
        assert all(a[key] > 0 and b[key] > 0 for key in keys), "ratios of pairs need positive values"
        tops = _by_seed({key: math.log(a[key] / b[key]) for key in keys})
        bottoms = [np.ones(len(part)) for part in tops]
    else:
        tops, bottoms = _by_seed({key: a[key] for key in keys}), _by_seed({key: b[key] for key in keys})
    top, bottom = np.concatenate(tops), np.concatenate(bottoms)

    def finish(value: float) -> float:
        return math.exp(value) if of == "pairs" else value

    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(top.sum() / bottom.sum())
    if len(keys) < 2:
        return PairedRatio(finish(ratio), None, None, len(keys), len(tops))
    rng = np.random.default_rng(seed)
    replicates = np.empty(resamples)
    step = max(1, _BLOCK // len(keys))
    for start in range(0, resamples, step):
        weights = _nested_draws(rng, tops, min(step, resamples - start))
        with np.errstate(divide="ignore", invalid="ignore"):
            replicates[start : start + len(weights)] = (weights @ top) / (weights @ bottom)
    spread = [part - ratio * under for part, under in zip(tops, bottoms, strict=True)] if of == "means" else tops
    low, high = _interval(replicates, _independent_groups(spread))
    return PairedRatio(finish(ratio), finish(low), finish(high), len(keys), len(tops))


def fit_line(
    points: Mapping[tuple[int, str], Sequence[tuple[float, float]]], *, resamples: int = RESAMPLES, seed: int = 0
) -> Line:
    """Least squares through the (x, y) of each (seed, session), resampling seeds first, then sessions.

    Raises MissingSeries where all x are equal: no line is better than another then.
    """
    keys = [key for key in sorted(points) if len(points[key])]
    xs, ys = (np.array([xy[axis] for key in keys for xy in points[key]], dtype=np.float64) for axis in (0, 1))
    if len(np.unique(xs)) < 2:
        raise MissingSeries("A line needs points at two places at least; sweep what stands on its horizontal axis.")
    counts = np.array([len(points[key]) for key in keys])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    middle = float(xs.mean())  # centred: sums of squares of large numbers lose digits
    xs = xs - middle
    sums = np.array([np.add.reduceat(part, starts) for part in (np.ones_like(xs), xs, ys, xs * xs, xs * ys)])

    def line(weights: Floats) -> tuple[Floats, Floats]:
        """Slope and intercept for each row of weights [rows, groups]."""
        n, x, y, xx, xy = (weights @ part for part in sums)
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = (n * xy - x * y) / (n * xx - x * x)
            slope[n * xx - x * x <= 1e-9 * n * float(sums[3].sum())] = np.nan  # a resample at one place says nothing
            return slope, (y - slope * x) / n - slope * middle

    [slope], [intercept] = line(np.ones((1, len(keys))))
    off = ys - slope * xs - (intercept + slope * middle)
    total, left = float(((ys - ys.mean()) ** 2).sum()), float((off**2).sum())
    n, seeds = len(xs), len({key[0] for key in keys})
    ends: list[tuple[float | None, float | None]] = [(None, None), (None, None)]
    if len(keys) > 2:
        tilt = xs * off / float((xs * xs).sum())  # what each point adds to the error of the slope, and of the intercept
        influences = [np.add.reduceat(part, starts) for part in (tilt, off / n - middle * tilt)]
        by_seed = [_by_seed(dict(zip(keys, map(float, part), strict=True))) for part in influences]
        found = line(_nested_draws(np.random.default_rng(seed), by_seed[0], resamples))
        ends = [_interval(row, _independent_groups(part)) for row, part in zip(found, by_seed, strict=True)]
    estimates = [
        Estimate(float(v), low, high, n, seeds) for v, (low, high) in zip((slope, intercept), ends, strict=True)
    ]
    return Line(estimates[0], estimates[1], 1 - left / total if total > 0 else None, n, seeds)


def _rank(p: float, n: int) -> int:
    return max(1, math.ceil(p * n - 1e-9))  # the guard: 0.07 * 100 is a hair above 7


def _by_seed(values: Mapping[tuple[int, str], float]) -> list[Floats]:
    """Values grouped by seed, both levels in sorted order."""
    seeds: dict[int, list[float]] = {}
    for seed, session in sorted(values):
        seeds.setdefault(seed, []).append(values[seed, session])
    return [np.array(part, dtype=np.float64) for part in seeds.values()]


def _draws(rng: np.random.Generator, groups: int, resamples: int) -> Floats:
    """[resamples, groups]: how often each group was drawn, `groups` draws with replacement."""
    return rng.multinomial(groups, np.full(groups, 1.0 / groups), size=resamples).astype(np.float64)


def _nested_draws(rng: np.random.Generator, by_seed: Sequence[Floats], resamples: int) -> Floats:
    """[resamples, values]: weights of the values when seeds are drawn first, then the sessions of each drawn seed.

    A seed drawn twice draws its sessions twice, which in counts is one multinomial of twice as many draws.
    """
    seeds = _draws(rng, len(by_seed), resamples).astype(np.int64)
    parts = [
        rng.multinomial(seeds[:, index] * len(part), np.full(len(part), 1.0 / len(part)))
        for index, part in enumerate(by_seed)
    ]
    return np.concatenate(parts, axis=1).astype(np.float64)


def _weighted_percentiles(ordered: Floats, weights: Floats, ps: Sequence[float]) -> Floats:
    """[ps, resamples]: nearest rank of ascending values, each repeated as often as its weight says."""
    cumulated = np.cumsum(weights, axis=1)
    total = cumulated[:, -1:]
    return np.array([ordered[np.argmax(cumulated >= np.ceil(p * total - 1e-9), axis=1)] for p in ps])


def _ratio_of_sums(tops: Floats, bottoms: Floats, n: int, resamples: int, seed: int) -> Estimate:
    assert len(tops) > 0, "an estimate needs data; the caller reports null without it"
    value = float(tops.sum() / bottoms.sum())
    if len(tops) < 2:
        return Estimate(value, None, None, n, len(tops))
    rng = np.random.default_rng(seed)
    replicates = np.empty(resamples)
    step = max(1, _BLOCK // len(tops))
    for start in range(0, resamples, step):
        weights = _draws(rng, len(tops), min(step, resamples - start))
        replicates[start : start + len(weights)] = (weights @ tops) / (weights @ bottoms)
    low, high = _interval(replicates, len(tops))
    return Estimate(value, low, high, n, len(tops))


def _independent_groups(by_seed: Sequence[Floats]) -> float:
    """How many independent groups the values are worth: all of them where seeds do not matter, the seeds where only
    they do (Satterthwaite's degrees of freedom of the two components of variance, and one)."""
    n, seeds = sum(len(part) for part in by_seed), len(by_seed)
    if seeds < 2 or n == seeds:
        return float(n)
    within = math.fsum(float(((part - part.mean()) ** 2).sum()) for part in by_seed) / (n - seeds) / n
    between = float(np.var([part.mean() for part in by_seed], ddof=1)) / seeds
    seed_share = max(0.0, between - within)
    if seed_share + within == 0.0:
        return float(n)
    return 1.0 + (seed_share + within) ** 2 / (seed_share**2 / (seeds - 1) + within**2 / (n - seeds))


def _interval(replicates: Floats, groups: float) -> tuple[float, float]:
    """Ends of the expanded percentile interval for a statistic of `groups` independent groups."""
    tail = NormalDist().cdf(-math.sqrt(groups / (groups - 1)) * _student_t(groups - 1))
    replicates = replicates[~np.isnan(replicates)]  # zero over zero: a resample that says nothing
    low, high = np.quantile(replicates, [tail, 1.0 - tail], method="nearest")  # between a number and infinity lies none
    return float(low), float(high)


def _student_t(freedom: float) -> float:
    """Upper 97.5 % point of Student's t by its Cornish-Fisher expansion: within 0.2 % from 3 degrees of freedom on."""
    z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))
