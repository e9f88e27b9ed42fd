from array import array

import pytest

import pensieve.lab.metrics
from pensieve.core.plan import StartReport
from pensieve.lab.metrics import Measurement, MetricValue, Slo, slo_metrics, summarise, thin_percentiles
from pensieve.lab.replay import replay
from pensieve.lab.turns import Turns
from pensieve.lab.workload.chat import ChatWorkload
from pensieve.serve.record import TurnRecord
from tests.scripted import Latency, ScriptedSystem, context


def table(metrics):
    found = {(metric.name, metric.label): metric for metric in metrics}
    assert len(found) == len(metrics), "a metric occurs twice"
    return found


def turn(session="a", number=1, status="completed", phase="chat", label="", **fields):
    record = TurnRecord(session, number, status=status, phase=phase, label=label)
    for name, content in {"finished_s": 1.0, "latency_ms": 100.0, "output_tokens": 4, **fields}.items():
        setattr(record, name, content)
    return record


def counts(gpu, cpu, recomputed, new):
    history = gpu + (cpu or 0) + (recomputed or 0)
    return {
        "gpu_hit_tokens": gpu, "cpu_hit_tokens": cpu, "recomputed_tokens": recomputed, "history_tokens": history,
        "shared_hit_tokens": 0, "new_tokens": new, "prompt_tokens": history + new,
    }  # fmt: skip


def measurement(*turns, counters=None, start=0.0, end=10.0):
    return Measurement(Turns.of(turns), start, end, measured_from_s=0.0, ended_s=20.0, counters=counters or {})


@pytest.mark.parametrize("started_at_s", [0.0, 77.7])
def test_scripted_latencies_come_back_within_a_millisecond(started_at_s):
    """Turn k waits 10 k ms, has its first token 40 ms later and a token every 5 ms from there on."""
    system = ScriptedSystem(
        lambda request: Latency(queue=10 * request.turn, first=40, gap=5), started_at_s=started_at_s
    )
    workload = ChatWorkload(context(), min_turns=8, max_turns=8, max_new_tokens=20, timeout_s=60.0)
    record = replay(system, workload)
    metrics = table(summarise(record.measurement, system.start()))
    for number in range(1, 9):
        metric = metrics["ttft_ms_p50", f"turn={number}"]
        assert metric.value == pytest.approx(40 + 10 * number, abs=1.0)
        assert (metric.n, metric.unit) == (8, "ms")
    near = {
        "ttft_ms_mean": 40 + 45, "ttft_ms_p50": 40 + 40, "ttft_ms_p90": 40 + 80, "queue_ms_mean": 45,
        "latency_ms_mean": 85 + 19 * 5, "warmup_ms_mean": 40 + 15 + 95,
    }  # fmt: skip
    assert {name: metrics[name, ""].value for name in near} == pytest.approx(near, abs=1.0)
    measured = [turn for turn in record.turns if turn.phase == "chat"]
    span = max(turn.finished_s for turn in measured) - min(turn.intended_s for turn in measured)
    nearer = {
        "tpot_ms_mean": 5, "itl_ms_p99": 5, "normalized_latency_ms_mean": 180 / 20, "load_s": 1.5,
        "engine_warmup_ms": 250.0, "makespan_output_tok_s": 64 * 20 / span, "schedule_ms_mean": 0.2,
        "evicted_chunks": 64,
    }  # fmt: skip
    assert {name: metrics[name, ""].value for name in nearer} == pytest.approx(nearer, rel=1e-3)
    assert metrics["itl_ms_mean", ""].n == 64 * 19


LATE = [turn(finished_s=11.0), turn("b", finished_s=12.0)]
PREPARED = [
    turn("w", 1, phase="warmup", ttft_ms=500.0, latency_ms=500.0, sent_bytes=1000, **counts(90, 0, 0, 10)),
    turn("a", 3, phase="rewarm", ttft_ms=400.0, latency_ms=400.0, sent_bytes=1000),
]
LABELLED = [
    turn("a", 1, phase="hit", label="hit", ttft_ms=10.0, **counts(10, 0, 0, 5)),
    turn("a", 2, label="miss", ttft_ms=90.0, **counts(0, 0, 10, 5)),
]
MOVED = [turn("a", n, sent_bytes=s, received_bytes=10, h2d_bytes=16, d2h_bytes=8) for n, s in ((1, 30), (2, 10))]
UNCOUNTED = [turn("a", 1, sent_bytes=30), turn("a", 2), turn("a", 3, status="timeout")]
REASONS = [("refused", "capacity"), ("refused", "context"), ("failed", None), ("completed", "length")]
FLOW = ("throughput_req_s", "throughput_output_tok_s", "throughput_total_tok_s")


