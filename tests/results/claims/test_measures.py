"""Each reduction on a small database whose answer is known."""

import pytest

from pensieve.errors import MissingSeries
from pensieve.lab.metrics import MetricValue
from pensieve.lab.results.claims.measures import MEASURES, arguments_of, crossing, fisher_interval
from tests.results.claims.synthetic import measure, numbered, sweep, talk
from tests.results.trials import add_trial, turn

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


def test_speedup_of_a_label_and_of_a_phase():
    def turns(hot, cold):
        return lambda seed: numbered(
            [turn("a", 1, hot, label="hot", phase="chat"), turn("b", 1, cold, label="cold", phase="throughput")]
        )

    store = both(turns(10.0, 20.0), turns(30.0, 20.0))
    assert measure(store, "speedup", theirs="stateless", label="hot").value == pytest.approx(3.0)
    assert measure(store, "speedup", theirs="stateless", phase="throughput").value == pytest.approx(1.0)
    with pytest.raises(MissingSeries, match="turns labelled warm"):
        measure(store, "speedup", theirs="stateless", label="warm")


def test_speedup_of_numbers_made_of_two_columns():
    def turns(latency, sent):
        return lambda seed: numbered(
            [turn("a", 1, 1.0, tokens=(1, 2, 3, 4), latency_ms=latency, sent_bytes=sent, received_bytes=20)]
        )

    store = both(turns(40.0, 20), turns(400.0, 3980))
    assert measure(store, "speedup", theirs="stateless", column="normalized_latency_ms").value == pytest.approx(10.0)
    assert measure(store, "speedup", theirs="stateless", column="wire_bytes_per_token").value == pytest.approx(100.0)


def test_extreme_speedup_names_its_turn_and_leaves_out_thin_ones():
    store = both(talk(10.0, 20.0, 30.0, 1.0), talk(5.0, 40.0, 90.0, 1000.0))
    lowest = measure(store, "extreme_speedup", theirs="stateless", which="lowest")
    assert (lowest.value, lowest.about) == (pytest.approx(0.5), "at turn 1")
    later = measure(store, "extreme_speedup", theirs="stateless", which="lowest", from_turn=3)
    assert (later.value, later.about) == (pytest.approx(3.0), "at turn 3")
    with pytest.raises(MissingSeries, match="fewer than two turns from turn 4 on"):
        measure(store, "extreme_speedup", theirs="stateless", which="lowest", from_turn=4)
    highest = measure(store, "extreme_speedup", theirs="stateless", which="highest")
    assert (highest.value, highest.about) == (pytest.approx(1000.0), "at turn 4")
    with pytest.raises(MissingSeries, match="fewer than two turns"):
        measure(store, "extreme_speedup", theirs="stateless", which="highest", fewest=21)


def test_label_ratio_is_within_a_baseline():
    def turns(seed):
        return numbered(
            turn(f"a{agent}", 1 + 2 * step + place, 1.0, label=label, latency_ms=ms)
            for agent in range(3)
            for step in range(2)
            for place, (label, ms) in enumerate([("reason", 80.0), ("reflect", 10.0)])
        )

    found = measure(sweep({"pensieve": turns}), "label_ratio", of="reason", to="reflect")
    assert (found.value, found.n) == (pytest.approx(8.0), 15)


def test_turn_mean_and_percentile():
    def turns(seed):
        return numbered(turn(f"s{i}", 1, 1.0, latency_ms=10.0 * (i + 1)) for i in range(10))

    store = sweep({"pensieve": turns}, seeds=1)
    mean = measure(store, "turn_mean", column="latency_ms")
    assert mean.value == pytest.approx(55.0)
    assert mean.ci_low < 55.0 < mean.ci_high
    p90 = measure(store, "turn_percentile", column="latency_ms", p=0.9)
    assert (p90.value, p90.n, p90.n_unit) == (90.0, 10, "turns")
    with pytest.raises(MissingSeries):
        measure(store, "turn_mean", column="latency_ms", label="reason")


