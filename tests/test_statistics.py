import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.errors import MissingSeries
from pensieve.statistics import (
    bootstrap_mean,
    bootstrap_percentile_by_seed,
    bootstrap_percentiles,
    bootstrap_percentiles_by_seed,
    bootstrap_rate,
    enough_for,
    fit_line,
    nearest_rank,
    paired_ratio,
)


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=60), st.sampled_from([1, 7, 25, 50, 90, 99, 100]))
def test_nearest_rank_is_the_smallest_value_that_enough_values_do_not_exceed(values, percent):
    found = nearest_rank(values, percent / 100)
    share = Fraction(percent, 100)
    assert found in values
    assert Fraction(sum(value <= found for value in values), len(values)) >= share
    assert Fraction(sum(value < found for value in values), len(values)) < share


def test_a_percentile_needs_ten_values_beyond_it():
    assert [enough_for(p) for p in (0.5, 0.9, 0.99)] == [20, 100, 1000]


def test_estimates_are_of_all_values_whatever_group_they_are_in():
    groups = {"a": [1.0, 2.0, 3.0], "b": [10.0], "empty": []}
    mean = bootstrap_mean(groups)
    assert (mean.value, mean.n, mean.groups) == (4.0, 4, 2)
    median, top = bootstrap_percentiles(groups, [0.5, 1.0])
    assert (median.value, top.value, top.n) == (2.0, 10.0, 4)
    rate = bootstrap_rate({"a": (1.0, 4.0), "b": (5.0, 8.0), "no history": (0.0, 0.0)})
    assert (rate.value, rate.n, rate.groups) == (0.5, 12, 2)


def test_one_group_has_no_interval():
    assert bootstrap_mean({"a": [1.0, 2.0]}).ci_low is None
    assert bootstrap_percentiles({"a": [1.0, 2.0]}, [0.5])[0].ci_high is None
    assert bootstrap_rate({"a": (1.0, 2.0)}).ci_low is None
    assert paired_ratio({(0, "a"): 1.0}, {(0, "a"): 2.0}).ci_low is None


def test_equal_data_gives_equal_intervals_and_more_data_narrower_ones():
    rng = np.random.default_rng(5)
    few = {str(index): list(rng.normal(10, 2, 4)) for index in range(8)}
    many = {str(index): list(rng.normal(10, 2, 4)) for index in range(200)}
    assert bootstrap_mean(few) == bootstrap_mean(dict(few))
    widths = [one.ci_high - one.ci_low for one in (bootstrap_mean(few), bootstrap_mean(many))]
    assert widths[1] < widths[0] / 3


def test_turns_of_one_conversation_count_as_one():
    """Repeating every value ten times inside its conversation is no new evidence."""
    rng = np.random.default_rng(2)
    levels = rng.normal(10, 2, 12)
    once = bootstrap_mean({str(index): [level] for index, level in enumerate(levels)})
    tenfold = bootstrap_mean({str(index): [level] * 10 for index, level in enumerate(levels)})
    assert (once.ci_low, once.ci_high) == pytest.approx((tenfold.ci_low, tenfold.ci_high))


def test_long_series_are_resampled_in_bounded_memory():
    values = {str(index): list(np.arange(index, 300_000, 20.0)) for index in range(20)}
    [median] = bootstrap_percentiles(values, [0.5])
    assert median.value == 149_999.0
    assert median.ci_low <= median.value <= median.ci_high


def cover(repetitions, draw, truth):
    """Share of `repetitions` whose 95 % interval holds the truth."""
    hits = 0
    for repetition in range(repetitions):
        estimate = draw(np.random.default_rng(repetition), repetition)
        hits += estimate.ci_low <= truth <= estimate.ci_high
    return hits / repetitions


def test_intervals_of_a_mean_hold_the_truth_as_often_as_they_say():
    def draw(rng, repetition):
        level = rng.normal(100, 10, (15, 1))
        values = level + rng.normal(0, 5, (15, 6))
        return bootstrap_mean({str(index): row for index, row in enumerate(values)}, resamples=600, seed=repetition)

    assert 0.93 <= cover(2000, draw, 100.0) <= 0.97


