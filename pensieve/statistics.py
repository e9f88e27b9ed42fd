"""Percentiles, intervals by resampling, and paired ratios.

Turns of one conversation are not independent (they share a history, and a slow turn delays the next), so an interval
resamples whole conversations; across trials it resamples seeds first, then the conversations of each drawn seed.

An interval is due from FEWEST_GROUPS independent groups on: seeds, where there are several, else conversations. Whether it
is due never depends on the values: an interval given only where the seeds happen to agree would be too narrow just then.

- Means, rates and ratios: the wider of Student's t and the studentized bootstrap (Efron and Tibshirani 1993, chapter 12),
  which follows skewed values where t alone holds the truth 82 times in 100.
- Percentiles and lines: the percentile interval, expanded to what Student's t asks for that many groups (Hesterberg, The
  American Statistician 69(4), 2015). A percentile needs more groups, since beyond it there must be some to draw: 40 for
  p90, 400 for p99, and 8 for the median, or FEWEST_GROUPS seeds whose conversations are drawn too.

The tests hold the coverage against the 95 %, for five groups and more, skewed values, and seeds that differ more than
their conversations. Every function draws from a generator of its own: equal data gives equal intervals.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pensieve.errors import MissingSeries
from pensieve.request import TokenArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int32] | NDArray[np.int16]

RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST_GROUPS = 5
"""Independent groups (seeds, or conversations of one seed) below which nothing has an interval."""
_GROUPS_BEYOND = 4  # that a percentile with an interval has beyond it, on average
_BLOCK = 2_000_000  # elements of one resampling matrix: 16 MB
_KEPT = 32_000_000  # elements of draws that are kept for other series of as many conversations: 64 MB
_WORK = 50_000_000  # elements that the percentiles of one series may touch; longer series get fewer resamples
_FEWEST = 200
_AT_ONCE = 250_000  # values of a series that is not held in memory


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic of `n` values in `groups` groups. ci_*: 95 % interval, None where too few groups are independent."""

    value: float
    ci_low: float | None
    ci_high: float | None
    n: int
    groups: int


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How many times a is of b, over `n` pairs of (seed, session) from `n_seeds` seeds. ci_*: as an Estimate has."""

    ratio: float
    ci_low: float | None
    ci_high: float | None
    n: int
    n_seeds: int

    @property
    def groups(self) -> int:
        """Number of independent groups: seeds where there are several, else the conversations of the one."""
        return self.n_seeds if self.n_seeds > 1 else self.n


@dataclass(frozen=True, slots=True)
class Line:
    """The least-squares line through `n` points of `groups` seeds. r_squared: None where all y are equal."""

    slope: Estimate
    intercept: Estimate
    r_squared: float | None
    n: int
    groups: int


def nearest_rank(values: Sequence[float] | Floats, p: float) -> float:
    """The smallest value that at least a share `p` (0 < p <= 1) of the values does not exceed: always one of them."""
    assert 0.0 < p <= 1.0
    assert len(values) > 0
    return float(sorted(values)[_rank(p, len(values)) - 1])


def median(values: Sequence[float] | Floats) -> float:
    """The nearest-rank 50th percentile: of an even number of values the lower middle one."""
    return nearest_rank(values, 0.5)


def enough_for(p: float) -> int:
    """Values below which a percentile is flagged: ten of them must lie beyond it."""
    return math.ceil(10.0 / (1.0 - p) - 1e-9)


def spread(
    values: Callable[[], Iterable[Sequence[float]]], ps: Sequence[float]
) -> tuple[float | None, list[float | None], int]:
    """Mean, nearest-rank percentiles and number of values at least 0 that are too many for memory: exact, in a pass over them
    for each two bytes of a float. values: to go through them, a part at a time.

    The bits of a float that is not negative, read as an integer, are in the order of floats: so the value of a rank is found
    from its first two bytes on, as the one whose predecessors are counted.
    """
    begins = [0] * len(ps)  # of the value wanted, as far as its bytes are known
    below, n, sums = [0] * len(ps), 0, array("d")
    for shift in (48, 32, 16, 0):
        counts = {begin: np.zeros(1 << 16, dtype=np.int64) for begin in begins}
        for whole in _joined(values()):
            if shift == 48:
                n += len(whole)
                sums.append(math.fsum(whole))
            bits = (whole + 0.0).view(np.uint64)  # -0.0 would be the largest of all
            for begin, count in counts.items():
                own = bits[bits >> np.uint64(shift + 16) == begin] if shift < 48 else bits
                count += np.bincount((own >> np.uint64(shift)) & np.uint64(0xFFFF), minlength=1 << 16)
        if not n:
            return None, [None] * len(ps), 0
        for place, p in enumerate(ps):
            upto = np.cumsum(counts[begins[place]])
            digit = int(np.searchsorted(upto, _rank(p, n) - below[place]))
            below[place] += int(upto[digit - 1]) if digit else 0
            begins[place] = begins[place] << 16 | digit
    return math.fsum(sums) / n, [float(np.uint64(begin).view(np.float64)) for begin in begins], n


def _joined(parts: Iterable[Sequence[float]]) -> Iterator[Floats]:
    """Join small parts into fewer, larger ones."""
    waiting: TokenArray[float] = array("d")
    for part in parts:
        waiting.extend(part)
        if len(waiting) >= _AT_ONCE:
            yield np.frombuffer(waiting)
            waiting = array("d")
    if waiting:
        yield np.frombuffer(waiting)


def has_interval(groups: int) -> bool:
    """Whether a mean, rate, ratio or line of so many independent groups gets one; a percentile may need more."""
    return groups >= FEWEST_GROUPS


def bootstrap_mean(groups: Mapping[str, Sequence[float]], *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Mean over all values, resampling groups (conversations)."""
    filled = [values for values in groups.values() if len(values)]
    sums = np.array([math.fsum(values) for values in filled])
    counts = np.array([len(values) for values in filled], dtype=np.float64)
    value, low, high = _ratio_of_sums([sums], [counts], resamples, seed)
    return Estimate(value, low, high, int(counts.sum()), len(filled))