def test_token_share_is_a_sum_over_a_sum():
    def turns(seed):
        return numbered(
            [
                turn("a", 1, history_tokens=0, gpu_hit_tokens=0, prompt_tokens=10),
                turn("a", 2, history_tokens=90, gpu_hit_tokens=90, prompt_tokens=100),
                turn("b", 2, history_tokens=10, gpu_hit_tokens=0, prompt_tokens=20),
                turn("b", 3, None, history_tokens=None, gpu_hit_tokens=None, status="refused"),
            ]
        )

    found = measure(sweep({"pensieve": turns}), "token_share", column="gpu_hit_tokens")
    assert found.value == pytest.approx(90.0)  # not the mean of 100 % and 0 %
    with pytest.raises(MissingSeries, match="of any history"):
        measure(sweep({"pensieve": talk(10.0)}), "token_share", column="gpu_hit_tokens")


def probes(hit=10.0, miss=(30.0, 40.0), streamed=0.3):
    """Rounds of a hit and misses; streaming takes `streamed` ms more, and a miss recomputes 100 times its ms."""

    def turns(seed, value=None):
        return numbered(
            turn(
                f"{number}-{phase}-{stream}", 2, ms + (streamed if stream else 0.0), phase=phase, label=phase,
                iteration=number, stream=stream, recomputed_tokens=int(100 * ms) if phase == "miss" else 0,
            )
            for number, slow in enumerate(miss)
            for stream in (True, False)
            for phase, ms in (("hit", hit), ("miss", slow))
        )  # fmt: skip

    return turns


def test_miss_penalty_is_of_the_means_in_percent():
    found = measure(sweep({"pensieve": probes(streamed=0.0)}), "miss_penalty_pct")
    assert (found.value, found.n, found.n_unit) == (pytest.approx(250.0), 10, "rounds")
    with pytest.raises(MissingSeries, match="a hit and of a miss"):
        measure(sweep({"pensieve": talk(1.0)}), "miss_penalty_pct")


def test_streaming_difference_is_paired():
    found = measure(sweep({"pensieve": probes(streamed=0.3)}), "streaming_difference")
    assert (found.value, found.ci_low, found.n) == (pytest.approx(0.3), pytest.approx(0.3), 20)
    with pytest.raises(MissingSeries, match="with and without streaming"):
        measure(sweep({"pensieve": talk(1.0)}), "streaming_difference")


def test_r_squared_of_a_line_is_one_and_of_a_bend_is_not():
    def line(seed, blocks):
        return probes(hit=5.0, miss=(blocks, blocks + 7.0), streamed=0.0)(seed)

    axis = {"axis": "workload.blocks", "values": [10, 40, 90]}
    straight = measure(sweep({"pensieve": line}, **axis), "r_squared", over="workload.blocks", x="recomputed_tokens")
    assert straight.value > 0.99
    assert straight.about.startswith("slope 0.0")

    def bend(seed, blocks):
        return probes(hit=5.0, miss=(blocks, 1000.0 / blocks), streamed=0.0)(seed)

    def flipped(seed, blocks):
        turns = bend(seed, blocks)
        for record in turns:
            record.ttft_ms = 50.0 if record.recomputed_tokens == 0 else abs(record.recomputed_tokens - 4000) / 100
        return turns

    bent = measure(sweep({"pensieve": flipped}, **axis), "r_squared", over="workload.blocks")
    assert bent.value < 0.9
    assert bent.ci_low < bent.value < bent.ci_high
    with pytest.raises(MissingSeries, match="a line needs 3"):
        measure(sweep({"pensieve": probes(miss=(30.0,), streamed=0.0)}), "r_squared")


def test_fishers_interval_of_a_published_example():
    low, high = fisher_interval(0.25, 103)  # r = 0.5, n = 103: [0.339, 0.632]
    assert (low**0.5, high**0.5) == (pytest.approx(0.3393, abs=1e-3), pytest.approx(0.6324, abs=1e-3))
    assert fisher_interval(1.0, 30) == (1.0, 1.0)


