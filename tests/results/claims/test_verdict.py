"""Each verdict from the intervals that call for it."""

import math

import pytest

from pensieve.lab.results.claims.claim import Bounds
from pensieve.lab.results.claims.judge import judge
from pensieve.lab.results.claims.measures import Measured

RANGE = Bounds(1.5, 2.5, 1.5, "1.5 to 2.5")
ABOVE = Bounds(2.0, None, 2.0, "> 2")
BELOW = Bounds(None, 1.0, 1.0, "< 1")


def measured(low, high, value=None, seeds=3, n=18):
    value = value if value is not None else ((low or 0) + (high or 0)) / 2
    return Measured(value, low, high, n, "conversations", seeds, (1, 2))


@pytest.mark.parametrize(
    ("bounds", "low", "high", "verdict", "word"),
    [
        (RANGE, 1.6, 2.4, "holds", "within"),
        (RANGE, 1.5, 2.5, "holds", "within"),
        (RANGE, 2.6, 3.0, "fails", "above"),
        (RANGE, 1.0, 1.4, "fails", "below"),
        (RANGE, 1.4, 1.6, "inconclusive", "across"),
        (RANGE, 2.4, 2.6, "inconclusive", "across"),
        (RANGE, 1.0, 3.0, "inconclusive", "across"),
        (ABOVE, 2.0, 9.0, "holds", "within"),
        (ABOVE, 2.1, 1e9, "holds", "within"),
        (ABOVE, 1.0, 1.9, "fails", "below"),
        (ABOVE, 1.9, 2.1, "inconclusive", "across"),
        (BELOW, -0.5, 1.0, "holds", "within"),
        (BELOW, 1.1, 1.2, "fails", "above"),
        (BELOW, 0.9, 1.1, "inconclusive", "across"),
    ],
)
def test_a_claim_holds_or_fails_only_where_the_whole_interval_does(bounds, low, high, verdict, word):
    found = judge(bounds, measured(low, high), [])
    assert found.verdict == verdict
    assert word in found.why


def test_the_value_itself_decides_nothing():
    assert judge(RANGE, measured(1.0, 3.0, value=2.0), []).verdict == "inconclusive"


def test_an_interval_of_no_width_is_an_interval():
    assert judge(RANGE, measured(2.0, 2.0), []).verdict == "holds"


def test_too_few_seeds_are_inconclusive_whatever_the_interval():
    found = judge(RANGE, measured(1.9, 2.0, seeds=1), [], fewest_seeds=3)
    assert (found.verdict, found.why) == ("inconclusive", "one seed, and 3 are needed")
    assert judge(RANGE, measured(1.9, 2.0, seeds=3), [], fewest_seeds=3).verdict == "holds"


def test_no_interval_is_inconclusive_and_says_how_much_there_was():
    found = judge(RANGE, measured(None, None, value=2.0, n=4), [])
    assert found.verdict == "inconclusive"
    assert "n = 4 conversations, 3 seeds" in found.why


def test_a_difference_in_conditions_comes_before_everything():
    found = judge(RANGE, measured(1.9, 2.0), ["model is tiny here", "workload is chat here"])
    assert found.verdict == "not comparable"
    assert found.why == "model is tiny here; workload is chat here"


@pytest.mark.parametrize("nothing", [None, measured(1.0, 2.0, value=math.nan), measured(1.0, 2.0, value=math.inf)])
def test_without_a_value_nothing_is_comparable(nothing):
    assert judge(RANGE, nothing, []).verdict == "not comparable"


def test_bounds_that_nothing_could_contradict_are_our_bug():
    with pytest.raises(AssertionError):
        Bounds(None, None, 1.0, "")
