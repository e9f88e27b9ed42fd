from __future__ import annotations

import pytest

from pensieve.bench.idle import gaps_pct


def test_gaps_are_what_no_span_covers() -> None:
    assert gaps_pct([(0, 4), (2, 5), (7, 10)]) == pytest.approx(20.0)  # 5..7 of 0..10
    assert gaps_pct([(3, 9), (4, 5), (9, 12)]) == 0.0


def test_without_kernels_there_is_no_share() -> None:
    assert gaps_pct([]) is None
