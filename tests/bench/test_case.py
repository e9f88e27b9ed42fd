from __future__ import annotations

import pytest

from pensieve.lab.bench.case import Case, Measured, Result


def test_the_value_is_the_median_and_five_have_no_interval() -> None:
    measured = Measured("ours", [5.0, 1.0, 2.0, 4.0, 100.0])
    assert measured.value == 4.0
    assert measured.interval is None  # not even lowest and highest give 95 %


@pytest.mark.parametrize(("n", "outer"), [(6, 0), (8, 0), (9, 1), (12, 2), (25, 7)])
def test_the_interval_is_the_narrowest_pair_of_order_statistics_with_95_percent(n: int, outer: int) -> None:
    """outer: of a table of the sign test at 5 % (two-sided), how many values are left out at each end."""
    values = [float(i) for i in range(n)]
    assert Measured("ours", values).interval == (values[outer], values[n - 1 - outer])


def test_a_case_without_limit_or_peer_says_what_is_missing() -> None:
    ours, peer = Measured("ours", [1.0]), Measured("sdpa", [2.0])
    assert Result("kernel", Case("decode 1", 0.5), [ours, peer]).gaps == []
    assert "no limit" in Result("kernel", Case("decode 1", None), [ours, peer]).gaps[0]
    gaps = Result("kernel", Case("decode 1", 0.5), [ours, Measured("sdpa", error="it is not installed.")]).gaps
    assert gaps == ["kernel decode 1: no peer ran beside it (sdpa: it is not installed)."]
    gaps = Result("kernel", Case("decode 1", 0.5), [Measured("ours", error="boom"), peer]).gaps
    assert gaps == ["kernel decode 1: nothing was measured for ours (ours: boom)."]


def test_another_backend_may_be_the_one_that_is_judged() -> None:
    case = Case("swap in", 1.0, ours="pipelined")
    assert Result("swap", case, [Measured("pipelined", [1.0]), Measured("sequential", [2.0])]).gaps == []
    assert len(Result("swap", case, [Measured("sequential", [2.0])]).gaps) == 1


def test_a_peer_that_is_needed_is_not_replaced_by_another() -> None:
    case = Case("agents", 1.0, needs=("transformers_cb",))
    some = [Measured("ours", [1.0]), Measured("stateless", [2.0])]
    assert Result("serve", case, [*some, Measured("transformers_cb", [1.0])]).gaps == []
    failed = Measured("transformers_cb", error="out of memory.")
    assert Result("serve", case, [*some, failed]).gaps == [
        "serve agents: transformers_cb did not run beside it (out of memory)."
    ]
    assert "not tried" in Result("serve", case, some).gaps[0]
