from array import array

import pytest

import pensieve.lab.metrics
from pensieve.core.plan import StartReport
from pensieve.lab.metrics import Measurement, MetricValue, Slo, slo_metrics, summarise, thin_percentiles
from pensieve.lab.replay import replay
from pensieve.lab.workload.chat import ChatWorkload
from pensieve.serve.record import TurnRecord
from tests.scripted import Latency, ScriptedSystem, context


def table(metrics):
    found = {(metric.name, metric.label): metric for metric in metrics}
    assert len(found) == len(metrics), "a metric occurs twice"
    return found


def value(metrics, name, label=""):
    return table(metrics)[name, label].value


def turn(session="a", number=1, status="completed", phase="chat", label="", **fields):
    record = TurnRecord(session, number, status=status, phase=phase, label=label)
    for name, content in {"finished_s": 1.0, "latency_ms": 100.0, "output_tokens": 4, **fields}.items():
        setattr(record, name, content)
    return record


def counts(gpu, cpu, recomputed, new, shared=0):
    history = gpu + (cpu or 0) + (recomputed or 0)
    return {
        "gpu_hit_tokens": gpu,
        "cpu_hit_tokens": cpu,
        "recomputed_tokens": recomputed,
        "history_tokens": history,
        "shared_hit_tokens": shared,
        "new_tokens": new,
        "prompt_tokens": history + new,
    }


def measurement(*turns, counters=None, start=0.0, end=10.0):
    return Measurement(turns, start, end, measured_from_s=0.0, ended_s=20.0, counters=counters or {})


@pytest.mark.parametrize("started_at_s", [0.0, 77.7])
def test_scripted_latencies_come_back_within_a_millisecond(started_at_s):
    """Turn k waits 10 k ms, has its first token 40 ms later and a token every 5 ms from there on."""
    system = ScriptedSystem(
        lambda request: Latency(queue=10 * request.turn, first=40, gap=5), started_at_s=started_at_s
    )
    workload = ChatWorkload(context(), min_turns=8, max_turns=8, max_new_tokens=20, timeout_s=60.0)
    record = replay(system, workload)
    metrics = summarise(record.measurement, system.start())
    near = {"abs": 1.0}
    for number in range(1, 9):
        metric = table(metrics)["ttft_ms_p50", f"turn={number}"]
        assert metric.value == pytest.approx(40 + 10 * number, **near)
        assert (metric.n, metric.unit) == (8, "ms")
    assert value(metrics, "ttft_ms_mean") == pytest.approx(40 + 45, **near)
    assert value(metrics, "ttft_ms_p50") == pytest.approx(40 + 40, **near)
    assert value(metrics, "ttft_ms_p90") == pytest.approx(40 + 80, **near)
    assert value(metrics, "queue_ms_mean") == pytest.approx(45, **near)
    assert value(metrics, "tpot_ms_mean") == pytest.approx(5, abs=0.01)
    assert value(metrics, "itl_ms_p99") == pytest.approx(5, abs=0.01)
    assert table(metrics)["itl_ms_mean", ""].n == 64 * 19
    assert value(metrics, "latency_ms_mean") == pytest.approx(85 + 19 * 5, **near)
    assert value(metrics, "normalized_latency_ms_mean") == pytest.approx(180 / 20, abs=0.05)
    assert value(metrics, "warmup_ms_mean") == pytest.approx(40 + 15 + 95, **near)
    assert value(metrics, "load_s") == 1.5
    assert value(metrics, "engine_warmup_ms") == 250.0
    measured = [turn for turn in record.turns if turn.phase == "chat"]
    span = max(turn.finished_s for turn in measured) - min(turn.intended_s for turn in measured)
    assert value(metrics, "makespan_output_tok_s") == pytest.approx(64 * 20 / span)
    assert value(metrics, "schedule_ms_mean") == pytest.approx(0.2)
    assert value(metrics, "evicted_chunks") == 64


def test_throughput_counts_what_finished_in_the_window_and_makespan_everything():
    turns = [turn("a", at + 1, finished_s=float(at), prompt_tokens=16) for at in range(20)]
    metrics = summarise(measurement(*turns, start=4.5, end=9.5))
    assert value(metrics, "throughput_req_s") == pytest.approx(1.0)
    assert value(metrics, "throughput_output_tok_s") == pytest.approx(4.0)
    assert value(metrics, "throughput_total_tok_s") == pytest.approx(20.0)
    assert value(metrics, "makespan_output_tok_s") == pytest.approx(80 / 20)
    assert table(metrics)["throughput_req_s", ""].ci_low is None


