import math
from fractions import Fraction
from statistics import NormalDist, fmean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as distributions

from pensieve.errors import MissingSeries
from pensieve.lab.statistics import (
    NONNEGATIVE,
    PERCENT,
    REAL,
    SHARE,
    Support,
    _clopper_pearson,
    estimate_mean,
    estimate_percentiles,
    estimate_percentiles_by_seed,
    estimate_rate,
    flat,
    nearest_rank,
    paired_ratio,
    rate_by_seed,
)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=60), st.sampled_from([1, 7, 25, 50, 90, 99, 100]))
def test_nearest_rank_is_the_smallest_value_that_enough_values_do_not_exceed(values, percent):
    found = nearest_rank(values, percent / 100)
    share = Fraction(percent, 100)
    assert found in values
    assert Fraction(sum(value <= found for value in values), len(values)) >= share
    assert Fraction(sum(value < found for value in values), len(values)) < share
    assert nearest_rank(range(1, 101), 0.07) == 7.0, "0.07 * 100 is 7.000000000000001"


def test_estimates_are_of_all_values_whatever_group_they_are_in():
    groups = {"a": [1.0, 2.0, 3.0], "b": [10.0], "empty": []}
    mean = estimate_mean(*flat(groups))
    assert (mean.value, mean.n, mean.groups) == (4.0, 4, 2)
    median, top = estimate_percentiles(*flat(groups), [0.5, 1.0])
    assert (median.value, top.value, top.n) == (2.0, 10.0, 4)
    rate = estimate_rate(np.array([1.0, 5.0, 0.0]), np.array([4.0, 8.0, 0.0]))
    assert (rate.value, rate.n, rate.groups) == (0.5, 12, 2)


REPETITIONS = 1000


def clustered_rate(share, likeness, groups):
    """Turns of which a share has a property, 1 to 10 a conversation; likeness: the correlation within one."""

    def draw(rng):
        wholes = rng.integers(1, 11, groups)
        if likeness:
            scale = (1 - likeness) / likeness
            shares = rng.beta(share * scale, (1 - share) * scale, groups)
        else:
            shares = np.full(groups, share)
        parts = rng.binomial(wholes, shares)
        return estimate_rate(parts, wholes)

    return draw, share


def hits(share, seeds, sessions):
    """Tokens of conversations that differ much: most find little where the share is small."""

    def draw(rng):
        wholes = rng.integers(50, 400, (seeds, sessions))
        parts = rng.beta(5 * share, 5 * (1 - share), (seeds, sessions)) * wholes
        pairs = {(s, str(i)): (parts[s, i], float(wholes[s, i])) for s in range(seeds) for i in range(sessions)}
        return rate_by_seed(pairs)

    return draw, share


SHAPES = {
    "normal": (lambda rng, size: rng.normal(10, 2, size), 10.0),
    "exponential": (lambda rng, size: rng.exponential(1, size), 1.0),
    "gamma": (lambda rng, size: rng.gamma(0.5, 1, size), 0.5),
    "lognormal": (lambda rng, size: np.exp(rng.normal(0, 1, size)), math.exp(0.5)),
    "lognormal 1.5": (lambda rng, size: np.exp(rng.normal(0, 1.5, size)), math.exp(1.125)),
    "shares": (lambda rng, size: rng.beta(19, 1, size), 0.95),
}


def mean_of(shape, groups, support):
    make, truth = SHAPES[shape]
    return (lambda rng: estimate_mean(make(rng, groups), np.arange(groups), support)), truth


def pairs(seeds, sessions, seed_sd=0.0, shape="normal"):
    """seed_sd: how much seeds differ, in multiples of what their conversations do. Of one seed the truth is its own."""

    def draw(rng):
        off = rng.normal(0, seed_sd if seeds > 1 else 0.0, seeds)
        each = rng.normal(0, 1, (seeds, sessions)) if shape == "normal" else rng.exponential(1, (seeds, sessions)) - 1
        a = {(s, str(i)): math.exp(off[s] + each[s, i]) for s in range(seeds) for i in range(sessions)}
        return paired_ratio(a, dict.fromkeys(a, 0.5))

    return draw, 2.0


def means(seeds, sessions, seed_sd):
    def draw(rng):
        level = np.exp(rng.normal(-(seed_sd**2) / 2, seed_sd, seeds))
        a = {(s, str(i)): level[s] * rng.exponential(1) for s in range(seeds) for i in range(sessions)}
        return paired_ratio(a, dict.fromkeys(a, 1.0), of="means")

    return draw, 1.0


