"""Which cells of a map to run next: a coarse grid, and then only where an answer changes.

Among cells of one mode (Question.mode) more memory is taken not to be worse: what a cell answers with yes, larger ones answer
so too, and with no, smaller ones. Across modes nothing follows, but what is larger than any yes is not among the smallest. A
cell that can be left alone by this is. Where the rule does not hold (in one mode a smaller cell says yes and a larger one no)
every cell between the two is run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise, product

import numpy as np
from scipy import ndimage

from pensieve.lab.results.size_map import Place, within

COARSE = 4
"""Cells along each side of the coarse grid."""

Answers = Sequence[bool]
"""Of one cell, one a question."""

Shape = tuple[int, ...]
"""Sizes along each axis: GPU, CPU, and the disk where there are several."""

Mode = Callable[[Place], str]
"""Of a cell, whether it has run or not; see Question.mode."""


def coarse(count: int) -> list[int]:
    """Indices of so many sizes, evenly spread, both ends among them."""
    steps = min(count, COARSE) - 1
    return sorted({round(step * (count - 1) / steps) for step in range(steps + 1)}) if steps > 0 else [0]


def lacking(
    shape: Shape,
    answers: Callable[[Place], Answers | None],
    failed: Collection[Place] = (),
    mode: Mode = lambda place: "",
) -> set[Place]:
    """The cells to run next. answers: of a cell; None: not known yet. failed: cells that will not have any. Empty: the map
    is as fine as it need be."""
    grid = _grid(shape, mode) - set(failed)
    known = {place: found for place in _places(shape) if (found := answers(place)) is not None}
    if first := grid - known.keys():
        return first
    waiting = set(_places(shape)) - known.keys() - set(failed)
    wanted: set[Place] = set()
    for question in range(len(next(iter(known.values()), ()))):
        unsettled = _open(waiting, {place: found[question] for place, found in known.items()}, mode)
        wanted |= {_splitting(part) for part in _connected(unsettled, mode)}
    return wanted


def _grid(shape: Shape, mode: Mode) -> set[Place]:
    """The coarse grid, and where the mode changes in one of its rows the two cells beside the change."""
    gpus, cpus, *others = (coarse(count) for count in shape)
    found = set(product(gpus, cpus, *others))
    for gpu, *beside in product(gpus, *others):
        for place, larger in pairwise((gpu, cpu, *beside) for cpu in range(shape[1])):
            if mode(place) != mode(larger):
                found |= {place, larger}
    return found


def _open(waiting: Collection[Place], known: Mapping[Place, bool], mode: Mode) -> set[Place]:
    """Those of `waiting` that may be among the smallest to say yes, or whose answer follows both ways."""
    found = set()
    for place in waiting:
        smaller = [other for other, answer in known.items() if answer and within(other, place)]
        no = any(not answer and within(place, other) and mode(place) == mode(other) for other, answer in known.items())
        alike = any(mode(place) == mode(other) for other in smaller)
        if (no and alike) or not (no or smaller):
            found.add(place)
    return found


def _splitting(cells: Collection[Place]) -> Place:
    """The one whose answer settles most of the others, whichever it is."""

    def settled(place: Place) -> int:
        return min(sum(within(place, other) for other in cells), sum(within(other, place) for other in cells))

    return max(sorted(cells), key=settled)


def _connected(cells: Collection[Place], mode: Mode) -> Iterator[set[Place]]:
    """Parts of one mode that do not touch another of it, not even at a corner."""
    for one in {mode(place) for place in cells}:
        own = [place for place in cells if mode(place) == one]
        grid = np.zeros(np.max(own, axis=0) + 1, dtype=bool)
        grid[tuple(np.transpose(own))] = True
        labels, count = ndimage.label(grid, structure=np.ones((3,) * grid.ndim))
        yield from ({place for place in own if labels[place] == part} for part in range(1, count + 1))


def _places(shape: Shape) -> Iterator[Place]:
    return product(*map(range, shape))
