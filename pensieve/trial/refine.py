"""Which cells of a map to run next: a coarse grid, and then only where an answer changes.

Among cells of one mode (Question.mode) more memory is taken not to be worse: what a cell answers with yes, larger ones answer
so too, and with no, smaller ones. Across modes nothing follows, but what is larger than any yes is not among the smallest. A
cell that can be left alone by this is. Where the rule does not hold (in one mode a smaller cell says yes and a larger one no)
every cell between the two is run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from pensieve.results.size_map import Place

COARSE = 4
"""Cells along each side of the coarse grid."""

Answers = Sequence[bool]
"""Of one cell, one a question."""

Mode = Callable[[Place], str]
"""Of a cell, whether it has run or not; see Question.mode."""


def coarse(count: int) -> list[int]:
    """Indices of so many sizes, evenly spread, both ends among them."""
    steps = min(count, COARSE) - 1
    return sorted({round(step * (count - 1) / steps) for step in range(steps + 1)}) if steps > 0 else [0]


def lacking(
    shape: tuple[int, int],
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


def _grid(shape: tuple[int, int], mode: Mode) -> set[Place]:
    """The coarse grid, and where the mode changes in one of its rows the two cells beside the change."""
    found = set()
    for gpu in coarse(shape[0]):
        found |= {(gpu, cpu) for cpu in coarse(shape[1])}
        for place, larger in pairwise((gpu, cpu) for cpu in range(shape[1])):
            if mode(place) != mode(larger):
                found |= {place, larger}
    return found


def _open(waiting: Collection[Place], known: Mapping[Place, bool], mode: Mode) -> set[Place]:
    """Those of `waiting` that may be among the smallest to say yes, or whose answer follows both ways."""
    found = set()
    for place in waiting:
        smaller = [other for other, answer in known.items() if answer and _within(other, place)]
        no = any(not answer and _within(place, other) and mode(place) == mode(other) for other, answer in known.items())
        alike = any(mode(place) == mode(other) for other in smaller)
        if (no and alike) or not (no or smaller):
            found.add(place)
    return found


def _splitting(cells: Collection[Place]) -> Place:
    """The one whose answer settles most of the others, whichever it is."""

    def settled(place: Place) -> int:
        return min(sum(_within(place, other) for other in cells), sum(_within(other, place) for other in cells))

    return max(sorted(cells), key=settled)


def _connected(cells: Collection[Place], mode: Mode) -> Iterator[set[Place]]:
    """Parts of one mode that do not touch another of it, not even at a corner."""
    left = set(cells)
    while left:
        part, edge = set(), {left.pop()}
        while edge:
            part |= edge
            edge = {
                place for place in left if any(_touches(place, other) and mode(place) == mode(other) for other in edge)
            }
            left -= edge
        yield part


def _touches(one: Place, other: Place) -> bool:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1])) <= 1


def _within(smaller: Place, larger: Place) -> bool:
    """No tier of it is larger."""
    return smaller[0] <= larger[0] and smaller[1] <= larger[1]


def _places(shape: tuple[int, int]) -> Iterator[Place]:
    return ((gpu, cpu) for gpu in range(shape[0]) for cpu in range(shape[1]))