@pytest.mark.parametrize(
    ("turns", "expected", "where"),
    [
        (
            [turn("a", at + 1, finished_s=float(at), prompt_tokens=16) for at in range(20)],
            {**dict(zip(FLOW, (1.0, 4.0, 20.0), strict=True)), "makespan_output_tok_s": 80 / 20},
            {"start": 4.5, "end": 9.5},
        ),
        # Nothing finished in the window: that says nothing of how fast it was served
        (LATE, {**dict.fromkeys(FLOW), "makespan_output_tok_s": 8 / 20}, {}),
        ([*LATE, turn("c", finished_s=10.0)], {"throughput_req_s": 0.1}, {}),
        (
            [turn("a", 1, **counts(0, 0, 0, 10)), turn("a", 2, **counts(10, 20, 10, 40)), turn("b", **counts(60, 0, 0, 20))],
            {"gpu_hit_rate": 0.7, "cpu_hit_rate": 0.2, "miss_rate": 0.1, "prompt_hit_rate": 90 / 170},
            {},
        ),
        ([turn(**counts(0, 0, 0, 10))], {"gpu_hit_rate": None, "prompt_hit_rate": 0.0}, {}),
        # An engine that reports cached tokens alone has no CPU tier of ours
        (
            [turn(**{**counts(30, None, None, 20), "history_tokens": 50, "prompt_tokens": 70})],
            {"gpu_hit_rate": 0.6, "cpu_hit_rate": None, "miss_rate": None, "prompt_hit_rate": 30 / 70},
            {},
        ),
        # What prepares, and what was never admitted, is in no rate and in no latency
        (
            [*PREPARED, turn("a", 1, status="refused", latency_ms=5.0), turn("a", 2, ttft_ms=10.0, **counts(10, 0, 30, 10))],
            {"gpu_hit_rate": 0.25, "ttft_ms_mean": 10.0, "warmup_ms_mean": 500.0},
            {},
        ),
        (
            [turn("a", ttft_ms=10.0), turn("b", status="timeout", ttft_ms=9000.0), turn("c", status="failed")],
            {"ttft_ms_mean": 10.0, "turns[completed]": 1, "turns[timeout]": 1, "turns[failed]": 1, "turns[refused]": 0},
            {},
        ),
        (
            LABELLED,
            {"ttft_ms_mean[hit]": 10.0, "ttft_ms_mean[miss]": 90.0, "gpu_hit_rate[miss]": 0.0, "ttft_degradation_pct": None},
            {},
        ),
        (
            [turn("a", recomputed_tokens=5, resumed_recomputed_tokens=2), turn("b", status="refused")],
            {"recomputed_tokens": 7.0},
            {},
        ),
        # d2h_bytes: also what no turn waited for
        (
            [*PREPARED, *MOVED],
            {
                "h2d_bytes": 32.0, "h2d_bytes_per_token": 4.0, "d2h_bytes": 400.0, "sent_bytes_per_token": 5.0,
                "swapped_in_bytes": 640.0, "swapped_out_bytes": None,
            },
            {"counters": {"h2d_bytes": 800.0, "d2h_bytes": 400.0, "swapped_in_bytes": 640.0}},
        ),
        # Bytes that nobody counted of a turn that completed are the system's, or none
        (
            UNCOUNTED,
            {"h2d_bytes": 800.0, "d2h_bytes": None, "sent_bytes": None, "sent_bytes_per_token": None},
            {"counters": {"h2d_bytes": 800.0}},
        ),
        ([UNCOUNTED[0], UNCOUNTED[2]], {"sent_bytes": 30.0}, {}),
        ([turn(f"s{n}", status=one, finish_reason=why) for n, (one, why) in enumerate(REASONS)], {"oom_turns": 1.0}, {}),
        ([], {"ttft_ms_mean": None, "gpu_hit_rate": None, "load_s": 2.0}, {}),
    ],
)  # fmt: skip
def test_what_is_made_of_the_records(turns, expected, where):
    metrics = summarise(measurement(*turns, **where), StartReport(2.0, 30.0))
    found = {f"{name}[{label}]" if label else name: metric.value for (name, label), metric in table(metrics).items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_an_objective_is_met_only_by_completed_turns_within_both():
    def timed(session, ttft_ms, gap_ms, **fields):
        first = ttft_ms / 1e3
        emitted = array("d", [first + index * gap_ms / 1e3 for index in range(4)])
        return turn(session, ttft_ms=ttft_ms, first_token_s=first, emitted_s=emitted, finished_s=emitted[-1], **fields)

    def under(slo, *turns):
        metrics = slo_metrics(Turns.of(turns), 0.0, 10.0, slo)
        return tuple(metric.value for metric in metrics)

    turns = [timed("a", 100, 10), timed("b", 300, 10), timed("c", 100, 50), timed("d", 100, 10, status="timeout")]
    assert under(Slo(ttft_ms=200, tpot_ms=20), *turns, turn("e", output_tokens=1)) == pytest.approx((0.1, 0.2))
    assert under(Slo(ttft_ms=200), *turns) == pytest.approx((0.2, 0.5))
    assert under(Slo(tpot_ms=60), turn("one", ttft_ms=1.0, first_token_s=0.5, output_tokens=1)) == pytest.approx(
        (0.1, 1.0)
    )
    assert under(Slo(ttft_ms=0.0), *turns) == (0.0, 0.0)
    assert under(Slo(), *turns) == ()
    assert under(Slo(ttft_ms=1000.0), *LATE) == (None, 0.0)
    assert under(Slo(ttft_ms=1000.0), *LATE, turn("c", finished_s=10.0, ttft_ms=5000.0))[0] == 0.0, "it missed it"


def test_intervals_come_from_conversations_and_need_five():
    def mean_of(conversations):
        turns = (
            turn(f"s{c}", number, ttft_ms=10.0 * number * c) for c in range(1, conversations + 1) for number in (1, 2)
        )
        return table(summarise(measurement(*turns)))["ttft_ms_mean", ""]

    assert (mean_of(4).ci_low, mean_of(4).n) == (None, 8)
    found = mean_of(5)
    assert found.value == pytest.approx(45.0)
    assert found.ci_low < found.value < found.ci_high


def test_percentiles_of_too_few_values_are_named():
    metrics = summarise(measurement(*(turn(f"s{index}", ttft_ms=float(index)) for index in range(30))))
    thin = thin_percentiles(metrics)
    assert {"ttft_ms_p90", "ttft_ms_p99", "itl_ms_p50"} <= set(thin)  # no tokens were timed at all
    assert "ttft_ms_p50" not in thin
    assert not MetricValue("ttft_ms_mean", 1.0, n=1).thin


def test_more_times_between_tokens_than_memory_holds_have_no_interval_and_the_same_values(monkeypatch):
    record = replay(ScriptedSystem(lambda request: Latency(first=40, gap=3 + request.id % 7)), ChatWorkload(context()))
    held = table(summarise(record.measurement))
    monkeypatch.setattr(pensieve.lab.metrics, "MOST_IN_MEMORY", 100)
    read = table(summarise(record.measurement))
    times = [held.pop((f"itl_ms_{one}", "")) for one in ("mean", "p50", "p90", "p99")]
    again = [read.pop((f"itl_ms_{one}", "")) for one in ("mean", "p50", "p90", "p99")]
    assert held == read, "all else is as it was"
    assert [one.value for one in again] == pytest.approx([one.value for one in times], rel=1e-12)
    assert [(one.n, one.unit, one.n_unit, one.ci_low) for one in again] == [(times[0].n, "ms", "tokens", None)] * 4
    assert times[0].ci_low is not None