def test_intervals_of_a_median_hold_the_truth_as_often_as_they_say():
    def draw(rng, repetition):
        values = np.exp(rng.normal(0, 0.5, (15, 1)) + rng.normal(0, 0.4, (15, 6)))
        groups = {str(index): row for index, row in enumerate(values)}
        return bootstrap_percentiles(groups, [0.5], resamples=400, seed=repetition)[0]

    assert 0.93 <= cover(2000, draw, 1.0) <= 0.975


@pytest.mark.parametrize(("seeds", "seed_sd", "low"), [(1, 0.0, 0.92), (3, 0.0, 0.93), (3, 0.1, 0.90), (8, 0.2, 0.92)])
def test_intervals_of_a_paired_ratio_hold_the_truth_as_often_as_they_say(seeds, seed_sd, low):
    """Resampling two levels is cautious where seeds do not matter, and must not be bold where they do."""

    def draw(rng, repetition):
        effect = rng.normal(math.log(2.0), seed_sd, seeds)
        a, b = {}, {}
        for seed in range(seeds):
            for session in range(10):
                size = math.exp(rng.normal(0, 1))
                b[seed, str(session)] = size
                a[seed, str(session)] = size * math.exp(effect[seed] + rng.normal(0, 0.3))
        return paired_ratio(a, b, resamples=400, seed=repetition)

    assert low <= cover(500, draw, 2.0) <= 1.0


def test_pairing_removes_what_both_have_in_common():
    rng = np.random.default_rng(3)
    b = {(seed, str(session)): math.exp(rng.normal(0, 2)) for seed in range(3) for session in range(10)}
    a = {key: value * 0.5 for key, value in b.items()}
    found = paired_ratio(a, b)
    assert (found.ratio, found.ci_low, found.ci_high) == pytest.approx((0.5, 0.5, 0.5))
    assert (found.n, found.n_seeds) == (30, 3)


def test_a_ratio_and_its_inverse_agree():
    rng = np.random.default_rng(4)
    a = {(seed, str(session)): rng.uniform(1, 9) for seed in range(3) for session in range(8)}
    b = {key: rng.uniform(1, 9) for key in a}
    there, back = paired_ratio(a, b), paired_ratio(b, a)
    assert there.ratio * back.ratio == pytest.approx(1.0)
    assert there.ci_low * back.ci_high == pytest.approx(1.0)


def test_keys_that_only_one_has_are_left_out():
    a = {(0, "a"): 2.0, (0, "b"): 4.0, (1, "a"): 100.0}
    b = {(0, "a"): 1.0, (0, "b"): 2.0, (2, "z"): 100.0}
    found = paired_ratio(a, b)
    assert (found.ratio, found.n, found.n_seeds) == (2.0, 2, 1)
    with pytest.raises(MissingSeries, match="same seeds"):
        paired_ratio(a, {(9, "a"): 1.0})


def test_means_may_be_compared_where_single_values_are_zero():
    a = {(0, "a"): 0.0, (0, "b"): 6.0, (0, "c"): 3.0}
    b = {(0, "a"): 5.0, (0, "b"): 0.0, (0, "c"): 1.0}
    found = paired_ratio(a, b, of="means")
    assert found.ratio == pytest.approx(1.5)
    assert found.ci_low < 1.5 < found.ci_high == math.inf  # a resample of b alone has a mean of 0


def test_seeds_that_differ_widen_an_interval_that_sessions_alone_would_not():
    same = {(seed, str(session)): 10.0 + session % 5 for seed in range(4) for session in range(20)}
    apart = {(seed, session): value + 5.0 * (seed % 2) for (seed, session), value in same.items()}
    widths = []
    for values in (same, apart):
        estimate = bootstrap_percentile_by_seed(values, 0.5)
        widths.append(estimate.ci_high - estimate.ci_low)
        assert (estimate.n, estimate.groups) == (80, 4)
    assert widths[1] > 2 * widths[0]