def percentile(p, groups, values, group_sd):
    """Of skewed values that differ by conversation (group_sd) and within."""

    def draw(rng):
        found = np.exp(rng.normal(0, group_sd, (groups, 1)) + rng.normal(0, 0.4, (groups, values)))
        return estimate_percentiles(found.ravel(), np.repeat(np.arange(groups), values), [p])[0]

    return draw, math.exp(NormalDist().inv_cdf(p) * math.hypot(group_sd, 0.4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "arguments", "level"),
    [
        *(
            (clustered_rate, (share, like, n), 0.95)
            for share in (0.003, 0.01, 0.05)
            for like in (0, 0.3)
            for n in (5, 20, 60)
        ),
        *((clustered_rate, (0.5, like, 20), 0.95) for like in (0, 0.8)),
        *((hits, (share, *shape), 0.95) for share in (0.12, 0.5, 0.88) for shape in ((1, 9), (5, 5))),
        *((mean_of, (shape, n, NONNEGATIVE), 0.95) for shape in list(SHAPES)[:4] for n in (5, 8, 20)),
        *((mean_of, ("shares", n, SHARE), 0.95) for n in (5, 8, 20)),
        *((mean_of, ("normal", n, REAL), 0.95) for n in (5, 20)),
        *((pairs, (*shape, sd), 0.95) for shape in ((1, 5), (5, 5), (15, 5)) for sd in (0.0, 1.0, 3.0)),
        *((means, (5, 5, sd), 0.95) for sd in (0.0, 0.5, 1.0)),
        *((percentile, (0.5, *shape), 0.95) for shape in ((8, 1, 0.5), (8, 10, 0.0), (15, 8, 0.5))),
        *((percentile, (0.9, 40, n, 0.5), 0.95) for n in (1, 10)),
        # Where no method here holds 95 %: the levels that docs/numbers.md states
        *((mean_of, ("lognormal 1.5", n, NONNEGATIVE), level) for n, level in ((5, 0.92), (20, 0.94))),
        *((mean_of, ("exponential", n, REAL), level) for n, level in ((5, 0.88), (20, 0.92))),
        *((pairs, (1, n, 0.0, "exponential"), level) for n, level in ((5, 0.88), (20, 0.92))),
    ],
)
def test_intervals_hold_the_truth_as_often_as_the_page_says(case, arguments, level):
    """But for the error of so many repetitions (1 in 100 by chance). Each of them has an interval: where that hung on the
    values, those that have one would be a choice of the luckiest."""
    draw, truth = case(*arguments)
    held = 0
    for repetition in range(REPETITIONS):
        found = draw(np.random.default_rng(repetition))
        assert found.ci_low is not None
        held += found.ci_low <= truth <= found.ci_high
    assert held / REPETITIONS >= level - NormalDist().inv_cdf(0.99) * math.sqrt(level * (1 - level) / REPETITIONS)


# No time or share is below 1e-100; squares of less than 1e-154 vanish, and an interval with them.
AMOUNTS = st.lists(st.floats(1e-100, 1e9) | st.just(0.0), min_size=5, max_size=30)


@given(AMOUNTS, st.sampled_from([NONNEGATIVE, SHARE, PERCENT]))
def test_no_end_of_an_interval_leaves_what_the_quantity_can_be(values, support):
    most = support.high if math.isfinite(support.high) else 1e9
    found = estimate_mean(np.array(values) / 1e9 * most, np.arange(len(values)), support)
    if found.ci_low is not None:
        assert support.low <= found.ci_low <= found.value <= found.ci_high <= support.high


def test_shares_that_differ_by_rounding_alone_are_alike():
    """Their interval was NaN, more often than not where the share is small."""
    rng = np.random.default_rng(0)
    for share in 10.0 ** rng.uniform(-12, 0, 300):
        values = np.minimum(share * (1 + rng.integers(-2, 3, 8) * 1.1e-16), 1.0)
        found = estimate_mean(values, np.arange(8), SHARE)
        assert (found.ci_low, found.ci_high) == pytest.approx((share, share), rel=1e-6)


def test_too_few_groups_have_no_interval_whatever_their_values():
    """Three seeds of five conversations: where seeds dominate, such an interval held the truth 37 times in 100."""
    rng = np.random.default_rng(1)
    for seeds, sessions in ((1, 4), (2, 20), (3, 5), (4, 50)):
        a = {(s, str(i)): rng.uniform(1, 2) for s in range(seeds) for i in range(sessions)}
        found = [
            paired_ratio(a, dict.fromkeys(a, 1.0)),
            paired_ratio(a, dict.fromkeys(a, 1.0), of="means"),
            *estimate_percentiles_by_seed({key: [value] for key, value in a.items()}, [0.5]),
        ]
        assert [(one.ci_low, one.ci_high) for one in found] == [(None, None)] * len(found)
    four = np.arange(4)
    assert estimate_mean(four.repeat(9) * 1.0, four.repeat(9)).ci_low is None
    assert estimate_rate(np.ones(4), 2.0 + four).ci_low is None


