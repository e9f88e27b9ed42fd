"""Which cells of a map to run next: a coarse grid, and then only where an answer changes between two cells.

A rectangle whose four corners give the same answers is left alone: what lies inside is taken to answer as they do, which
holds where more memory is never worse. Any other is cut in halves along both sides until its corners are neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import pairwise

from pensieve.results.size_map import Place

COARSE = 4
"""Cells along each side of the coarse grid."""

Rectangle = tuple[int, int, int, int]  # first and last index of the GPU sizes, then of the CPU sizes


def coarse(count: int) -> list[int]:
    """Indices of so many sizes, evenly spread, both ends among them."""
    steps = min(count, COARSE) - 1
    return sorted({round(step * (count - 1) / steps) for step in range(steps + 1)}) if steps > 0 else [0]


def lacking(shape: tuple[int, int], answer: Callable[[Place], Hashable | None]) -> set[Place]:
    """The cells to run next. answer: of a cell; None: not known yet. Empty: the map is as fine as it need be."""
    found: set[Place] = set()
    waiting = list(_rectangles(coarse(shape[0]), coarse(shape[1])))
    while waiting:
        rectangle = waiting.pop()
        corners = _corners(rectangle)
        answers = {answer(place) for place in corners}
        if None in answers:
            found |= {place for place in corners if answer(place) is None}
        elif len(answers) > 1:
            waiting += _quarters(rectangle)
    return found


def _rectangles(rows: list[int], columns: list[int]) -> Iterator[Rectangle]:
    for first, last in _sides(rows):
        for left, right in _sides(columns):
            yield first, last, left, right


def _sides(indices: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(indices)) or [(indices[0], indices[0])]


def _corners(rectangle: Rectangle) -> set[Place]:
    first, last, left, right = rectangle
    return {(first, left), (first, right), (last, left), (last, right)}


def _quarters(rectangle: Rectangle) -> list[Rectangle]:
    """Its parts; none where it cannot be cut."""
    first, last, left, right = rectangle
    parts = list(_rectangles(_halves(first, last), _halves(left, right)))
    return parts if len(parts) > 1 else []


def _halves(low: int, high: int) -> list[int]:
    return [low, (low + high) // 2, high] if high - low > 1 else sorted({low, high})
