"""What a session does to its own tokens."""

from __future__ import annotations

from array import array

import pytest

from pensieve.core.session import Session, common_prefix


@pytest.mark.parametrize(
    ("length", "before", "computed"), [(6, None, 6), (6, 4, 4), (6, 9, 6), (9, None, 8), (9, 5, 5), (0, None, 0)]
)
def test_a_rollback_leaves_as_much_computed_as_there_was(length: int, before: int | None, computed: int) -> None:
    session = Session("a", 0, 0.0, 0.0)
    session.extend(range(9))
    session.advance(8)
    session.rollback(length, before)
    assert (len(session.tokens), session.computed) == (length, computed)


@pytest.mark.parametrize("length", [0, 1, 2, 31, 32, 33, 100])
def test_the_common_prefix_ends_at_the_first_difference(length: int) -> None:
    one, other = array("i", range(100)), array("i", range(100))
    assert common_prefix(one, other[:length]) == length
    if length < 100:
        other[length] = -1
        assert common_prefix(one, other) == length