@pytest.mark.parametrize(("p", "fewest"), [(0.5, 8), (0.9, 40), (0.99, 400)])
def test_a_percentile_needs_groups_beyond_it(p, fewest):
    groups = np.arange(fewest).repeat(3)
    assert estimate_percentiles(groups * 1.0, groups, [p])[0].ci_low is not None
    assert [one.ci_low for one in estimate_percentiles(groups[:-3] * 1.0, groups[:-3], [p, 1.0])] == [None, None]


def test_pairing_removes_what_both_have_in_common_and_a_ratio_and_its_inverse_agree():
    rng = np.random.default_rng(3)
    b = {(seed, str(session)): math.exp(rng.normal(0, 2)) for seed in range(5) for session in range(10)}
    half = paired_ratio({key: value * 0.5 for key, value in b.items()}, b)
    assert (half.value, half.ci_low, half.ci_high, half.n, half.groups) == pytest.approx((0.5, 0.5, 0.5, 50, 5))
    a = {key: rng.uniform(1, 9) for key in b}
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert (there.value * back.value, there.ci_low * back.ci_high) == pytest.approx((1.0, 1.0))


def test_keys_that_only_one_has_are_left_out_and_means_may_be_of_zeros():
    a = {(0, "a"): 0.0, (0, "b"): 6.0, (0, "c"): 3.0, (0, "d"): 1.0, (0, "e"): 2.0, (1, "a"): 100.0}
    b = {(0, "a"): 5.0, (0, "b"): 0.0, (0, "c"): 1.0, (0, "d"): 2.0, (0, "e"): 0.0, (2, "z"): 100.0}
    found = paired_ratio(a, b, of="means")
    assert (found.value, found.n, found.groups) == (pytest.approx(1.5), 5, 1)
    assert found.ci_low < 1.5 < found.ci_high
    nothing = paired_ratio(a, dict.fromkeys(a, 0.0), of="means")
    assert (nothing.value, nothing.ci_low) == (math.inf, None)
    with pytest.raises(MissingSeries, match="same seeds"):
        paired_ratio(a, {(9, "a"): 1.0})


def test_percentiles_by_seed_take_turns_of_a_session_together():
    """Sessions that do not differ within give intervals as wide as their number allows, however many turns they have."""
    few = {(seed, f"s{i}"): [float(seed + i)] for seed in range(5) for i in range(4)}
    many = {key: part * 50 for key, part in few.items()}
    [one], [other] = (estimate_percentiles_by_seed(groups, [0.5]) for groups in (few, many))
    assert one.value == other.value
    assert (one.ci_low, one.ci_high) == pytest.approx((other.ci_low, other.ci_high), abs=1.0), "the next value at most"
    assert (one.n, other.n, one.groups) == (20, 1000, 5)
    [alone] = estimate_percentiles_by_seed({(0, "s"): [1.0, 2.0, 3.0]}, [0.5])
    assert (alone.value, alone.ci_low, alone.ci_high) == (2.0, None, None)
    values = {(seed, str(i)): [float(seed + i)] for seed in range(6) for i in range(10)}
    median, upper = estimate_percentiles_by_seed(values, [0.5, 0.75])
    assert median.ci_low is not None, "60 conversations of 6 seeds"
    assert upper.ci_low is None, "a quarter of 6 seeds is none"


def share_by_hand(have, of, trials=math.inf):
    """What the page says of a share, group by group: ends of Jeffreys' interval of as many trials as the groups are worth."""
    groups, p = len(have), sum(have) / sum(of)
    off = sum((part - p * whole) ** 2 for part, whole in zip(have, of, strict=True))
    worth = min(p * (1 - p) * sum(of) ** 2 * (groups - 1) / (off * groups), trials)
    freedom = max(1, min(sum(part > 0 for part in have), sum(p < w for p, w in zip(have, of, strict=True)), groups - 1))
    worth *= (distributions.norm.ppf(0.975) / distributions.t.ppf(0.975, freedom)) ** 2
    rarer = [part if 2 * sum(have) <= sum(of) else whole - part for part, whole in zip(have, of, strict=True)]
    stretch = 1 + (skew_by_hand([part for part in rarer if part > 0]) - 1) * max(0.0, 1 - worth / trials)
    beta = distributions.beta(p * worth / stretch**2 + 0.5, (1 - p) * worth / stretch**2 + 0.5)
    return p, min(beta.ppf(0.025), p), max(beta.ppf(0.975), p)


def skew_by_hand(values):
    if len(values) < 2:
        return 1.0
    variation = stdev(values) / fmean(values)
    return 1 + min(0.75, variation) * min(1.0, math.sqrt(20 / len(values)))


