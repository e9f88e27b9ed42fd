"""Doubling, then bisecting: the largest number that is carried, with as few trials as that takes."""

from __future__ import annotations

import pytest

from pensieve.lab.bench.density import Density, largest


@pytest.mark.parametrize("limit", [*range(20), 31, 32, 33])
def test_the_largest_number_is_found_and_bounded(limit: int) -> None:
    tried: list[int] = []

    def carries(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = largest(carries, 32)
    assert found == (Density(limit, limit + 1) if limit < 32 else Density(32, None))
    assert found.bound == ("" if limit < 32 else ">=")
    assert len(tried) == len(set(tried)) <= 11, "no trial twice"
