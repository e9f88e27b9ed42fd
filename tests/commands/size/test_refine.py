"""Which cells of a map run: those around every border, and no more than a few of the others."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.core.scheduler.copy_ahead import choose_copy_ahead
from pensieve.lab.commands.size.refine import coarse, lacking


def explore(shape, *questions, failing=(), mode=lambda place: ""):
    """The cells that have run when nothing is lacking any more."""
    known, failed = {}, set()
    while wanted := lacking(shape, known.get, failed, mode):
        assert not wanted & (known.keys() | failed), "a cell is asked for once"
        failed |= wanted & set(failing)
        known.update({place: tuple(suffices(place) for suffices in questions) for place in wanted - failed})
    return known, failed


def smallest(cells, suffices):
    """By comparing every pair."""
    good = [place for place in cells if suffices(place)]
    return {p for p in good if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in good)}


def staircase(steps):
    """More memory is never worse: a cell suffices if some step is no larger in any tier."""
    return lambda place: any(all(have >= least for have, least in zip(place, step, strict=True)) for step in steps)


def steps(most):
    return st.lists(st.tuples(*(st.integers(0, size) for size in (11, 11, 3))), max_size=most)


@settings(max_examples=100, deadline=None)
@given(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 3)), steps(4), steps(2), st.booleans())
def test_where_more_is_never_worse_the_smallest_cells_that_suffice_have_run(shape, knee, slo, apart):
    """apart: what holds beside a disk does not follow from cells without one."""
    every = list(product(*map(range, shape)))
    answers = (staircase(knee), staircase(slo))
    run, _ = explore(shape, *answers, mode=lambda place: str(apart and place[2] > 0))
    assert set(product(*map(coarse, shape))) <= run.keys()
    for suffices in answers:
        assert smallest(run, suffices) == smallest(every, suffices)
        for place in [] if apart else every:  # what has not run follows from what has
            alike = [p for p in run if suffices(p) == suffices(place)]
            pairs = ((p, place) if suffices(place) else (place, p) for p in alike)
            assert any(all(a <= b for a, b in zip(*pair, strict=True)) for pair in pairs)


def test_an_axis_of_disks_costs_less_than_a_map_for_each():
    """Three disks, the same border beside each: what is larger than a cell that suffices without one need not run."""
    border = [(6 - i, i, 0) for i in range(7)]
    run, _ = explore((8, 8, 3), staircase(border))
    alone, _ = explore((8, 8), staircase([step[:2] for step in border]))
    assert {place[:2] for place in run if place[2] == 0} >= {step[:2] for step in border}
    assert len(run) < 3 * len(alone)


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


def dipping(rng):
    """A map of 12 by 12 on which a larger CPU tier finds less where its mode changes: what a cell finds, and its mode."""
    first, width, lost, above = rng.randint(1, 6), rng.randint(1, 3), rng.uniform(0.02, 0.1), rng.randint(0, 8)
    gpu, cpu = rng.uniform(0.03, 0.35), rng.uniform(0.03, 0.35)

    def found(place):
        share = 1 - math.exp(-(0.3 + gpu * place[0] + cpu * place[1]))
        return share * (1 - lost) if place[0] >= above and first <= place[1] < first + width else share

    return found, lambda place: "paper" if place[0] >= above and place[1] >= first else "spare"


def by_blocks(rng):
    """A map of 12 by 12 by what the tiers hold, and the modes that auto chooses: the paper's keeps 30 % of the GPU clean."""
    step, least = rng.uniform(1.3, 1.6), rng.uniform(10, 60)
    gpus, cpus = [round(100 * step**i) for i in range(12)], [0, *(round(least * step**i) for i in range(11))]
    whole, worse = rng.uniform(500, 9000), rng.uniform(0.8, 1.0)

    def mode(place):
        gpu, cpu = gpus[place[0]], cpus[place[1]]
        return choose_copy_ahead("auto", cpu, False, math.ceil(0.3 * gpu)).mode if cpu else "none"

    def found(place):
        gpu, cpu = gpus[place[0]], cpus[place[1]]
        held = worse * (0.7 * gpu + cpu) if mode(place) == "paper" else gpu + cpu
        return 1 - math.exp(-held / whole)

    return found, mode


@pytest.mark.parametrize("shape", [dipping, by_blocks])
def test_where_more_is_worse_at_a_change_of_the_mode_the_smallest_and_the_cheapest_are_those_of_the_whole_map(shape):
    every = [(i, j) for i in range(12) for j in range(12)]
    ran, misled = [], 0
    for seed in range(100):
        rng = random.Random(seed)
        found, mode = shape(rng)
        reaches = {place: found(place) >= 0.95 * found((11, 11)) for place in every}
        price = rng.uniform(0.3, 3)
        run, _ = explore((12, 12), reaches.get, mode=mode)
        true, shown = smallest(every, reaches.get), smallest(run, reaches.get)
        assert shown == true, seed
        assert min(shown, key=lambda p: 3 * p[0] + price * p[1]) == min(true, key=lambda p: 3 * p[0] + price * p[1])
        beside = ({(i, j), (i, j + 1)} for i in coarse(12) for j in range(11) if mode((i, j)) != mode((i, j + 1)))
        assert all(pair <= run.keys() for pair in beside)
        ran.append(len(run))
        misled += smallest(explore((12, 12), reaches.get)[0], reaches.get) != true if seed < 20 else 0
    assert misled, "taken for one map, some of them answer wrong"
    assert max(ran) <= 48, "a third of the cells"
