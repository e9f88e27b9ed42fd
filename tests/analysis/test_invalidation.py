from __future__ import annotations

import pytest

from analysis import prefix
from analysis.sweep import open_source
from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import by_conversation, by_round
from tests.analysis.prefixes import CACHED, FAST, NOTHING, ROUNDS, SLOW, prefix_sweep, prefix_turns
from tests.analysis.sweeps import fill
from tests.results.trials import conversation_turns

STEPS = ("warmup", "hit", "miss", "rewarm_hit", "rewarm_miss", "throughput_hit", "throughput_miss")


@pytest.fixture
def steps(store):
    source = prefix_sweep(store, {"pensieve": FAST}, blocks=("512/256",), seeds=(0,))
    [panel] = source.panels()
    return prefix.steps_of(source, panel.cells[0])


def test_steps_are_named_by_what_went_before_them_and_discarded_ones_are_left_out(steps):
    counts = {name: len(prefix.named(steps, name)) for name in STEPS}
    each = 2 * ROUNDS  # streaming and not
    assert counts == {name: each * (1 + (name == "warmup")) for name in STEPS}
    assert steps["ttft_ms"].max() < 9000.0
    assert set(prefix.named(steps, "rewarm")["step"]) == {"rewarm_hit", "rewarm_miss"}


def test_tokens_are_cached_recomputed_or_new(steps):
    assert prefix.mean_tokens(prefix.named(steps, "hit")) == {"cached": 768, "recomputed": 0, "new": 20}
    assert prefix.mean_tokens(prefix.named(steps, "miss")) == {"cached": 0, "recomputed": 256, "new": 20}
    assert prefix.mean_tokens(prefix.named(steps, "rewarm_miss")) == {
        "cached": 0, "recomputed": 767, "new": 1
    }  # fmt: skip


def test_degradation_pairs_the_miss_with_the_hit_of_its_round(steps):
    found = prefix.degradation_pct(steps)
    hit, miss = (
        sum(FAST[kind] * (1 + r / 10) + 1 for r in range(ROUNDS)) for kind in ("hit", "miss")
    )  # + half of 2 ms
    assert found.value == pytest.approx((miss / hit - 1) * 100)
    assert found.n == ROUNDS
    assert (found.ci_low, found.ci_high) == (None, None), "three rounds of one seed are too few"


def test_streaming_overhead_is_the_difference_within_a_round(steps):
    found = prefix.stream_overhead_ms(steps)
    assert (found.value, found.n) == (pytest.approx(2.0), 2 * ROUNDS)
    assert prefix.stream_overhead_ms(steps[steps["stream"] == 1]) is None


def test_throughput_is_output_tokens_over_the_whole_latency(steps):
    decoded = prefix.named(steps, "throughput")
    first = decoded.xs(0, level="iteration", drop_level=False)
    assert (first["output_tokens"] / first["latency_ms"] * 1e3).tolist() == [pytest.approx(50 / 0.1)] * 4


def test_an_engine_without_counts_has_none_and_one_without_a_cpu_tier_is_not_taken_for_it(store):
    def turns(at, seed):
        found = prefix_turns(FAST)
        for one in found:
            one.cpu_hit_tokens = None
            if at["baseline"] == "vllm_http":
                one.gpu_hit_tokens = one.recomputed_tokens = one.shared_hit_tokens = None
        return found

    source = fill(store, {"baseline": ["vllm", "vllm_http"]}, turns, workload="prefix_invalidation")
    [panel] = source.panels()
    reports, silent = (prefix.named(prefix.steps_of(source, cell), "hit") for cell in panel.cells)
    assert prefix.mean_tokens(reports) == {"cached": 768, "recomputed": 0, "new": 20}
    assert prefix.mean_tokens(silent) is None


def test_tokens_shared_beyond_the_history_are_cached_not_new(store):
    def turns(at, seed):
        found = prefix_turns(FAST)
        for one in found:
            if one.phase == "hit":
                one.shared_hit_tokens = 5
        return found

    source = fill(store, {"baseline": ["prefix_cache"]}, turns, workload="prefix_invalidation")
    [panel] = source.panels()
    hits = prefix.named(prefix.steps_of(source, panel.cells[0]), "hit")
    assert prefix.mean_tokens(hits) == {"cached": 773, "recomputed": 0, "new": 15}


def test_a_sweep_of_another_workload_is_a_missing_series_with_the_command(store):
    source = fill(store, {"baseline": ["pensieve"]}, lambda at, seed: conversation_turns([10.0, 20.0]))
    assert not prefix.invalidation_cost.applies(source)
    [panel] = source.panels()
    with pytest.raises(
        MissingSeries, match=r"no completed hit of baseline pensieve.*experiment=peers/prefix_invalidation -m"
    ):
        prefix.steps_of(source, panel.cells[0])


def test_turns_that_failed_enter_nothing(store):
    def turns(at, seed):
        found = prefix_turns(FAST, CACHED)
        for one in found:
            if one.phase == "miss" and one.iteration == 0:
                one.status, one.ttft_ms = "timeout", 99999.0
        return found

    source = fill(store, {"baseline": ["pensieve"]}, turns, seeds=(0,), workload="prefix_invalidation")
    [panel] = source.panels()
    steps = prefix.steps_of(source, panel.cells[0])
    assert len(prefix.named(steps, "miss")) == 2 * (ROUNDS - 1)
    assert prefix.degradation_pct(steps).n == ROUNDS - 1


def test_repeats_of_a_seed_are_conversations_of_their_own(store):
    source = prefix_sweep(store, {"stateless": SLOW}, cached={"stateless": NOTHING}, blocks=("512/256",), seeds=(0,))
    trial = source.trials[0]
    store.set_trial(trial.id, repeat=1)
    [panel] = open_source(store).panels()
    steps = prefix.steps_of(source, panel.cells[0])
    assert set(by_round(steps["ttft_ms"])) == {(0, f"{number}/1") for number in range(ROUNDS)}
    assert all(conversation.endswith("/1") for _, conversation in by_conversation(steps["ttft_ms"]))