def bootstrap_rate(groups: Mapping[str, tuple[float, float]], *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Sum of parts over sum of wholes, given as one pair a group; n is the sum of wholes."""
    pairs = np.array([pair for pair in groups.values() if pair[1] > 0], dtype=np.float64).reshape(-1, 2)
    return Estimate(*_share([pairs], resamples, seed), int(pairs[:, 1].sum()), len(pairs))


def rate_by_seed(
    groups: Mapping[tuple[int, str], tuple[float, float]], *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """The same of a pair for each (seed, session), resampling seeds first, then sessions; n counts sessions, groups seeds."""
    pairs: dict[int, list[tuple[float, float]]] = {}
    for key in sorted(groups):
        if groups[key][1] > 0:
            pairs.setdefault(key[0], []).append(groups[key])
    by_seed = [np.array(part, dtype=np.float64) for part in pairs.values()]
    return Estimate(*_share(by_seed, resamples, seed), sum(map(len, by_seed)), len(by_seed))


def _share(pairs: Sequence[Floats], resamples: int, seed: int) -> tuple[float, float | None, float | None]:
    """Parts over wholes, [sessions, 2] of each seed. No end of its interval is below none or above all of it: those of a few
    conversations, of which most have nothing or all, would be."""
    value, low, high = _ratio_of_sums([part[:, 0] for part in pairs], [part[:, 1] for part in pairs], resamples, seed)
    return value, None if low is None else max(low, 0.0), None if high is None else min(high, 1.0)


def bootstrap_percentiles(
    groups: Mapping[str, Sequence[float]], ps: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> list[Estimate]:
    """Nearest-rank percentiles over all values, one Estimate for each p in (0, 1], resampling groups."""
    filled = [np.asarray(values, dtype=np.float64) for values in groups.values() if len(values)]
    return _percentiles([filled], ps, resamples, seed, groups=len(filled))


def bootstrap_percentile_by_seed(
    values: Mapping[tuple[int, str], float], p: float, *, resamples: int = RESAMPLES, seed: int = 0
) -> Estimate:
    """Nearest-rank percentile of one value for each (seed, session), resampling seeds first, then sessions."""
    return bootstrap_percentiles_by_seed({k: [v] for k, v in values.items()}, [p], resamples=resamples, seed=seed)[0]


def bootstrap_percentiles_by_seed(
    groups: Mapping[tuple[int, str], Sequence[float]], ps: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> list[Estimate]:
    """Nearest-rank percentiles over all values of each (seed, session), one Estimate for each p in (0, 1], resampling
    seeds first, then sessions. n counts values, groups counts seeds."""
    seeds: dict[int, list[Floats]] = {}
    for key in sorted(groups):
        if len(groups[key]):
            seeds.setdefault(key[0], []).append(np.asarray(groups[key], dtype=np.float64))
    return _percentiles(list(seeds.values()), ps, resamples, seed, groups=len(seeds))


def _percentiles(
    by_seed: Sequence[Sequence[Floats]], ps: Sequence[float], resamples: int, seed: int, groups: int
) -> list[Estimate]:
    """Percentiles over the values of all sessions, which are drawn together with their session. groups: how many the
    estimates count."""
    sessions = [part for parts in by_seed for part in parts]
    values = np.concatenate(sessions)
    member = np.repeat(np.arange(len(sessions)), [len(part) for part in sessions])
    order = np.argsort(values, kind="stable")
    values, member = values[order], member[order]
    n = len(values)
    centres = [np.array([part.mean() for part in parts]) for parts in by_seed]
    due = [p for p in ps if _percentile_has_interval(centres, p)]
    ends: dict[float, tuple[float, float]] = {}
    if due:
        resamples = max(min(resamples, _FEWEST), min(resamples, _WORK // n))
        weights = _all_draws(centres, resamples, seed)
        replicates = _drawn_percentiles(values, member, weights, due)
        effective = _effective_groups(centres)
        ends = {p: _expanded(row, effective) for p, row in zip(due, replicates, strict=True)}
    found = [(float(values[_rank(p, n) - 1]), *ends.get(p, (None, None))) for p in ps]
    return [Estimate(value, low, high, n, groups) for value, low, high in found]


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
    value, low, high = _ratio_of_sums(tops, bottoms, resamples, seed)
    if of == "pairs":
        value = math.exp(value)
        low, high = None if low is None else math.exp(low), None if high is None else math.exp(high)
    return PairedRatio(value, low, high, len(keys), len(tops))


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
    tilt = xs * off / float((xs * xs).sum())  # what each point adds to the error of the slope, and of the intercept
    influences = [np.add.reduceat(part, starts) for part in (tilt, off / n - middle * tilt)]
    by_seed = [_by_seed(dict(zip(keys, map(float, part), strict=True))) for part in influences]
    if has_interval(_independent(by_seed[0])):
        weights = _all_draws(by_seed[0], resamples, seed)
        found = line(weights.astype(np.float64))
        ends = [_expanded(row, _effective_groups(part)) for row, part in zip(found, by_seed, strict=True)]
    estimates = [
        Estimate(float(v), low, high, n, seeds) for v, (low, high) in zip((slope, intercept), ends, strict=True)
    ]
    return Line(estimates[0], estimates[1], 1 - left / total if total > 0 else None, n, seeds)


def _rank(p: float, n: int) -> int:
    # The guard: 0.07 * 100 is a hair above 7. numpy's inverted_cdf has none, and takes the eighth value of 100 there.
    return max(1, math.ceil(p * n - 1e-9))


def _by_seed(values: Mapping[tuple[int, str], float]) -> list[Floats]:
    """Values grouped by seed, both levels in sorted order."""
    seeds: dict[int, list[float]] = {}
    for seed, session in sorted(values):
        seeds.setdefault(seed, []).append(values[seed, session])
    return [np.array(part, dtype=np.float64) for part in seeds.values()]


def _independent(by_seed: Sequence[Floats]) -> int:
    """Number of independent groups: seeds where there are several, since their conversations share what makes a seed, else
    the conversations of the one."""
    return len(by_seed) if len(by_seed) != 1 else len(by_seed[0])


def _percentile_has_interval(by_seed: Sequence[Floats], p: float) -> bool:
    if p == 0.5 and len(by_seed) > 1:
        return has_interval(len(by_seed))
    return _independent(by_seed) * min(p, 1.0 - p) >= _GROUPS_BEYOND - 1e-9


def _draws(by_seed: Sequence[Floats], resamples: int, seed: int) -> Iterator[Counts]:
    """[some resamples, values] at a time: how often each value is drawn, when seeds are drawn first, then the sessions of
    each drawn seed. They depend on how many values there are and not on the values, so that the many series of a trial, and
    of other trials of as many conversations, share them; nor do they depend on whether they are kept."""
    sizes = tuple(map(len, by_seed))
    if resamples * sum(sizes) <= _KEPT:
        step = _rows_drawn(sizes)
        whole = _kept_draws(sizes, resamples, seed)
        yield from (whole[start : start + step] for start in range(0, resamples, step))
    else:
        yield from _new_draws(sizes, resamples, seed)


def _all_draws(by_seed: Sequence[Floats], resamples: int, seed: int) -> Counts:
    """What `_draws` gives, at once: [resamples, values]."""
    sizes = tuple(map(len, by_seed))
    if resamples * sum(sizes) <= _KEPT:
        return _kept_draws(sizes, resamples, seed)
    return np.concatenate(list(_new_draws(sizes, resamples, seed)))


_kept: OrderedDict[tuple[tuple[int, ...], int, int], Counts] = OrderedDict()
"""The latest draws, at most _KEPT elements of them: a process that runs trial after trial needs the same ones again."""


def _kept_draws(sizes: tuple[int, ...], resamples: int, seed: int) -> Counts:
    key = sizes, resamples, seed
    if key not in _kept:
        drawn = np.empty((resamples, sum(sizes)), dtype=np.int16)  # a value is drawn once on average
        start = 0
        for part in _new_draws(sizes, resamples, seed):
            assert part.max() < 2**15
            drawn[start : start + len(part)] = part
            start += len(part)
        drawn.flags.writeable = False
        _kept[key] = drawn
        while sum(part.size for part in _kept.values()) > _KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]


def _new_draws(sizes: tuple[int, ...], resamples: int, seed: int) -> Iterator[Counts]:
    """A seed drawn twice draws its sessions twice, which in counts is one multinomial of twice as many draws.

    Of several seeds, what is drawn depends on how many resamples are drawn at a time: always as many, whoever asks.
    """
    rng, step = np.random.default_rng(seed), _rows_drawn(sizes)
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        seeds = rng.multinomial(len(sizes), np.full(len(sizes), 1.0 / len(sizes)), size=rows)
        parts = [rng.multinomial(seeds[:, index] * size, np.full(size, 1.0 / size)) for index, size in enumerate(sizes)]
        yield np.concatenate(parts, axis=1).astype(np.int32)


def _rows_drawn(sizes: tuple[int, ...]) -> int:
    """How many resamples are drawn at a time."""
    return max(1, _BLOCK // sum(sizes))


def _drawn_percentiles(ordered: Floats, member: NDArray[np.int64], weights: Counts, ps: Sequence[float]) -> Floats:
    """[ps, resamples]: nearest rank of ascending values, each repeated as often as its session is drawn.

    member: the session of each value. weights: [resamples, sessions]. The values are cut into stretches: how many each
    session has in a stretch says in which one a resample's rank falls, and only that one is counted through.
    """
    n, sessions = len(ordered), weights.shape[1]
    width = math.ceil(n / max(1, min(math.isqrt(n), _BLOCK // sessions)))
    stretches = math.ceil(n / width)
    cells = np.bincount(member * stretches + np.arange(n) // width, minlength=sessions * stretches)
    ends = np.cumsum(weights.astype(np.float64) @ cells.reshape(sessions, stretches).astype(np.float64), axis=1)
    padded = np.append(member, np.full(stretches * width - n, sessions)).reshape(stretches, width)
    replicates = np.empty((len(ps), len(weights)))
    step = max(1, _BLOCK // width)
    for start in range(0, len(weights), step):
        rows = slice(start, start + step)
        drawn = np.pad(weights[rows], ((0, 0), (0, 1)))  # what fills the last stretch up is never drawn
        for index, p in enumerate(ps):
            ranks = np.ceil(p * ends[rows, -1] - 1e-9)[:, None]
            stretch = (ends[rows] < ranks).sum(axis=1)
            before = np.where(stretch > 0, np.take_along_axis(ends[rows], stretch[:, None] - 1, axis=1)[:, 0], 0.0)
            running = before[:, None] + np.cumsum(np.take_along_axis(drawn, padded[stretch], axis=1), axis=1)
            replicates[index, rows] = ordered[stretch * width + (running < ranks).sum(axis=1)]
    return replicates


def _ratio_of_sums(
    tops: Sequence[Floats], bottoms: Sequence[Floats], resamples: int, seed: int
) -> tuple[float, float | None, float | None]:
    """Sum of tops over sum of bottoms (both by seed), with its interval where one is due."""
    top, bottom = np.concatenate(tops), np.concatenate(bottoms)
    assert len(top) > 0, "an estimate needs data; the caller reports null without it"
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(top.sum() / bottom.sum())
    groups = _independent(tops)
    if not has_interval(groups) or not math.isfinite(value):
        return value, None, None
    edges = np.cumsum([0, *(len(part) for part in tops)])
    off = top - value * bottom  # centred, so that the squares of large numbers lose no digits
    moments = np.stack([bottom, off, off * off, off * bottom, bottom * bottom], axis=1)

    def measure(counts: Counts) -> tuple[Floats, Floats]:
        """The ratio, and its standard error from what the independent groups are off it, for each row of weights."""
        weights = counts.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            if len(tops) == 1:  # each value is a group
                lower, away, squared, mixed, wide = (weights @ moments).T
                shift = away / lower
                ratios = value + shift
                # The sum of weights * (off - shift * bottom) ** 2. A rest that rounding alone leaves is none.
                squares = squared - 2 * shift * mixed + shift**2 * wide
                squares[squares < 1e-12 * squared] = 0.0
            else:
                own = [slice(a, b) for a, b in pairwise(edges)]
                upper, below = (np.stack([weights[:, s] @ of[s] for s in own], axis=1) for of in (top, bottom))
                drawn = np.stack([weights[:, s].mean(axis=1) for s in own], axis=1)
                lower = below.sum(axis=1)
                ratios = upper.sum(axis=1) / lower
                squares = np.where(drawn > 0, (upper - ratios[:, None] * below) ** 2 / drawn, 0.0).sum(axis=1)
            return ratios, np.sqrt(squares * groups / (groups - 1)) / np.abs(lower)

    error = float(measure(np.ones((1, len(top)), dtype=np.int32))[1][0])
    found = []
    for weights in _draws(tops, resamples, seed):
        ratios, errors = measure(weights)
        with np.errstate(divide="ignore", invalid="ignore"):
            found.append(np.where(errors > 1e-9 * error, (ratios - value) / errors, np.nan))
    scores = np.concatenate(found)
    scores = scores[np.isfinite(scores)]  # a resample of one group over and over says nothing
    reach = _student(groups)
    below = above = reach
    if len(scores):
        tail = (1.0 - CONFIDENCE) / 2
        below, above = max(reach, nearest_rank(scores, 1.0 - tail)), max(reach, -nearest_rank(scores, tail))
    return value, value - below * error, value + above * error


@lru_cache(maxsize=64)
def _student(groups: float) -> float:
    """The quantile of Student's t that bounds a CONFIDENCE interval over so many groups."""
    from scipy.special import stdtrit  # takes longer to import than all that is above

    return float(stdtrit(groups - 1, 0.5 + CONFIDENCE / 2))


def _effective_groups(by_seed: Sequence[Floats]) -> float:
    """How many groups the values are worth: all of them where seeds do not matter, the seeds where only they do
    (Satterthwaite's degrees of freedom of the two components of variance, and one). For the width of an interval that is
    due, never for whether it is."""
    n, seeds = sum(len(part) for part in by_seed), len(by_seed)
    if seeds < 2 or n == seeds:
        return float(n)
    within = math.fsum(float(((part - part.mean()) ** 2).sum()) for part in by_seed) / (n - seeds) / n
    between = float(np.var([part.mean() for part in by_seed], ddof=1)) / seeds
    seed_share = max(0.0, between - within)
    if seed_share + within == 0.0:
        return float(n)
    return 1.0 + (seed_share + within) ** 2 / (seed_share**2 / (seeds - 1) + within**2 / (n - seeds))


def _expanded(replicates: Floats, groups: float) -> tuple[float, float]:
    """Ends of the expanded percentile interval for a statistic of `groups` groups."""
    reach = math.sqrt(groups / (groups - 1)) * _student(groups)
    tail = NormalDist().cdf(-reach)
    replicates = replicates[~np.isnan(replicates)]  # zero over zero: a resample that says nothing
    return nearest_rank(replicates, tail), nearest_rank(replicates, 1.0 - tail)
