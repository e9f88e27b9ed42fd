import math
import random
from collections import OrderedDict
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve import statistics
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
    rate_by_seed,
    spread,
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


@pytest.mark.parametrize(("sessions", "longest"), [(1, 1), (7, 40), (300, 3)])
def test_percentiles_of_a_resample_are_those_of_its_values_written_out(sessions, longest):
    rng = np.random.default_rng(sessions)
    member = np.repeat(np.arange(sessions), rng.integers(1, longest + 1, size=sessions))
    rng.shuffle(member)
    ordered = np.sort(np.round(rng.lognormal(size=len(member)), 1))  # with values that occur again
    weights = rng.multinomial(sessions, np.full(sessions, 1.0 / sessions), size=50).astype(np.int32)
    ps = (0.01, 0.5, 0.9, 0.99, 1.0)
    found = statistics._drawn_percentiles(ordered, member, weights, ps)
    for column, row in enumerate(weights):
        drawn = np.repeat(ordered, row[member])
        assert list(found[:, column]) == [nearest_rank(drawn, p) for p in ps]


def test_long_series_are_resampled_in_bounded_memory():
    values = {str(index): list(np.arange(index, 300_000, 20.0)) for index in range(20)}
    [median] = bootstrap_percentiles(values, [0.5])
    assert median.value == 149_999.0
    assert median.ci_low <= median.value <= median.ci_high


def cover(repetitions, draw, truth):
    """Share of `repetitions` whose 95 % interval holds the truth. Every one of them has an interval: where that hung on the
    values, those that have one would be a choice of the luckiest."""
    hits = 0
    for repetition in range(repetitions):
        estimate = draw(np.random.default_rng(repetition), repetition)
        assert estimate.ci_low is not None
        hits += estimate.ci_low <= truth <= estimate.ci_high
    return hits / repetitions