def under(slo, *turns):
    whole = measurement(*turns)
    return slo_metrics(turns, whole.measure_start_s, whole.measure_end_s, slo)


def test_a_window_in_which_nothing_finished_gives_no_throughput():
    late = [turn(finished_s=11.0), turn("b", finished_s=12.0)]
    slo = Slo(ttft_ms=1000.0)
    metrics = summarise(measurement(*late))
    for name in ("throughput_req_s", "throughput_output_tok_s", "throughput_total_tok_s"):
        assert value(metrics, name) is None
    assert value(under(slo, *late), "goodput_req_s") is None
    assert value(metrics, "makespan_output_tok_s") == pytest.approx(8 / 20.0)
    inside = (*late, turn("c", finished_s=10.0, ttft_ms=5000.0))
    assert value(summarise(measurement(*inside)), "throughput_req_s") == pytest.approx(0.1)
    assert value(under(slo, *inside), "goodput_req_s") == 0.0  # counted: it missed the objective


def test_rates_are_sums_over_sums_and_add_up_to_one():
    turns = [
        turn("a", 1, **counts(0, 0, 0, 10)),
        turn("a", 2, **counts(10, 20, 10, 40)),
        turn("b", 2, **counts(60, 0, 0, 20)),
    ]
    metrics = summarise(measurement(*turns))
    assert value(metrics, "gpu_hit_rate") == pytest.approx(70 / 100)
    assert value(metrics, "cpu_hit_rate") == pytest.approx(20 / 100)
    assert value(metrics, "miss_rate") == pytest.approx(10 / 100)
    assert value(metrics, "prompt_hit_rate") == pytest.approx(90 / 170)
    assert table(metrics)["gpu_hit_rate", ""].n == 100


def test_no_history_is_no_rate():
    metrics = summarise(measurement(turn(**counts(0, 0, 0, 10))))
    assert value(metrics, "gpu_hit_rate") is None
    assert value(metrics, "prompt_hit_rate") == 0.0


def test_warmup_and_never_admitted_turns_enter_no_rate():
    turns = [
        turn("w", 1, phase="warmup", **counts(90, 0, 0, 10)),
        turn("a", 1, status="refused", latency_ms=5.0),
        turn("a", 2, **counts(10, 0, 30, 10)),
    ]
    assert value(summarise(measurement(*turns)), "gpu_hit_rate") == pytest.approx(0.25)


def test_an_engine_that_reports_only_cached_tokens_has_a_prompt_rate_and_no_cpu_rate():
    metrics = summarise(measurement(turn(**{**counts(30, None, None, 20), "history_tokens": 50, "prompt_tokens": 70})))
    assert value(metrics, "gpu_hit_rate") == pytest.approx(0.6)
    assert value(metrics, "cpu_hit_rate") is None
    assert value(metrics, "miss_rate") is None
    assert value(metrics, "prompt_hit_rate") == pytest.approx(30 / 70)


def test_failures_are_counted_and_do_not_pass_for_latencies():
    turns = [turn("a", 1, ttft_ms=10.0), turn("b", 1, status="timeout", ttft_ms=9000.0), turn("c", 1, status="failed")]
    metrics = summarise(measurement(*turns))
    assert value(metrics, "ttft_ms_mean") == 10.0
    status = {label: metric.value for (name, label), metric in table(metrics).items() if name == "turns"}
    assert status == {"completed": 1, "timeout": 1, "cancelled": 0, "refused": 0, "failed": 1}


def test_an_objective_is_met_only_by_completed_turns_within_both():
    def timed(session, ttft_ms, gap_ms, **fields):
        first = ttft_ms / 1e3
        emitted = array("d", [first + index * gap_ms / 1e3 for index in range(4)])
        return turn(session, ttft_ms=ttft_ms, first_token_s=first, emitted_s=emitted, finished_s=emitted[-1], **fields)

    turns = [timed("a", 100, 10), timed("b", 300, 10), timed("c", 100, 50), timed("d", 100, 10, status="timeout")]
    both = under(Slo(ttft_ms=200, tpot_ms=20), *turns)
    assert value(both, "slo_attainment") == pytest.approx(0.25)
    assert value(both, "goodput_req_s") == pytest.approx(0.1)
    assert value(under(Slo(ttft_ms=200), *turns), "slo_attainment") == pytest.approx(0.5)
    assert under(Slo(), *turns) == []
    assert ("slo_attainment", "") not in table(summarise(measurement(*turns)))


