"""A case, its table, the trials that it is recorded as, and how its backends are timed."""

from dataclasses import replace

import pytest
import torch

from pensieve.lab.bench import case
from pensieve.lab.bench.case import Case, Measured, interleaved, table
from tests.bench.bench import make_bench

CASE = Case("decode 1", 0.5, "bytes over bandwidth", "time_ms")
OURS, PEER = Measured("ours", [1.0]), Measured("sdpa", [2.0])


@pytest.mark.parametrize(("n", "outer"), [(6, 0), (9, 1), (25, 7)])
def test_the_interval_is_the_narrowest_pair_of_order_statistics_with_95_percent(n, outer):
    """outer: of a table of the sign test at 5 % (two-sided), how many values are left out at each end."""
    values = [float(i) for i in range(n)]
    assert Measured("ours", values).interval == (values[outer], values[n - 1 - outer])


@pytest.mark.parametrize(
    ("asked", "measured", "gaps"),
    [
        ({}, [OURS, PEER], []),
        ({}, [OURS, Measured("sdpa", error="it is gone.")], ["no peer ran beside it (sdpa: it is gone)"]),
        ({"ours": "sdpa"}, [OURS], ["nothing was measured for sdpa"]),
        ({"peer": "cb"}, [OURS, PEER], ["no peer ran beside it"]),
        ({"peer": "cb"}, [OURS, PEER, Measured("cb", [1.0])], []),
    ],
)
def test_a_case_without_ours_or_its_peer_says_what_is_missing(asked, measured, gaps):
    assert Case("decode 1", 0.5, "", "time_ms", **asked, measured=measured).gaps == [
        f"decode 1: {gap}." for gap in gaps
    ]


def test_the_table_holds_each_backend_against_limit_and_peer_and_a_limit_that_is_beaten_gets_a_word():
    both = [Measured("ours", [1.0], figures={"matrix_rate_pct": 0.25}), Measured("sdpa", [0.4], "2.13")]
    found = replace(CASE, measured=both)
    ours, peer = table([found])
    assert [*ours.values()] == ["decode 1", "ours", "1", "–", "ms", "0.5", "2.00", "0.40x"]
    assert [*peer.values()] == ["", "sdpa 2.13", "0.4", "–", "ms", "0.5", "0.80", ""]
    said, beaten = found.remarks
    assert said == "decode 1, ours: matrix rate pct 0.25 %"
    assert beaten.startswith("decode 1: sdpa is at 0.80 of the limit (bytes over bandwidth)")


def test_every_backend_of_a_case_is_a_trial_with_the_floor_as_its_limit(tmp_path):
    bench = make_bench("swap", tmp_path)
    swap = Case("swap in 64", 2.0, "bytes at copy rate", "restore_ms", {"blocks": 64}, ours="pipelined")
    pipelined = Measured("pipelined", [3.0, 2.5, 4.0], figures={"overlap_pct": 90.0}, engine={"streams": 2})
    bench.record(swap, [pipelined, Measured("sequential", [5.0], "1.2"), Measured("driver", error="there is none")])
    bench.close("completed")
    store = bench.tracking.store
    jobs = store.trials_of_sweep(bench.sweep_id)
    assert [job.last.baseline for job in jobs] == ["pipelined", "sequential", "driver"]
    assert [job.last.status for job in jobs] == ["completed", "completed", "failed"]
    assert jobs[2].last.error == "there is none"
    trial = jobs[0].last
    assert (trial.workload, trial.device, trial.simulated) == ("bench_swap", "a processor", False)
    assert trial.config["bench"] == {"target": "swap", "case": "swap in 64", "metric": "restore_ms", "blocks": 64}
    assert {"streams": 2, "values": [3.0, 2.5, 4.0], "limits": bench.limits}.items() <= trial.engine.items()
    assert trial.code_hash and trial.environment["packages"]["torch"] and jobs[1].last.engine["version"] == "1.2"
    metric = jobs[0].metrics["restore_ms", "swap in 64"]
    assert (metric.value, metric.ci_low, metric.ci_high, metric.n, metric.limit_value) == (3.0, None, None, 3, 2.0)
    assert jobs[0].metrics["overlap_pct", "swap in 64"].value == 90.0
    sweep = store.sweep(bench.sweep_id)
    assert (sweep.name, sweep.experiment, sweep.status, sweep.n_expected) == ("bench_swap", "bench", "completed", 3)
    assert store.latest_sweep() is None  # tables and figures of "the latest sweep" mean one of trials


CPU = torch.device("cpu")


class Stopped:
    """A clock that only `run` moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 3.0
        monkeypatch.setattr(case, "perf_counter", lambda: self.now_s)

    def run(self, seconds: float) -> None:
        self.now_s += seconds


def test_rounds_alternate_each_begins_with_another_and_short_runs_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Stopped(monkeypatch), list[str]()

    def slow(name: str) -> None:
        calls.append(name)
        clock.run(0.002)

    times = interleaved({"a": lambda: slow("a"), "b": lambda: slow("b")}, 2, CPU, at_least_ms=0.0)
    assert calls == [*"aaaabbbb", "a", "b", "b", "a"]  # two warm calls, one to size and one more each
    assert [[pytest.approx(2.0)] * 2] * 2 == [t.values for t in times.values()]
    calls.clear()
    times = interleaved({"c": lambda: slow("c")}, 1, CPU, at_least_ms=20.0)
    assert (len(calls), times["c"].values) == (2 + 1 + 10 + 10, [pytest.approx(2.0)]), "as many as take 20 ms, divided"


def test_a_backend_that_raises_costs_only_itself() -> None:
    state = [0]

    def late() -> None:
        state[0] += 1
        if state[0] > 4:
            raise ValueError("no more\nsecond line")

    def never() -> None:
        raise NotImplementedError

    times = interleaved({"late": late, "never": never, "fine": lambda: None}, 3, CPU, at_least_ms=0.0)
    assert times["late"].error == "ValueError: no more" and times["late"].values == ()
    assert times["never"].error == "NotImplementedError"
    assert len(times["fine"].values) == 3
