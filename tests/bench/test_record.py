from __future__ import annotations

import pytest

from pensieve.lab.bench.case import Case, Figure, Measured
from tests.bench.bench import make_bench


def test_every_backend_of_a_case_is_a_trial_with_the_floor_as_its_limit(tmp_path):
    bench = make_bench("swap", tmp_path)
    case = Case(
        "swap in 64", 2.0, "bytes at copy rate", metric="restore_ms", parameters={"blocks": 64}, ours="pipelined"
    )
    pipelined = Measured("pipelined", [3.0, 2.5, 4.0], figures=[Figure("overlap_pct", 90.0)], engine={"streams": 2})
    bench.record(case, [pipelined, Measured("sequential", [5.0], "1.2"), Measured("driver", error="there is none")])
    bench.records.close("completed")
    store = bench.tracking.store
    jobs = store.trials_of_sweep(bench.records.sweep_id)
    assert [job.last.baseline for job in jobs] == ["pipelined", "sequential", "driver"]
    assert [job.last.status for job in jobs] == ["completed", "completed", "failed"]
    assert jobs[2].last.error == "there is none"
    trial = jobs[0].last
    assert (trial.workload, trial.simulated, trial.contended, trial.device) == (
        "bench_swap",
        False,
        True,
        "a processor",
    )
    assert trial.config["bench"] == {"target": "swap", "case": "swap in 64", "metric": "restore_ms", "blocks": 64}
    assert trial.engine["streams"] == 2 and trial.engine["values"] == [3.0, 2.5, 4.0]
    assert trial.engine["limits"] == {"copy_bytes_s": 1e9, "matrix_flops_s": 1e9}
    assert trial.code_hash and trial.environment["packages"]["torch"]
    assert jobs[1].last.engine["version"] == "1.2"
    metric = jobs[0].metrics["restore_ms", "swap in 64"]
    assert (metric.value, metric.ci_low, metric.ci_high, metric.n, metric.limit_value) == (3.0, None, None, 3, 2.0)
    assert jobs[0].metrics["overlap_pct", "swap in 64"].value == 90.0
    sweep = store.sweep(bench.records.sweep_id)
    assert (sweep.name, sweep.experiment, sweep.status, sweep.n_expected) == ("bench_swap", "bench", "completed", 3)
    assert store.latest_sweep() is None  # tables and figures of "the latest sweep" mean one of trials


def test_the_same_case_again_is_another_attempt_of_the_same_trial(tmp_path):
    for value in (1.0, 2.0):
        bench = make_bench("kernel", tmp_path)
        bench.record(Case("decode", 0.5), [Measured("ours", [value])])
    jobs = bench.tracking.store.trials_of_sweep(bench.records.sweep_id)
    assert [(job.last.attempt, job.value("time_ms", "decode")) for job in jobs] == [(2, 2.0)]


@pytest.mark.parametrize("change", [{"parameters": {"batch": 2}}, {"label": "other"}])
def test_another_case_is_another_trial(tmp_path, change):
    bench = make_bench("kernel", tmp_path)
    bench.record(Case("decode", 0.5), [Measured("ours", [1.0])])
    bench.record(Case(**{"label": "decode", "floor": 0.5, **change}), [Measured("ours", [1.0])])
    first, second = bench.tracking.store.trials_of_sweep(bench.records.sweep_id)
    assert first.last.fingerprint != second.last.fingerprint
