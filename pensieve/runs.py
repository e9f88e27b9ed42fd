"""Half-open intervals of positions, and of chunks."""

from __future__ import annotations

from collections.abc import Iterable

Run = tuple[int, int]
"""Half-open interval of positions."""

ChunkRun = tuple[int, int]
"""Half-open interval of a session's chunks, by index."""


def without(runs: Iterable[Run], gone: Iterable[Run]) -> tuple[Run, ...]:
    """Return what is left of `runs` once the intervals `gone` are cut out of them."""
    left = list(runs)
    for first, last in gone:
        parts = [((start, min(stop, first)), (max(start, last), stop)) for start, stop in left]
        left = [part for both in parts for part in both if part[0] < part[1]]
    return tuple(left)


def tokens_in(runs: Iterable[Run]) -> int:
    """How many positions the runs have together."""
    total = 0
    for start, stop in runs:
        total += stop - start
    return total


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join neighbouring intervals. runs: ascending."""
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
