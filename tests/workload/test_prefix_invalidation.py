import pytest

from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.workload.exact import PrefixInvalidationWorkload
from tests.composed import replayed
from tests.scripted import Latency, ScriptedSystem, context


def test_scripted_hits_and_misses_give_the_difference_back():
    def latency(request):
        first = {"hit": 20, "miss": 80}.get(request.phase, 300) + (0 if request.stream else 7)
        first += {("warmup", "miss"): 50, ("throughput", "throughput_miss"): 100}.get((request.phase, request.label), 0)
        return Latency(queue=0, first=first, gap=4)

    system = ScriptedSystem(latency)
    record = replay(system, PrefixInvalidationWorkload(context(), blocks="16/8", rounds=5, new_tokens=11))
    found = {(m.name, m.label): m.value for m in summarise(record.measurement, system.start())}
    expected = {
        ("ttft_ms_mean", "hit"): 23.5, ("ttft_ms_mean", "miss"): 83.5, ("ttft_degradation_pct", ""): 100 * 60 / 23.5,
        ("stream_overhead_ms", ""): -7, ("total_ms_mean", ""): 393.5, ("per_token_ms_mean", ""): 393.5 / 11,
        ("throughput_output_tok_s", "throughput"): 11 / 0.3935, ("warmup_ms_mean", "hit"): 303.5,
        ("throughput_output_tok_s", "throughput_hit"): 11 / 0.3435, ("warmup_ms_mean", "miss"): 353.5,
        ("throughput_output_tok_s", "throughput_miss"): 11 / 0.4435,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    window = record.measurement
    assert window.measure_end_s - window.measure_start_s > 3.0, "later warm-ups do not cut the window short"


def test_counts_are_those_of_the_measured_turns_alone():
    """Against what the rows say of the measured turns: the counts of everything since the first of them are several times
    as high."""
    record, system = replayed(
        "workload=prefix_invalidation", "workload.blocks=128/64", "workload.rounds=3", "workload.new_tokens=20",
        "cache.gpu=320 tokens", "cache.cpu=1024 tokens",
    )  # fmt: skip
    counters = record.measurement.counters

    def computed(turns):  # the last token of a turn is not
        return sum(
            t.prompt_tokens - t.gpu_hit_tokens - t.cpu_hit_tokens - t.shared_hit_tokens + t.output_tokens - 1
            for t in turns
        )

    measured = [turn for turn in record.turns if turn.phase in ("hit", "miss", "throughput")]
    assert counters["batched_tokens"] == computed(measured)
    assert system.counters()["batched_tokens"] == computed(record.turns) > 2 * computed(measured)
    found = {(m.name, m.label): m.value for m in summarise(record.measurement)}
    assert found["recomputed_tokens", ""] == sum(turn.recomputed_tokens for turn in measured)
    assert found["d2h_bytes", ""] == counters["d2h_bytes"] < system.counters()["d2h_bytes"]