RATES = {
    "clustered": ([9, 0, 1, 0, 0, 8, 0, 3, 0], [10, 20, 10, 10, 15, 10, 10, 30, 10]),
    "nearly all": ([10, 19, 10, 9, 15, 4, 10, 30, 10, 3], [10, 20, 10, 10, 15, 10, 10, 30, 10, 5]),
    "one that has it": ([0, 0, 0, 0, 4, 0], [10, 20, 10, 10, 15, 10]),
    "two, each of one": ([1, 0, 0, 0, 1, 0], [10, 20, 10, 10, 15, 10]),
    "half": ([5, 9, 6, 4, 8, 6], [10, 20, 10, 10, 15, 11]),
    "of many groups": ([i % 7 for i in range(40)], [7 + i % 3 for i in range(40)]),
    "alike, as single trials are not": ([5, 10, 5, 5, 8, 5], [10, 20, 10, 10, 15, 10]),
}


@pytest.mark.parametrize(("have", "of"), RATES.values(), ids=RATES)
def test_the_interval_of_a_share_is_that_of_the_page(have, of):
    found = estimate_rate(np.array(have, float), np.array(of, float))
    assert (found.value, found.ci_low, found.ci_high) == pytest.approx(share_by_hand(have, of, trials=sum(of)))
    percent = estimate_mean(np.repeat(100 * np.array(have) / of, of), np.repeat(np.arange(len(of)), of), PERCENT)
    ends = [100 * end for end in share_by_hand(have, of)]
    assert (percent.value, percent.ci_low, percent.ci_high) == pytest.approx(ends)


@pytest.mark.parametrize(
    "values", [[3.0, 4.0, 9.0, 5.0, 4.5], [1.0] * 30 + [7.0], [100.0, 101.0, 102.0, 103.0, 2239.0]]
)
def test_the_interval_of_a_mean_is_that_of_the_page(values):
    groups = np.array(values), np.arange(len(values))
    reach = distributions.t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    mean, real, times = fmean(values), estimate_mean(*groups, REAL), estimate_mean(*groups, NONNEGATIVE)
    assert (real.ci_low, real.value, real.ci_high) == pytest.approx((mean - reach, mean, mean + reach))
    long = reach * skew_by_hand(values)
    assert (times.ci_low, times.ci_high) == pytest.approx(
        (mean * math.exp(-reach / mean), mean * math.exp(long / mean))
    )
    several = estimate_mean(*(each.repeat(1 + 3 * groups[1]) for each in groups), NONNEGATIVE)
    even = skew_by_hand([1.0 + 3 * number for number in range(len(values))])  # of how many each group has
    assert math.log(several.value / several.ci_low) / math.log(several.ci_high / several.value) == pytest.approx(
        even / skew_by_hand([value * (1 + 3 * number) for number, value in enumerate(values)])
    )
    bounded = estimate_mean(groups[0] - mean, groups[1], Support(-reach / 2, math.inf))
    assert (bounded.ci_low, bounded.ci_high) == pytest.approx((-reach / 2, reach))


@pytest.mark.parametrize("p", [0.3, 0.5, 0.7])
def test_the_interval_of_a_percentile_is_two_of_the_values(p):
    rng = np.random.default_rng(5)
    groups = {str(i): list(np.round(rng.lognormal(sigma=0.6), 1) + rng.integers(0, 3, size=6)) for i in range(40)}
    (found,) = estimate_percentiles(*flat(groups), [p])
    values = sorted(value for group in groups.values() for value in group)
    have = [sum(value <= found.value for value in group) for group in groups.values()]
    share = sum(have) / len(values)
    off = sum((part - share * 6) ** 2 for part in have)
    worth = min(p * (1 - p) * len(values) ** 2 * 39 / (off * 40), len(values))
    freedom = min(sum(part > 0 for part in have), sum(part < 6 for part in have), 39)
    worth *= (distributions.norm.ppf(0.975) / distributions.t.ppf(0.975, freedom)) ** 2
    first = distributions.beta(p * worth, (1 - p) * worth + 1).ppf(0.025)
    last = distributions.beta(p * worth + 1, (1 - p) * worth).ppf(0.975)
    assert (found.ci_low, found.ci_high) == (
        values[max(math.floor(first * len(values)), 1) - 1],
        values[min(math.ceil(last * len(values)), len(values)) - 1],
    )


@pytest.mark.parametrize("hits", [1, 3, 9])
def test_a_shares_interval_is_the_exact_one(hits):
    """Ours takes shares of whole trials and of parts of one; of whole ones scipy has it too."""
    known = distributions.binomtest(hits, 10).proportion_ci(0.95, "exact")
    assert _clopper_pearson(hits / 10, 10) == pytest.approx((known.low, known.high))
