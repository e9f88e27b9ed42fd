"""Which cells of a map run: those around every border, and no more than a few of the others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.trial.refine import coarse, lacking


def explore(shape, truth):
    """The cells that have run when nothing is lacking any more."""
    known = {}
    while wanted := lacking(shape, known.get):
        assert not wanted & known.keys(), "a cell is asked for once"
        known.update({place: truth(place) for place in wanted})
    return known


def smallest(cells, suffices):
    """By comparing every pair."""
    good = [place for place in cells if suffices(place)]
    return {p for p in good if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in good)}


def staircase(steps):
    """More memory is never worse: a cell suffices if some step is no larger in both tiers."""
    return lambda place: any(place[0] >= gpu and place[1] >= cpu for gpu, cpu in steps)


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.integers(1, 14), st.integers(1, 14)),
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=4),
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=2),
)
def test_where_more_is_never_worse_both_borders_are_found_wherever_they_cross_a_coarse_line(shape, knee, slo):
    every = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    answers = (staircase(knee), staircase(slo))
    run = explore(shape, lambda place: tuple(suffices(place) for suffices in answers))
    lines = [(i, j) for i, j in every if i in coarse(shape[0]) and j in coarse(shape[1])]
    assert set(lines) <= run.keys()
    for suffices in answers:
        seen = smallest(run, suffices)
        # A smallest cell is missed only inside a rectangle whose four corners all suffice, or all do not.
        for place in smallest(every, suffices) - seen:
            assert any(other[0] >= place[0] and other[1] >= place[1] for other in seen) or not seen
        assert all(suffices(place) for place in seen)


def test_a_border_of_twelve_by_twelve_runs_a_third_of_the_cells():
    run = explore((12, 12), lambda place: place[0] + place[1] >= 9)
    assert smallest(run, lambda place: place[0] + place[1] >= 9) == {(i, 9 - i) for i in range(10)}
    assert len(run) <= 144 * 0.6
    nothing = explore((12, 12), lambda place: True)
    assert len(nothing) == 16, "no border, and so the coarse grid alone"


@pytest.mark.parametrize(("count", "indices"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (12, [0, 4, 7, 11])])
def test_the_coarse_grid_has_both_ends(count, indices):
    assert coarse(count) == indices


def test_a_cell_that_failed_is_not_asked_for_again():
    failing = (0, 0)
    run = explore((5, 5), lambda place: "failed" if place == failing else True)
    assert failing in run
