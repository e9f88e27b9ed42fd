from io import StringIO

import pandas as pd
import pytest
from rich.console import Console

from pensieve.lab.results.store import ResultsStore
from pensieve.lab.trial.fidelity import (
    FLOW,
    TTFT,
    Compared,
    Observed,
    errors_of,
    fidelity_here,
    mean_of,
    real_against_real,
    verdict_here,
    within,
)
from pensieve.lab.trial.job import MEASURED_AT
from tests.results.trials import MEMORY, add_trial, open_sweep, turn

RATES = ("gpu_hit_rate", "cpu_hit_rate", "miss_rate")


def errors(rates, flow, ttft):
    return pd.Series({**dict(zip(RATES, rates, strict=True)), FLOW: flow, TTFT: ttft}, dtype=float)


def equal(found, expected):
    pd.testing.assert_series_equal(found, expected, check_names=False)
    return True


def observed(gpu=0.5, cpu=0.3, flow=100.0, **ttft_ms):
    rates = dict(zip(RATES, (gpu, cpu, None if gpu is None else 1 - gpu - cpu), strict=True))
    return Observed(
        pd.Series({**rates, FLOW: flow}, dtype=float), pd.Series({(name, 1): ms for name, ms in ttft_ms.items()})
    )


def test_a_trial_is_held_against_the_median_of_the_repeats():
    real = [observed(flow=flow, a=a, b=20.0) for flow, a in ((90.0, 8.0), (100.0, 10.0), (200.0, 40.0))]
    found = errors_of(observed(gpu=0.505, cpu=0.28, flow=104.0, a=11.0, b=16.0), real)
    assert equal(found, errors((0.5, -2.0, 1.5), 4.0, (10 + 20) / 2))  # cpu: 28 against 30 %
    assert not within(found)
    assert within(errors_of(real[1], real))


def test_only_turns_that_all_have_are_compared_and_nothing_is_no_zero():
    found = errors_of(observed(a=11.0, c=99.0), [observed(a=10.0, b=1.0)])
    assert found[TTFT] == pytest.approx(10.0)
    nothing = errors_of(observed(gpu=None, cpu=None, flow=None), [observed(a=10.0)])
    assert nothing.isna().all()


def test_a_machine_against_itself():
    assert real_against_real([observed(a=1.0)]) is None
    assert equal(real_against_real([observed(a=1.0)] * 3), errors((0.0, 0.0, 0.0), 0.0, 0.0))
    spread = real_against_real([observed(flow=100.0, a=10.0), observed(gpu=0.48, flow=110.0, a=10.0)])
    assert equal(spread.abs(), errors((2.0, 0.0, 2.0), (100 * (1 - 100 / 110) + 10.0) / 2, 0.0))


def of(hits, throughput, ttft):
    return errors((hits, 0.0, None), throughput, ttft)


def place(hits, throughput, ttft, real=None, repeats=5):
    return Compared("pressure=4", repeats, of(hits, throughput, ttft), of(0.0, 1.0, 2.0) if real is None else real)


def test_the_verdict_says_where_it_fails_and_whether_the_machine_was_busy():
    assert verdict_here([place(1.0, -5.0, 10.0)]).startswith("Verdict: holds. All 1 places")
    for off in ((1.1, 0.0, 0.0), (-1.1, 0.0, 0.0), (0.0, -5.1, 0.0), (0.0, 0.0, 10.1)):
        assert "fails at 1 of 1 places: pressure=4" in verdict_here([place(*off)])
    assert "the machine differs from itself" in verdict_here([place(1.1, 20.0, 0.0, of(3.0, 20.0, 0.0))])
    assert "the machine differs from itself" not in verdict_here([place(1.1, 0.0, 0.0)])


def swept(real, simulated, real_at=(), simulated_at=()):
    """A sweep over both machines: a turn a trial, first tokens as given. *_at: when the profile of each was measured."""
    store = ResultsStore(MEMORY)
    sweep_id = open_sweep(store, hardware="local,sim_paired", repeat="0,1", baseline="pensieve")
    jobs = [
        ("local", repeat, ms, dict(zip((MEASURED_AT,), real_at[repeat:], strict=False)))
        for repeat, ms in enumerate(real)
    ]
    for repeat, ms in enumerate(simulated):
        measured = dict(zip(("at",), simulated_at[repeat:], strict=False))
        jobs.append(("sim_paired", repeat, ms, {"cost": {"kind": "machine profile", "measured": measured}}))
    for job, (hardware, repeat, ms, engine) in enumerate(jobs):
        metrics = {"gpu_hit_rate": 0.5, "cpu_hit_rate": 0.25, "miss_rate": 0.25, "throughput_output_tok_s": 1000 / ms}
        add_trial(
            store, sweep_id, job, "pensieve", [turn("a", 2, ms)], metrics, repeat=repeat, hardware=hardware,
            simulated=hardware != "local", engine=engine, config={"hardware": {"name": hardware}},
        )  # fmt: skip
    return store, sweep_id


def printed(store, sweep_id):
    written = StringIO()
    Console(width=120, file=written).print(fidelity_here(store, sweep_id))
    return " ".join(written.getvalue().split())


def test_a_sweep_over_both_machines_has_a_verdict_and_any_other_has_none():
    text = printed(*swept([9.0, 10.0, 11.0], [10.4]))
    assert "n GPU CPU missed tok/s TTFT" in text
    assert "3 +0.0/0.0 +0.0/0.0 +0.0/0.0 -3.8/13.8 4.0/14.4" in text
    assert "Verdict: holds" in text
    assert "fails at 1 of 1" in printed(*swept([9.0, 10.0, 11.0], [12.0]))
    hidden = printed(*swept([10.0, 10.0, 10.0], [10.0, 10.0, 13.0]))  # one that is off, among two that are not
    assert "-7.7/0.0 10.0/0.0" in hidden and "fails at 1 of 1" in hidden  # a third of 23.1 and of 30 %


def test_what_cannot_be_told_does_not_hold():
    assert not within(of(0.0, None, 0.0)) and not within(of(0.0, 0.0, None))
    assert within(errors((None, None, None), 0.0, 0.0))  # no history
    none = mean_of([of(0.0, 1.0, 2.0), of(0.0, None, 2.0)])
    assert pd.isna(none[FLOW]) and none[TTFT] == 2.0
    assert mean_of([of(0.0, -1.0, 2.0), of(0.0, -3.0, 2.0), of(0.0, 1.0, 2.0)])[FLOW] == pytest.approx(-5 / 3)


def test_a_simulation_by_another_profile_than_its_real_trial_measured_is_named():
    at = [f"2026-11-23T02:0{minute}:00.000+00:00" for minute in range(3)]
    assert "Verdict: holds" in printed(*swept([10.0, 10.0], [10.0, 10.0], at[:2], at[:2]))
    other = printed(*swept([10.0, 10.0], [10.0, 10.0], at[:2], [at[0], at[2]]))
    assert "fails at 1 of 1" in other and "1 simulations go by a profile that the real trial" in other
    swapped = printed(*swept([10.0, 10.0], [10.0, 10.0], at[:2], at[1::-1]))
    assert "2 simulations go by a profile" in swapped
    assert fidelity_here(*swept([9.0, 10.0], [])) is None