def test_axis_ratio_is_of_the_two_ends():
    def turns(seed, size):
        return probes(miss=(10.0 + size, 20.0 + size), streamed=0.0)(seed)

    axis = "scheduler.max_batch_tokens"
    store = sweep({"pensieve": turns}, axis=axis, values=[5, 45, 15])
    found = measure(store, "axis_ratio", over=axis, phase="miss")
    assert (found.value, found.about) == (pytest.approx(60 / 20), "45 over 5")
    with pytest.raises(MissingSeries, match="one value"):
        measure(sweep({"pensieve": turns}, axis=axis, values=[5]), "axis_ratio", over=axis, phase="miss")


def test_metric_ratio_has_an_interval_from_five_seeds_on():
    def of(value):
        return lambda seed: {"throughput_output_tok_s": value * (1 + seed / 100)}

    def found(seeds):
        store = both(seeds=seeds, metrics={"pensieve": of(150.0), "stateless": of(100.0)})
        return measure(store, "metric_ratio", theirs="stateless", name="throughput_output_tok_s")

    few, enough = found(4), found(5)
    assert few.value == enough.value == pytest.approx(1.5)
    assert (few.ci_low, few.ci_high, few.seeds) == (None, None, 4)
    assert enough.ci_low == pytest.approx(1.5) == enough.ci_high


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


def test_largest_load_needs_the_limit_of_the_other_side_and_is_a_lower_bound_without_its_own():
    def of(limit):
        return lambda seed, agents: {"oom_turns": float(agents > limit)}

    axis = "workload.agents"
    turns = {name: lambda seed, agents: talk(10.0)(seed) for name in ("pensieve", "stateless")}

    def found(ours, theirs, loads=(1, 2, 3, 8, 9, 32)):
        metrics = {"pensieve": of(ours), "stateless": of(theirs)}
        store = sweep(turns, seeds=1, metrics=metrics, axis=axis, values=loads)
        one = measure(store, "largest_load_ratio", theirs="stateless", over=axis)
        return one.value, one.at_least

    assert found(8, 2) == (pytest.approx(4.0), False), "both are known to one"
    assert found(64, 2) == (pytest.approx(16.0), True), "ours has met no limit"
    assert found(20, 2) == (pytest.approx(4.5), True), "ours carries 9 to 31"
    assert found(8, 5) == (pytest.approx(8 / 7), True), "theirs may carry up to 7"
    assert found(8, 0.5, loads=(4, 8, 9)) == (pytest.approx(8 / 3), True), "theirs may carry up to 3"
    for ours, theirs in ((8, 64), (8, 0)):
        with pytest.raises(MissingSeries, match="other side reaches its limit"):
            found(ours, theirs)


def test_seeds_that_carry_nothing_are_not_left_out_of_a_density():
    axis = "workload.agents"
    turns = {name: lambda seed, agents: talk(10.0)(seed) for name in ("pensieve", "stateless")}

    def of(limits):
        return lambda seed, agents: {"oom_turns": float(agents > limits[seed])}

    def found(ours, theirs):
        """Limits by seed."""
        metrics = {"pensieve": of(ours), "stateless": of(theirs)}
        store = sweep(turns, seeds=len(ours), metrics=metrics, axis=axis, values=(1, 2, 3, 8, 9))
        return measure(store, "largest_load_ratio", theirs="stateless", over=axis)

    whole = found([8, 8], [2, 2])
    assert (whole.value, whole.about) == (pytest.approx(4.0), "")
    with pytest.raises(MissingSeries, match="pensieve refuses the smallest load of this sweep in 1 of 2 seeds"):
        found([8, 0], [2, 2])
    partly = found([8, 8], [2, 0])
    assert (partly.value, partly.about) == (
        pytest.approx(4.0),
        "1 of 2 seeds and repeats left out, whose limit is not known",
    )


