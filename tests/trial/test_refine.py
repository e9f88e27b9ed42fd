"""Which cells of a map run: those around every border, and no more than a few of the others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.trial.refine import coarse, lacking


def explore(shape, *questions, failing=()):
    """The cells that have run when nothing is lacking any more."""
    known, failed = {}, set()
    while wanted := lacking(shape, known.get, failed):
        assert not wanted & (known.keys() | failed), "a cell is asked for once"
        failed |= wanted & set(failing)
        known.update({place: tuple(suffices(place) for suffices in questions) for place in wanted - failed})
    return known, failed


def smallest(cells, suffices):
    """By comparing every pair."""
    good = [place for place in cells if suffices(place)]
    return {p for p in good if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in good)}


def staircase(steps):
    """More memory is never worse: a cell suffices if some step is no larger in both tiers."""
    return lambda place: any(place[0] >= gpu and place[1] >= cpu for gpu, cpu in steps)


@settings(max_examples=100, deadline=None)
@given(
    st.tuples(st.integers(1, 14), st.integers(1, 14)),
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=4),
    st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=2),
)
def test_where_more_is_never_worse_the_smallest_cells_that_suffice_have_run(shape, knee, slo):
    every = [(i, j) for i in range(shape[0]) for j in range(shape[1])]
    answers = (staircase(knee), staircase(slo))
    run, _ = explore(shape, *answers)
    lines = [(i, j) for i, j in every if i in coarse(shape[0]) and j in coarse(shape[1])]
    assert set(lines) <= run.keys()
    for suffices in answers:
        assert smallest(run, suffices) == smallest(every, suffices)
        for gpu, cpu in every:  # what has not run follows from what has
            if suffices((gpu, cpu)):
                assert any(suffices(p) and p[0] <= gpu and p[1] <= cpu for p in run)
            else:
                assert any(not suffices(p) and p[0] >= gpu and p[1] >= cpu for p in run)


@pytest.mark.parametrize(
    ("steps", "most"), [([(9 - i, i) for i in range(10)], 36), ([(1, 11), (3, 6), (6, 3), (10, 0)], 32), ([(5, 5)], 24)]
)
def test_a_border_of_twelve_by_twelve_runs_a_quarter_of_the_cells(steps, most):
    run, _ = explore((12, 12), staircase(steps))
    assert smallest(run, staircase(steps)) == set(steps)
    assert len(run) <= most
    nothing, _ = explore((12, 12), lambda place: True)
    assert len(nothing) == 16, "no border, and so the coarse grid alone"


def test_where_a_smaller_cell_says_yes_and_a_larger_one_no_all_between_them_are_run():
    better = {(i, j) for i in range(12) for j in range(12) if i >= 4 and (j >= 7 or j == 0)}  # a small CPU tier hurts
    run, _ = explore((12, 12), lambda place: place in better)
    between = {(i, j) for i in range(4, 12) for j in range(5)}  # of the coarse grid (4, 0) says yes, and (11, 4) no
    assert between <= run.keys()
    assert smallest(run, lambda place: place in better) == {(4, 0)}


@pytest.mark.parametrize(("count", "indices"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (12, [0, 4, 7, 11])])
def test_the_coarse_grid_has_both_ends(count, indices):
    assert coarse(count) == indices


def test_a_cell_that_failed_is_not_asked_for_again():
    run, failed = explore((5, 5), lambda place: place[0] >= 2, failing=[(0, 0), (2, 0)])
    assert failed == {(0, 0), (2, 0)}
    assert (2, 1) in run, "the smallest that suffices and did not fail"