SHAPES = {
    "normal": (lambda rng, size: rng.normal(10, 2, size), 10.0),
    "exponential": (lambda rng, size: rng.exponential(1, size), 1.0),
    "lognormal": (lambda rng, size: np.exp(rng.normal(0, 1, size)), math.exp(0.5)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("groups", [5, 8, 15])
def test_intervals_of_a_mean_hold_the_truth(groups, shape):
    """The expanded percentile interval that stood here held the mean of five skewed conversations 81 times in 100."""
    make, truth = SHAPES[shape]

    def draw(rng, repetition):
        values = {str(index): [value] for index, value in enumerate(make(rng, groups))}
        return bootstrap_mean(values, resamples=300, seed=repetition)

    assert cover(300, draw, truth) >= (0.93 if shape == "normal" else 0.90)


@pytest.mark.parametrize("groups", [5, 8, 15])
def test_intervals_of_a_rate_hold_the_truth_and_stay_a_share(groups):
    def draw(rng, repetition):
        wholes = rng.integers(50, 400, groups)
        parts = rng.beta(4, 2, groups) * wholes
        found = bootstrap_rate(
            {str(index): pair for index, pair in enumerate(zip(parts, wholes, strict=True))},
            resamples=300,
            seed=repetition,
        )
        assert 0.0 <= found.ci_low <= found.value <= found.ci_high <= 1.0
        return found

    assert cover(300, draw, 4 / 6) >= 0.93


@pytest.mark.parametrize("share", [0.12, 0.5, 0.88])
@pytest.mark.parametrize(("seeds", "sessions"), [(1, 9), (5, 5)])
def test_intervals_of_a_rate_by_seed_hold_the_truth_near_none_and_all(share, seeds, sessions):
    """Of conversations that differ much: most of them find little where the share is small."""

    def draw(rng, repetition):
        wholes = rng.integers(50, 400, (seeds, sessions))
        parts = rng.beta(5 * share, 5 * (1 - share), (seeds, sessions)) * wholes
        pairs = {(s, str(i)): (parts[s, i], wholes[s, i]) for s in range(seeds) for i in range(sessions)}
        found = rate_by_seed(pairs, resamples=300, seed=repetition)
        assert 0.0 <= found.ci_low <= found.value <= found.ci_high <= 1.0
        return found

    assert cover(200, draw, share) >= 0.92


def test_a_rate_has_one_interval_whoever_asks_for_it():
    """The metric of a trial and the table of a sweep of one seed; nine conversations that find 12 % of their history."""
    found = {"a": 0.9, "b": 0.0, "c": 0.1, "d": 0.0, "e": 0.0, "f": 0.08, "g": 0.0, "h": 0.0, "i": 0.0}
    pairs = {name: (100 * share, 100.0) for name, share in found.items()}
    trial, table = bootstrap_rate(pairs), rate_by_seed({(7, name): pair for name, pair in pairs.items()})
    assert (trial.value, trial.ci_low, trial.ci_high) == (table.value, table.ci_low, table.ci_high)
    assert trial.value == pytest.approx(0.12)
    assert trial.ci_low == 0.0 and 0.12 < trial.ci_high <= 1.0
    assert (trial.n, trial.groups, table.n, table.groups) == (900, 9, 9, 1)


@pytest.mark.parametrize(("seeds", "sessions"), [(1, 5), (1, 15), (5, 1), (5, 5), (8, 5), (15, 5)])
@pytest.mark.parametrize("seed_sd", [0.0, 1.0, 3.0])
def test_intervals_of_a_paired_ratio_hold_the_truth_also_where_seeds_dominate(seeds, sessions, seed_sd):
    """seed_sd: how much seeds differ, in multiples of what their conversations do. Of one seed the truth is its own."""

    def draw(rng, repetition):
        effect = rng.normal(0, seed_sd if seeds > 1 else 0.0, seeds)
        a = {(s, str(i)): math.exp(effect[s] + rng.normal(0, 1)) for s in range(seeds) for i in range(sessions)}
        return paired_ratio(a, dict.fromkeys(a, 0.5), resamples=300, seed=repetition)

    assert cover(300, draw, 2.0) >= 0.93


@pytest.mark.parametrize(("seeds", "sessions", "seed_sd"), [(5, 5, 0.0), (5, 5, 0.5), (5, 5, 1.0), (15, 5, 1.0)])
def test_intervals_of_a_ratio_of_means_hold_the_truth_of_skewed_values(seeds, sessions, seed_sd):
    def draw(rng, repetition):
        a = {}
        for s in range(seeds):
            level = math.exp(rng.normal(-(seed_sd**2) / 2, seed_sd))
            a |= {(s, str(i)): level * rng.exponential(1) for i in range(sessions)}
        return paired_ratio(a, dict.fromkeys(a, 1.0), of="means", resamples=300, seed=repetition)

    assert cover(300, draw, 1.0) >= 0.90


@pytest.mark.parametrize(
    ("p", "groups", "values", "group_sd"),
    [(0.5, 8, 1, 0.5), (0.5, 8, 10, 0.0), (0.5, 8, 10, 0.5), (0.5, 15, 8, 0.5), (0.9, 40, 1, 0.5), (0.9, 40, 10, 0.5)],
)
def test_intervals_of_a_percentile_hold_the_truth(p, groups, values, group_sd):
    """Of skewed values that differ by conversation (group_sd) and within."""
    truth = math.exp(NormalDist().inv_cdf(p) * math.hypot(group_sd, 0.4))

    def draw(rng, repetition):
        found = np.exp(rng.normal(0, group_sd, (groups, 1)) + rng.normal(0, 0.4, (groups, values)))
        parts = {str(index): row for index, row in enumerate(found)}
        return bootstrap_percentiles(parts, [p], resamples=300, seed=repetition)[0]

    assert cover(300, draw, truth) >= 0.90


@pytest.mark.parametrize(("seeds", "sessions"), [(5, 5), (8, 5)])
@pytest.mark.parametrize("seed_sd", [0.0, 1.0, 3.0])
def test_intervals_of_a_median_by_seed_hold_the_truth_also_where_seeds_dominate(seeds, sessions, seed_sd):
    def draw(rng, repetition):
        found = np.exp(rng.normal(0, seed_sd, (seeds, 1)) + rng.normal(0, 1, (seeds, sessions)))
        values = {(s, str(i)): float(found[s, i]) for s in range(seeds) for i in range(sessions)}
        return bootstrap_percentile_by_seed(values, 0.5, resamples=300, seed=repetition)

    assert cover(300, draw, 1.0) >= 0.90


def test_too_few_groups_have_no_interval_whatever_their_values():
    """Three seeds of five conversations: where seeds dominate, such an interval held the truth 37 times in 100."""
    rng = np.random.default_rng(1)
    for seeds, sessions in ((1, 4), (2, 20), (3, 5), (4, 50)):
        a = {(s, str(i)): rng.uniform(1, 2) for s in range(seeds) for i in range(sessions)}
        found = [
            paired_ratio(a, dict.fromkeys(a, 1.0)),
            paired_ratio(a, dict.fromkeys(a, 1.0), of="means"),
            bootstrap_percentile_by_seed(a, 0.5),
            fit_line({key: [(x, x * value) for x in range(4)] for key, value in a.items()}).slope,
        ]
        assert [(one.ci_low, one.ci_high) for one in found] == [(None, None)] * len(found)
    four = {str(index): [float(index)] * 9 for index in range(4)}
    assert bootstrap_mean(four).ci_low is None
    assert bootstrap_rate({name: (1.0, 2.0 + part[0]) for name, part in four.items()}).ci_low is None


@pytest.mark.parametrize(("p", "fewest"), [(0.5, 8), (0.9, 40), (0.99, 400)])
def test_a_percentile_needs_groups_beyond_it(p, fewest):
    values = {str(index): [float(index)] * 3 for index in range(fewest)}
    assert bootstrap_percentiles(values, [p], resamples=50)[0].ci_low is not None
    del values["0"]
    assert bootstrap_percentiles(values, [p], resamples=50)[0].ci_low is None
    assert bootstrap_percentiles(values, [1.0], resamples=50)[0].ci_low is None


def test_pairing_removes_what_both_have_in_common():
    rng = np.random.default_rng(3)
    b = {(seed, str(session)): math.exp(rng.normal(0, 2)) for seed in range(5) for session in range(10)}
    a = {key: value * 0.5 for key, value in b.items()}
    found = paired_ratio(a, b)
    assert (found.ratio, found.ci_low, found.ci_high) == pytest.approx((0.5, 0.5, 0.5))
    assert (found.n, found.n_seeds) == (50, 5)


def test_a_ratio_and_its_inverse_agree():
    rng = np.random.default_rng(4)
    a = {(seed, str(session)): rng.uniform(1, 9) for seed in range(5) for session in range(8)}
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
    a = {(0, "a"): 0.0, (0, "b"): 6.0, (0, "c"): 3.0, (0, "d"): 1.0, (0, "e"): 2.0}
    b = {(0, "a"): 5.0, (0, "b"): 0.0, (0, "c"): 1.0, (0, "d"): 2.0, (0, "e"): 0.0}
    found = paired_ratio(a, b, of="means")
    assert found.ratio == pytest.approx(1.5)
    assert found.ci_low < 1.5 < found.ci_high
    nothing = paired_ratio(a, dict.fromkeys(a, 0.0), of="means")
    assert (nothing.ratio, nothing.ci_low) == (math.inf, None)


def test_seeds_that_differ_widen_an_interval_that_sessions_alone_would_not():
    same = {(seed, str(session)): 10.0 + session % 5 for seed in range(6) for session in range(20)}
    apart = {(seed, session): value + 5.0 * (seed % 2) for (seed, session), value in same.items()}
    widths = []
    for values in (same, apart):
        estimate = bootstrap_percentile_by_seed(values, 0.5)
        widths.append(estimate.ci_high - estimate.ci_low)
        assert (estimate.n, estimate.groups) == (120, 6)
    assert widths[1] > 2 * widths[0]


def test_percentiles_by_seed_of_one_value_a_session_are_those_of_sessions():
    rng = np.random.default_rng(3)
    values = {(seed, f"s{i}"): float(rng.normal(seed)) for seed in range(4) for i in range(7)}
    one = bootstrap_percentile_by_seed(values, 0.5)
    [several] = bootstrap_percentiles_by_seed({key: [value] for key, value in values.items()}, [0.5])
    assert several == one


def test_percentiles_by_seed_take_turns_of_a_session_together():
    """Sessions that do not differ within give intervals as wide as their number allows, however many turns they have."""
    few = {(seed, f"s{i}"): [float(seed + i)] for seed in range(5) for i in range(4)}
    many = {key: part * 50 for key, part in few.items()}
    [one], [other] = (bootstrap_percentiles_by_seed(groups, [0.5]) for groups in (few, many))
    assert (one.value, one.ci_low, one.ci_high) == (other.value, other.ci_low, other.ci_high)
    assert (one.n, other.n, one.groups) == (20, 1000, 5)
    [alone] = bootstrap_percentiles_by_seed({(0, "s"): [1.0, 2.0, 3.0]}, [0.5])
    assert (alone.value, alone.ci_low, alone.ci_high) == (2.0, None, None)


def noisy_line(chance: int, seeds: int = 5, sessions: int = 12, seed_spread: float = 0.0):
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
    assert (line.n, line.groups) == (60, 5)


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


def test_a_line_needs_two_places():
    with pytest.raises(MissingSeries, match="at two places"):
        fit_line({(0, "a"): [(1.0, 2.0)], (0, "b"): [(1.0, 3.0)]})
    line = fit_line({(0, "a"): [(1.0, 2.0)], (0, "b"): [(2.0, 3.0)]})
    assert (line.slope.value, line.slope.ci_low, line.slope.ci_high) == (pytest.approx(1.0), None, None)


_TIMES = st.floats(0, 1e9) | st.sampled_from([0.0, -0.0, 5e-324, 12.5])


@given(st.lists(st.lists(_TIMES, max_size=9), max_size=9))
def test_a_series_too_long_for_memory_has_the_same_percentiles(parts):
    values = [value for part in parts for value in part]
    ps = [0.01, 0.5, 0.9, 0.99, 1.0]
    mean, found, n = spread(lambda: parts, ps)
    assert n == len(values)
    if not values:
        assert (mean, found) == (None, [None] * len(ps))
        return
    assert found == [nearest_rank(values, p) for p in ps]
    assert mean == pytest.approx(math.fsum(values) / n)


def test_a_long_series_is_gone_through_in_parts():
    rng = np.random.default_rng(0)
    parts = [rng.lognormal(size=7_000) for _ in range(100)]
    parts += [np.full(30_000, 1.0)]  # many of one value, at the median
    values = np.sort(np.concatenate(parts))
    _, found, n = spread(lambda: parts, [0.5, 0.99])
    assert found == [values[math.ceil(p * n) - 1] for p in (0.5, 0.99)]


def test_an_interval_of_values_that_hardly_differ_loses_no_digits():
    """The squares of large numbers would leave nothing of their differences."""
    small = {str(number): [float(number**2 % 7)] for number in range(12)}
    large = {name: [1e9 + value for value in values] for name, values in small.items()}
    near, far = (statistics.bootstrap_mean(groups) for groups in (small, large))
    assert (far.ci_low - 1e9, far.ci_high - 1e9) == pytest.approx((near.ci_low, near.ci_high), abs=1e-6)
    apart = statistics.bootstrap_mean({**{str(number): [5.0] for number in range(9)}, "other": [6.0]})
    assert apart.ci_low < 5.1 < apart.ci_high, "resamples without the other one say nothing, and are left out"


def test_draws_are_made_once_for_all_series_of_as_many_conversations(monkeypatch):
    """Also where other series came between, as in one trial after another of a map; the intervals are those of new draws."""
    groups = {f"c{index}": [float(index % 7), float(index % 11)] for index in range(1200)}
    made = []
    fresh = statistics._new_draws
    monkeypatch.setattr(statistics, "_kept", OrderedDict())
    monkeypatch.setattr(statistics, "_new_draws", lambda sizes, *rest: made.append(sizes) or fresh(sizes, *rest))

    def all_of_it():
        short = [bootstrap_mean(dict(list(groups.items())[:count])) for count in range(20, 40)]
        return bootstrap_mean(groups), bootstrap_percentiles(groups, [0.5, 0.9]), short

    first = all_of_it()
    assert len(made) == 21
    assert all_of_it() == first and len(made) == 21
    monkeypatch.setattr(statistics, "_KEPT", 0)
    assert all_of_it() == first and len(made) > 21


@pytest.mark.parametrize("sizes", [(1500,), (600, 500, 400)], ids=["one seed", "three seeds"])
def test_draws_are_the_same_whether_kept_or_not_and_whether_asked_for_in_parts_or_at_once(monkeypatch, sizes):
    """More than 1,000 values, of which not all resamples are drawn at a time."""
    by_seed = [np.zeros(size) for size in sizes]
    found = []
    for most in (statistics._KEPT, 0):
        monkeypatch.setattr(statistics, "_kept", OrderedDict())
        monkeypatch.setattr(statistics, "_KEPT", most)
        found += [statistics._all_draws(by_seed, 2000, 7), np.concatenate(list(statistics._draws(by_seed, 2000, 7)))]
    assert found[0].shape == (2000, 1500) and (found[0].sum(axis=1) > 0).all()
    assert all((one == found[0]).all() for one in found)


@pytest.mark.parametrize("seeds", [1, 5])
def test_intervals_of_many_conversations_do_not_depend_on_what_is_kept(monkeypatch, seeds):
    rng = random.Random(1)
    a = {(seed, f"c{i}"): rng.lognormvariate(seed / 5, 1) for seed in range(seeds) for i in range(1500 // seeds)}
    b = {(seed, name): 1.0 + (int(name[1:]) * 5 + seed) % 13 for seed, name in a}
    found = []
    for most in (statistics._KEPT, 0):
        monkeypatch.setattr(statistics, "_kept", OrderedDict())
        monkeypatch.setattr(statistics, "_KEPT", most)
        found.append((paired_ratio(a, b), bootstrap_percentile_by_seed(a, 0.5)))
    assert found[0] == found[1]
    if seeds == 5:  # what the version before draws were kept gave
        assert (found[0][0].ci_low, found[0][0].ci_high) == pytest.approx((0.16450064154397182, 0.569911968083057))
