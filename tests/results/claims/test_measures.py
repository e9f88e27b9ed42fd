"""Each reduction on a small database whose answer is known."""

import pytest

from pensieve.errors import MissingSeries
from pensieve.lab.results.claims.measures import crossing
from tests.results.claims.synthetic import measure, numbered, sweep, talk
from tests.results.trials import turn

FAST, SLOW = talk(10.0, 20.0, 30.0), talk(10.0, 40.0, 90.0)


def both(ours=FAST, theirs=SLOW, **kw):
    return sweep({"pensieve": ours, "stateless": theirs}, **kw)


@pytest.mark.parametrize(("turn_", "expected"), [(1, 1.0), (2, 2.0), (3, 3.0), ("first", 1.0), ("last", 3.0)])
def test_speedup_is_theirs_over_ours_at_a_turn(turn_, expected):
    found = measure(both(), "speedup", theirs="stateless", turn=turn_)
    assert found.value == pytest.approx(expected)
    assert (found.ci_low, found.ci_high) == (pytest.approx(expected), pytest.approx(expected))
    assert (found.n, found.seeds, found.trial_ids) == (20, 5, tuple(range(1, 11)))


def test_speedup_over_all_turns_is_of_each_conversations_mean():
    assert measure(both(), "speedup", theirs="stateless").value == pytest.approx(140 / 60)


def test_swapping_the_baselines_turns_a_speedup_round():
    straight = measure(both(), "speedup", theirs="stateless", turn=3)
    swapped = measure(both(SLOW, FAST), "speedup", theirs="stateless", turn=3)
    assert swapped.value == pytest.approx(1 / straight.value)


def test_speedup_takes_the_turns_that_both_have_and_none_of_the_warm_up():
    def ours(seed):
        return numbered([turn("s0", 1, 10.0), turn("s0", 2, 10.0), turn("w", 1, 1.0, phase="warmup")])

    def theirs(seed):
        return numbered(
            [turn("s0", 1, 50.0), turn("s0", 2, 90.0, status="timeout"), turn("w", 1, 999.0, phase="warmup")]
        )

    found = measure(both(ours, theirs), "speedup", theirs="stateless", turn="last")
    assert (found.value, found.n) == (pytest.approx(5.0), 5)


def test_speedup_of_numbers_made_of_two_columns():
    def turns(latency, sent):
        return lambda seed: numbered(
            [turn("a", 1, 1.0, tokens=(1, 2, 3, 4), latency_ms=latency, sent_bytes=sent, received_bytes=20)]
        )

    store = both(turns(40.0, 20), turns(400.0, 3980))
    assert measure(store, "speedup", theirs="stateless", column="normalized_latency_ms").value == pytest.approx(10.0)
    assert measure(store, "speedup", theirs="stateless", column="wire_bytes_per_token").value == pytest.approx(100.0)


def test_a_turn_that_nobody_has_is_named():
    with pytest.raises(MissingSeries, match="no conversation has ttft_ms at turn 9 in both"):
        measure(both(), "speedup", theirs="stateless", turn=9)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([(1.0, 50.0), (2.0, 100.0), (3.0, 200.0)], 2.5),
        ([(1.0, 50.0), (2.0, 150.0)], None),  # reached, not passed
        ([(1.0, 200.0), (2.0, 100.0), (3.0, 300.0)], 2.25),  # noise below the knee: the last crossing counts
        ([(1.0, 50.0), (2.0, 60.0)], None),
        ([(1.0, 250.0), (2.0, 260.0)], None),
        ([(1.0, 50.0)], None),
    ],
)
def test_where_a_latency_passes_its_limit(curve, expected):
    found = crossing(curve, 150.0)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_throughput_at_latency_is_read_between_rates():
    def of(capacity):
        return lambda seed, rate: {
            "throughput_req_s": float(rate),
            "normalized_latency_ms_p90": 100.0 * rate / capacity,
        }

    axis = "workload.request_rate"
    metrics = {"pensieve": of(3.0), "stateless": of(2.0)}
    turns = {name: lambda seed, rate: talk(10.0)(seed) for name in metrics}
    store = sweep(turns, seeds=5, metrics=metrics, axis=axis, values=[1, 2, 3, 4])
    found = measure(store, "throughput_at_latency_ratio", theirs="stateless", over=axis, limit=120.0)
    assert (found.value, found.ci_low, found.n) == (pytest.approx(3.6 / 2.4), pytest.approx(1.5), 5)
    with pytest.raises(MissingSeries, match="crosses 900 ms"):
        measure(store, "throughput_at_latency_ratio", theirs="stateless", over=axis, limit=900.0)


def test_throughput_at_latency_needs_rates():
    store = both(metrics={"pensieve": lambda s: {"throughput_req_s": 1.0, "normalized_latency_ms_p90": 1.0}})
    with pytest.raises(MissingSeries, match="request_rate is not set to a number"):
        measure(store, "throughput_at_latency_ratio", theirs="stateless", over="workload.request_rate", limit=1.0)