def test_bytes_are_those_of_the_turns_and_a_token_pays_its_share():
    counters = {"h2d_bytes": 800.0, "d2h_bytes": 400.0, "swapped_in_bytes": 640.0}
    own = {"received_bytes": 10, "h2d_bytes": 16, "d2h_bytes": 8}
    turns = [
        turn("w", 1, phase="warmup", sent_bytes=1000, **own),
        turn("a", 1, sent_bytes=30, **own),
        turn("a", 2, sent_bytes=10, **own),
        turn("a", 3, phase="rewarm", sent_bytes=1000, **own),
    ]
    metrics = summarise(measurement(*turns, counters=counters))
    assert value(metrics, "h2d_bytes") == 32.0
    assert value(metrics, "h2d_bytes_per_token") == 4.0
    assert value(metrics, "d2h_bytes") == 400.0, "also what no turn waited for"
    assert value(metrics, "sent_bytes_per_token") == 5.0
    assert value(metrics, "swapped_in_bytes") == 640.0
    assert value(metrics, "swapped_out_bytes") is None


def test_bytes_of_turns_that_nobody_counted_are_the_systems_or_none():
    turns = [turn("a", 1, sent_bytes=30), turn("a", 2), turn("a", 3, status="timeout")]
    metrics = summarise(measurement(*turns, counters={"h2d_bytes": 800.0}))
    assert value(metrics, "h2d_bytes") == 800.0
    assert value(metrics, "d2h_bytes") is None
    assert value(metrics, "sent_bytes") is value(metrics, "sent_bytes_per_token") is None
    counted = [turn("a", 1, sent_bytes=30), turn("a", 2, status="timeout")]
    assert value(summarise(measurement(*counted)), "sent_bytes") == 30.0


def test_labels_have_metrics_of_their_own():
    turns = [
        turn("a", 1, label="hit", ttft_ms=10.0, **counts(10, 0, 0, 5)),
        turn("a", 2, label="miss", ttft_ms=90.0, **counts(0, 0, 10, 5)),
    ]
    metrics = summarise(measurement(*turns))
    assert value(metrics, "ttft_ms_mean", "hit") == 10.0
    assert value(metrics, "ttft_ms_mean", "miss") == 90.0
    assert value(metrics, "gpu_hit_rate", "miss") == 0.0


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
    assert {"ttft_ms_p90", "ttft_ms_p99"} <= set(thin)
    assert "ttft_ms_p50" not in thin
    assert not MetricValue("ttft_ms_mean", 1.0, n=1).thin
    assert "itl_ms_p50" in thin  # no tokens were timed at all


def test_nothing_measured_is_a_summary_of_nulls():
    metrics = summarise(measurement(), StartReport(2.0, 30.0))
    assert value(metrics, "ttft_ms_mean") is None
    assert value(metrics, "gpu_hit_rate") is None
    assert value(metrics, "load_s") == 2.0


def test_what_prepares_is_in_no_latency_and_only_warm_up_is_warmup_ms():
    turns = [
        turn("a", 1, phase="warmup", ttft_ms=500.0, latency_ms=500.0),
        turn("a", 2, phase="hit", label="hit", ttft_ms=10.0),
        turn("a", 3, phase="rewarm", ttft_ms=400.0, latency_ms=400.0),
    ]
    metrics = summarise(measurement(*turns))
    assert value(metrics, "ttft_ms_mean") == 10.0
    assert value(metrics, "warmup_ms_mean") == 500.0
    assert value(metrics, "ttft_degradation_pct") is None, "there is no miss to hold against it"


def test_out_of_memory_is_a_refusal_for_capacity_and_no_other():
    reasons = [("refused", "capacity"), ("refused", "context"), ("failed", None), ("completed", "length")]
    turns = [turn(f"s{n}", status=status, finish_reason=why) for n, (status, why) in enumerate(reasons)]
    metric = table(summarise(measurement(*turns)))["oom_turns", ""]
    assert (metric.value, metric.n) == (1.0, 4)


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