def test_percentiles_by_seed_of_one_value_a_session_are_those_of_sessions():
    rng = np.random.default_rng(3)
    values = {(seed, f"s{i}"): float(rng.normal(seed)) for seed in range(4) for i in range(7)}
    one = bootstrap_percentile_by_seed(values, 0.5)
    [several] = bootstrap_percentiles_by_seed({key: [value] for key, value in values.items()}, [0.5])
    assert several == one


def test_percentiles_by_seed_take_turns_of_a_session_together():
    """Sessions that do not differ within give intervals as wide as their number allows, however many turns they have."""
    few = {(seed, f"s{i}"): [float(seed + i)] for seed in range(3) for i in range(4)}
    many = {key: part * 50 for key, part in few.items()}
    [one], [other] = (bootstrap_percentiles_by_seed(groups, [0.5]) for groups in (few, many))
    assert (one.value, one.ci_low, one.ci_high) == (other.value, other.ci_low, other.ci_high)
    assert (one.n, other.n, one.groups) == (12, 600, 3)
    [alone] = bootstrap_percentiles_by_seed({(0, "s"): [1.0, 2.0, 3.0]}, [0.5])
    assert (alone.value, alone.ci_low, alone.ci_high) == (2.0, None, None)


def noisy_line(chance: int, seeds: int = 3, sessions: int = 12, seed_spread: float = 0.0):
    """10 + 0.08 x with noise of 2 at four places; each seed is off by its own amount."""
    rng = np.random.default_rng(chance)
    found = {}
    for seed in range(seeds):
        off = rng.normal(0.0, seed_spread)
        for session in range(sessions):
            x = float(rng.choice([0, 256, 384, 512]))
            found[seed, f"s{session}"] = [(x, 10 + 0.08 * x + off + float(rng.normal(0.0, 2.0)))]
    return found


def test_a_line_is_that_of_least_squares():
    points = noisy_line(0)
    line = fit_line(points)
    xs, ys = np.array([point for part in points.values() for point in part]).T
    slope, intercept = np.polyfit(xs, ys, 1)
    assert line.slope.value == pytest.approx(slope)
    assert line.intercept.value == pytest.approx(intercept)
    assert line.r_squared == pytest.approx(np.corrcoef(xs, ys)[0, 1] ** 2)
    assert (line.n, line.groups) == (36, 3)


def test_the_interval_of_a_slope_holds_the_truth_as_often_as_it_says():
    lines = [fit_line(noisy_line(chance), resamples=400) for chance in range(120)]
    held = sum(line.slope.ci_low <= 0.08 <= line.slope.ci_high for line in lines)
    assert 108 <= held <= 119  # 95 % of 120 is 114, and an interval that holds always says nothing
    spread = [fit_line(noisy_line(chance, seed_spread=5.0), resamples=400) for chance in range(40)]
    widths = [
        sum(line.intercept.ci_high - line.intercept.ci_low for line in found) / len(found) for found in (lines, spread)
    ]
    assert widths[1] > 2 * widths[0]  # what differs between seeds is not hidden by many conversations


def test_a_perfect_line_has_no_spread_and_a_flat_one_no_share_explained():
    line = fit_line(
        {(0, str(x)): [(float(x), 3.0 + 2.0 * x), (float(x) + 1e6, 3.0 + 2.0 * (x + 1e6))] for x in range(6)}
    )
    assert line.slope.value == pytest.approx(2.0) and line.intercept.value == pytest.approx(3.0, abs=1e-5)
    assert (line.slope.ci_low, line.slope.ci_high) == (pytest.approx(2.0), pytest.approx(2.0))
    assert line.r_squared == pytest.approx(1.0)
    assert fit_line({(0, str(x)): [(float(x), 5.0)] for x in range(4)}).r_squared is None


def test_a_line_needs_two_places_and_an_interval_three_conversations():
    with pytest.raises(MissingSeries, match="at two places"):
        fit_line({(0, "a"): [(1.0, 2.0)], (0, "b"): [(1.0, 3.0)]})
    line = fit_line({(0, "a"): [(1.0, 2.0)], (0, "b"): [(2.0, 3.0)]})
    assert (line.slope.value, line.slope.ci_low, line.slope.ci_high) == (pytest.approx(1.0), None, None)
