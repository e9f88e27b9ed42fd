from collections import Counter
from itertools import pairwise

import pytest

from pensieve.lab.metrics import summarise
from pensieve.lab.replay import replay
from pensieve.lab.workload.exact import PrefixInvalidationWorkload
from tests.composed import replayed
from tests.scripted import Latency, ScriptedSystem, context
from tests.workload.dry import drive


def cases(arrivals):
    found = {}
    for arrival in arrivals:
        found.setdefault(arrival.request.session, []).append(arrival)
    return found


def test_a_case_warms_probes_rewarms_and_decodes():
    workload = PrefixInvalidationWorkload(
        context(), blocks="16/8", query_tokens=4, new_tokens=9, rounds=2, discard=0, settle_s=0.1
    )
    for session, turns in cases(drive(workload)).items():
        warm, probe, rewarm, throughput = (arrival.due() for arrival in turns)
        kind = "miss" if "miss" in session else "hit"
        assert [t.request.phase for t in turns] == ["warmup", kind, "rewarm", "throughput"]
        assert [t.request.label for t in turns] == [kind, kind, kind, f"throughput_{kind}"]
        assert [t.request.output.tokens for t in turns] == [1, 1, 1, 9]
        assert not any(t.continues for t in turns)
        assert rewarm.prompt == warm.prompt
        assert len(warm.prompt) == 24
        assert (throughput.prompt, throughput.history) == (probe.prompt, probe.history)
        assert probe.prompt[:-4] == (warm.prompt if kind == "hit" else warm.prompt[16:])
        assert probe.history.tokens == len(probe.prompt) - 4
        assert (probe.prompt[0] == warm.prompt[0]) is (kind == "hit")
        assert [b.at_s - a.at_s for a, b in pairwise(turns)] == pytest.approx([1.1] * 3)


def test_hits_and_misses_streaming_and_not_interleave_and_no_two_cases_share_text():
    workload = PrefixInvalidationWorkload(context(), blocks="32/16", rounds=6)
    plan, arrivals = workload.describe(), drive(workload)
    assert len(arrivals) == plan.turns == 4 * 25
    probes = [a.request for a in arrivals if a.request.phase in ("hit", "miss")]
    assert Counter((p.phase, p.stream) for p in probes) == {
        (kind, stream): 6 for kind in ("hit", "miss") for stream in (True, False)
    }
    assert [p.iteration for p in probes] == sorted(p.iteration for p in probes)
    orders = {tuple((p.phase, p.stream) for p in probes[i : i + 4]) for i in range(0, 24, 4)}
    assert len(orders) > 1
    warmed = [a.due().prompt.tobytes() for a in arrivals if a.request.phase == "warmup" and a.request.turn == 1]
    assert len(set(warmed)) == len(warmed)
    assert plan.warmup_turns == sum(a.request.phase in ("warmup", "rewarm") for a in arrivals)
    assert plan.facts["requests_at_once"] == 1


def test_scripted_hits_and_misses_give_the_difference_back():
    def latency(request):
        first = {"hit": 20, "miss": 80}.get(request.phase, 300) + (0 if request.stream else 7)
        first += {("warmup", "miss"): 50, ("throughput", "throughput_miss"): 100}.get((request.phase, request.label), 0)
        return Latency(queue=0, first=first, gap=4)

    system = ScriptedSystem(latency)
    workload = PrefixInvalidationWorkload(context(), blocks="16/8", rounds=5, new_tokens=11)
    record = replay(system, workload)
    found = {(m.name, m.label): m for m in summarise(record.measurement, system.start())}
    assert found["ttft_ms_mean", "hit"].value == pytest.approx(23.5, abs=1e-6)
    assert found["ttft_ms_mean", "miss"].value == pytest.approx(83.5, abs=1e-6)
    assert found["ttft_degradation_pct", ""].value == pytest.approx(100 * 60 / 23.5)
    assert found["ttft_degradation_pct", ""].n == 5
    assert found["stream_overhead_ms", ""].value == pytest.approx(-7)
    assert found["stream_overhead_ms", ""].n == 10
    assert found["total_ms_mean", ""].value == pytest.approx(393.5)
    assert found["per_token_ms_mean", ""].value == pytest.approx(393.5 / 11)
    assert found["throughput_output_tok_s", "throughput"].value == pytest.approx(11 / 0.3935)
    assert found["throughput_output_tok_s", "throughput_hit"].value == pytest.approx(11 / 0.3435)
    assert found["throughput_output_tok_s", "throughput_miss"].value == pytest.approx(11 / 0.4435)
    assert found["warmup_ms_mean", ""].n == 24
    assert found["warmup_ms_mean", "hit"].value == pytest.approx(303.5, abs=1e-6)
    assert found["warmup_ms_mean", "miss"].value == pytest.approx(353.5, abs=1e-6)
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
