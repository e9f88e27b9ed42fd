from io import StringIO

import pandas as pd
import pytest
from rich.console import Console

from pensieve.lab.results.store import ResultsStore
from pensieve.lab.trial.fidelity import FLOW, TTFT, Observed, again, errors_of, fidelity_here, holds, mean_of
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


def test_a_trial_is_held_against_the_median_of_the_repeats_in_the_turns_that_all_have():
    real = [observed(flow=flow, a=a, b=20.0) for flow, a in ((90.0, 8.0), (100.0, 10.0), (200.0, 40.0))]
    found = errors_of(observed(gpu=0.505, cpu=0.28, flow=104.0, a=11.0, b=16.0, c=99.0), real)
    assert equal(found, errors((0.5, -2.0, 1.5), 4.0, (10 + 20) / 2))  # cpu: 28 against 30 %
    nothing = errors_of(observed(gpu=None, cpu=None, flow=None), [observed(a=10.0)])
    assert nothing.isna().all()


def test_a_machine_against_itself():
    assert again([observed(a=1.0)]) is None
    assert equal(again([observed(a=1.0)] * 3), errors((0.0, 0.0, 0.0), 0.0, 0.0))
    spread = again([observed(flow=100.0, a=10.0), observed(gpu=0.48, flow=110.0, a=10.0)])
    assert equal(spread.abs(), errors((2.0, 0.0, 2.0), (100 * (1 - 100 / 110) + 10.0) / 2, 0.0))


@pytest.mark.parametrize(
    ("hits", "throughput", "ttft", "within"),
    [
        (1.0, -5.0, 10.0, True),
        (None, 0.0, 0.0, True),  # no history
        (1.1, 0.0, 0.0, False),
        (-1.1, 0.0, 0.0, False),
        (0.0, -5.1, 0.0, False),
        (0.0, 0.0, 10.1, False),
        (0.0, None, 0.0, False),  # what cannot be told
        (0.0, 0.0, None, False),
    ],
)
def test_what_no_error_may_exceed(hits, throughput, ttft, within):
    assert holds(errors((hits, 0.0, None), throughput, ttft)) is within


def test_means_are_of_sizes_with_the_sign_of_the_mean():
    none = mean_of([errors((0.0, 0.0, 0.0), flow, 2.0) for flow in (1.0, None)])
    assert pd.isna(none[FLOW]) and none[TTFT] == 2.0
    each = [errors((0.0, 0.0, 0.0), flow, 2.0) for flow in (-1.0, -3.0, 1.0)]
    assert mean_of(each)[FLOW] == pytest.approx(-5 / 3)


def swept(real, simulated):
    """A sweep over both machines: a turn a trial, first tokens as given."""
    store = ResultsStore(MEMORY)
    sweep_id = open_sweep(store, hardware="local,sim_paired", repeat="0,1", baseline="pensieve")
    profile = {"cost": {"kind": "machine profile"}}
    jobs = [("local", repeat, ms, {}) for repeat, ms in enumerate(real)]
    jobs += [("sim_paired", repeat, ms, profile) for repeat, ms in enumerate(simulated)]
    for job, (hardware, repeat, ms, engine) in enumerate(jobs):
        metrics = {"gpu_hit_rate": 0.5, "cpu_hit_rate": 0.25, "miss_rate": 0.25, "throughput_output_tok_s": 1000 / ms}
        add_trial(
            store, sweep_id, job, "pensieve", [turn("a", 2, ms)], metrics, repeat=repeat, hardware=hardware,
            simulated=hardware != "local", engine=engine, config={"hardware": {"name": hardware}},
        )  # fmt: skip
    return store, sweep_id


def test_a_sweep_over_both_machines_has_a_verdict_and_any_other_has_none():
    def printed(real, simulated):
        written = StringIO()
        Console(width=120, file=written).print(fidelity_here(*swept(real, simulated)))
        return " ".join(written.getvalue().split())

    text = printed([9.0, 10.0, 11.0], [10.4])
    assert "n GPU CPU missed tok/s TTFT" in text
    assert "3 +0.0/0.0 +0.0/0.0 +0.0/0.0 -3.8/13.8 4.0/14.4" in text
    assert "Verdict: holds" in text
    assert "fails at 1 of 1 places: pensieve, seed 0. The limits" in printed([9.0, 10.0, 11.0], [12.0])
    hidden = printed([10.0, 10.0, 10.0], [10.0, 10.0, 13.0])  # one that is off, among two that are not
    assert "-7.7/0.0 10.0/0.0" in hidden and "fails at 1 of 1" in hidden  # a third of 23.1 and of 30 %
    assert fidelity_here(*swept([9.0, 10.0], [])) is None