def test_a_load_of_which_a_part_timed_out_was_not_carried():
    axis = "workload.agents"
    limits = {"pensieve": 64, "stateless": 2}

    def of(limit):
        return lambda seed, agents: {"oom_turns": float(agents > limit)}

    turns = {name: lambda seed, agents: talk(10.0)(seed) for name in limits}
    metrics = {name: of(limit) for name, limit in limits.items()}
    store = sweep(turns, seeds=1, metrics=metrics, axis=axis, values=(2, 3, 8, 9))

    def found():
        return measure(store, "largest_load_ratio", theirs="stateless", over=axis).value

    assert found() == pytest.approx(4.5)
    late = [one.trial for one in store.trials_of_sweep(1) if one.trial.config["workload"]["agents"] == 9]
    for trial in late:
        store.add_metrics(trial.id, [MetricValue("turns", 3.0, "timeout")])
    assert found() == pytest.approx(4.0)


def bench(ours, theirs):
    """A trial a case and backend; ours, theirs: case -> repetitions in ms."""
    store = both(seeds=0)
    job = 0
    for name, cases in (("pensieve", ours), ("stateless", theirs)):
        for case, values in cases.items():
            config = {"bench": {"case": case}}
            add_trial(store, 1, job, name, [], config=config, engine={"values": values}, workload="bench_kernel")
            job += 1
    return store


def test_cases_of_a_benchmark_are_paired_by_repetition():
    store = bench(
        {"decode 1": [11.0, 22.0, 33.0], "decode 8": [11.0, 22.0, 33.0], "prefill": [90.0]},
        {"decode 1": [10.0, 20.0, 30.0], "decode 8": [10.0, 20.0, 30.0], "prefill": [10.0]},
    )
    found = measure(store, "case_excess_pct", theirs="stateless", case="decode*")
    assert (found.value, found.ci_low) == (pytest.approx(10.0), None), "two cases are too few for an interval"
    assert (found.n, found.seeds, found.about) == (6, 1, "2 cases")
    assert measure(store, "case_excess_pct", theirs="stateless", case="prefill").value == pytest.approx(800.0)
    five = bench({"decode": [11.0, 22.0, 33.0, 44.0, 55.0]}, {"decode": [10.0, 20.0, 30.0, 40.0, 50.0]})
    found = measure(five, "case_excess_pct", theirs="stateless")
    assert (found.value, found.ci_low, found.ci_high) == tuple(pytest.approx(10.0) for _ in range(3))
    with pytest.raises(MissingSeries, match="no case swap has repetitions"):
        measure(store, "case_excess_pct", theirs="stateless", case="swap")


def test_swapping_the_backends_of_a_benchmark_swaps_its_sign():
    fast, slow = {"a": [10.0, 10.0]}, {"a": [20.0, 20.0]}
    assert measure(bench(slow, fast), "case_excess_pct", theirs="stateless").value == pytest.approx(100.0)
    assert measure(bench(fast, slow), "case_excess_pct", theirs="stateless").value == pytest.approx(-50.0)


def test_a_load_that_was_served_in_part_is_compared_with_nobody():
    """In seeds 0 and 1 memory ran out on the other side, whose turns that are left are quick."""

    def theirs(seed):
        return talk(5.0 if seed < 2 else 40.0)(seed)

    def swept(out_of_memory):
        metrics = {"stateless": lambda seed: {"oom_turns": float(seed < out_of_memory)}}
        return sweep({"pensieve": talk(10.0), "stateless": theirs}, metrics=metrics)

    found = measure(swept(2), "speedup", theirs="stateless", unless="oom_turns")
    assert (found.value, found.seeds) == (pytest.approx(4.0), 3)
    assert measure(swept(2), "speedup", theirs="stateless").value < 3, "with them"
    assert set(found.trial_ids) == {1, 3, 5, 6, 7, 8, 9, 10}, "all of ours, and those of theirs that served everybody"
    with pytest.raises(MissingSeries, match="every trial of stateless has oom_turns"):
        measure(swept(5), "speedup", theirs="stateless", unless="oom_turns")


def test_every_measure_says_which_arguments_it_takes():
    assert arguments_of("speedup") == {"column", "turn", "label", "phase", "unless"}
    assert all("sides" not in arguments_of(name) for name in MEASURES)
