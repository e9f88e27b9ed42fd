"""The warnings over a sweep's table: each on a load that deserves it, and absent on one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.metrics import MetricValue
from pensieve.record import TurnRecord
from pensieve.results.store import ResultsStore
from pensieve.results.sweep_table import sweep_table
from tests.results.answers import FLAT, RISING, answers, turns
from tests.results.trials import MEMORY, add_trial, open_sweep, trial_fields, turn


@pytest.mark.parametrize(("queue", "warned"), [(0.4, False), (0.6, True)])
def test_a_baseline_that_mostly_waits_is_near_saturation(queue: float, warned: bool) -> None:
    said = answers({"baseline": "pensieve", "ttft": FLAT}, {"baseline": "stateless", "ttft": RISING, "queue": queue})
    assert ("Near saturation" in said) is warned
    if warned:
        # Three conversations at 1.0, 1.1 and 1.2 times the list, five seeds: the median is 1.1 x 160 ms by the seeds' median.
        assert f"stateless {0.6 * 176:,.0f} of {176:,.0f} ms" in said


@pytest.mark.parametrize(("evicted", "read", "warned"), [(521, 0.0, True), (521, 0.1, False), (0, 0.0, False)])
def test_a_cpu_tier_that_nothing_was_read_back_from_shows_nothing(evicted: float, read: float, warned: bool) -> None:
    metrics = {"evicted_chunks": evicted, "cpu_hit_rate": read}
    said = answers({"baseline": "pensieve", "ttft": FLAT, "metrics": metrics}, {"baseline": "stateless", "ttft": FLAT})
    assert ("2,605 chunks left the GPU tier and none was read back" in said) is warned


@pytest.mark.parametrize(("share", "warned"), [(0.62, True), (0.02, False)])
def test_a_busy_machine_is_told(share: float, warned: bool) -> None:
    trial = {"ttft": FLAT, "flags": {"others_cpu_share": share}}
    said = answers({"baseline": "pensieve", **trial}, {"baseline": "stateless", **trial})
    assert ("Other programs used 62% of this machine's CPU time" in said) is warned


def test_one_trial_on_a_busy_machine_is_told_too() -> None:
    quiet, busy = ({"ttft": FLAT, "flags": {"others_cpu_share": share}} for share in (0.01, 0.62))
    said = answers(
        {"baseline": "pensieve", **quiet}, {"baseline": "gpu_only", **quiet}, {"baseline": "stateless", **busy}
    )
    assert "used 1% of this machine's CPU time meanwhile (median of trials, at most 62%)" in said


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("contaminated", "The cache was not what was declared: stateless: It held 64 tokens"),
        ("cache_state_unverified", "was declared is not known: stateless: It does not say"),
    ],
)
def test_a_cache_that_was_not_what_was_declared_is_told(flag: str, said: str) -> None:
    words = "It held 64 tokens." if flag == "contaminated" else "It does not say."
    clean = {"baseline": "pensieve", "ttft": FLAT}
    assert said in answers(clean, {"baseline": "stateless", "ttft": FLAT, "flags": {flag: words}})
    assert "was declared" not in answers(clean, {"baseline": "stateless", "ttft": FLAT})


@pytest.mark.parametrize(("error", "warned"), [(788.0, True), (-60.0, True), (12.0, False)])
def test_a_cost_model_that_is_far_off_is_told(error: float, warned: bool) -> None:
    metrics = {"cost_model_error_pct": error}
    said = answers({"baseline": "pensieve", "ttft": FLAT, "metrics": metrics}, {"baseline": "stateless", "ttft": FLAT})
    assert (f"pensieve {error:+.0f} %" in said) is warned


def test_the_worst_error_of_the_cost_model_is_told_not_the_last() -> None:
    far = {"baseline": "pensieve", "ttft": FLAT, "metrics": {"cost_model_error_pct": 788.0}}
    near = {"baseline": "pensieve", "ttft": FLAT, "metrics": {"cost_model_error_pct": 5.0}, "cache": "small"}
    assert "pensieve +788 %" in answers(far, near)


@pytest.mark.parametrize(
    ("load", "flags", "rate", "warned"),
    [
        ("open", {}, 5.4, True),
        ("partly open", {}, 5.4, True),
        ("open", {}, 8.8, False),  # 2 % less
        ("closed", {}, 5.4, False),  # where people wait for replies the rates are the finding
        ("open", {"window": "too small"}, 5.4, False),  # over all turns, with start-up and drain
    ],
)
def test_a_baseline_that_finished_less_of_an_open_load_is_told(
    load: str, flags: dict[str, str], rate: float, warned: bool
) -> None:
    common = {"ttft": FLAT, "flags": {"load": load, **flags}}
    said = answers(
        {"baseline": "pensieve", "metrics": {"throughput_req_s": 9.0}, **common},
        {"baseline": "stateless", "metrics": {"throughput_req_s": rate}, **common},
    )
    assert (f"stateless {rate:.3g} where pensieve finished 9 with the same seeds" in said) is warned
    assert ("Latencies are not at equal rates" in said) is warned
    assert "pensieve 9" not in said


@pytest.mark.parametrize(
    ("flags", "queue", "warned"),
    [
        ({}, 0.6, True),
        ({"not_steady": "too early"}, 0.6, False),
        ({}, 0.1, False),  # nobody waits: that arrivals were fewer is chance
    ],
)
def test_less_than_was_offered_is_told_where_it_was_waited_for(
    flags: dict[str, str], queue: float, warned: bool
) -> None:
    trial = {
        "ttft": FLAT, "queue": queue, "metrics": {"throughput_req_s": 6.0}, "flags": {"load": "open", **flags},
        "engine": {"workload": {"request_rate_per_s": 10.0}},
    }  # fmt: skip
    said = answers({"baseline": "pensieve", **trial}, {"baseline": "stateless", **trial})
    waited = "6 of 10 offered, and most of the time to the last turn's first token was waiting"
    assert (f"in requests/s: pensieve {waited}; stateless {waited}. Latencies" in said) is warned
    assert ("Less of the load" in said) is warned
    assert "saturated" not in said


def test_rates_with_other_seeds_are_other_loads() -> None:
    """Two baselines beside each other with one seed in common: 9 and 9 there, whatever the others gave."""
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, seed="0,1,2")
    given = [("pensieve", 0, 9.0), ("pensieve", 1, 14.0), ("stateless", 0, 9.0), ("stateless", 2, 4.0)]
    for job, (baseline, seed, rate) in enumerate(given):
        trial = add_trial(store, sweep, job, baseline, turns(FLAT), {"throughput_req_s": rate}, seed=seed)
        store.set_trial(trial, flags={"load": "open"})
    assert "Less of the load" not in " ".join(sweep_table(store, sweep).answers)


def one_after_another(at_once: int) -> list[TurnRecord]:
    """40 turns: one begins a second, and each takes `at_once` seconds; `at_once` - 1 of them are running when one comes."""
    return [turn(f"s{i}", 1, arrived_s=float(i), admitted_s=float(i), finished_s=i + at_once - 0.5) for i in range(40)]


@pytest.mark.parametrize(("at_once", "warned"), [(8, True), (5, True), (4, False), (1, False)])
def test_slots_that_turns_find_taken_are_told(at_once: int, warned: bool) -> None:
    slots = {"baseline": "llama_slots", "turns": one_after_another(at_once), "engine": {"n_slots": 4}}
    said = answers({"baseline": "pensieve", "turns": one_after_another(at_once)}, slots, seeds=2)
    assert ("The number of slots limits" in said) is warned
    if warned:
        # The first four turns come before four are running.
        assert "llama_slots has 4, which 90% of its turns found taken. baseline.cache.n_slots sets it" in said
        assert "pensieve has" not in said


def test_of_turns_that_come_at_once_those_beyond_the_slots_find_them_taken() -> None:
    crowd = [turn(f"s{i}", 1, arrived_s=0.0, admitted_s=0.0, finished_s=1.0 + i) for i in range(10)]
    slots = {"baseline": "llama_slots", "turns": crowd, "engine": {"n_slots": 4}}
    said = answers({"baseline": "pensieve", "turns": crowd}, slots, seeds=2)
    assert "llama_slots has 4, which 60% of its turns found taken" in said


@pytest.mark.parametrize(("seeds", "warned"), [(5, True), (7, False)])
def test_few_conversations_are_told(seeds: int, warned: bool) -> None:
    """Three a seed: 15 and 21."""
    said = answers({"baseline": "pensieve", "ttft": FLAT}, {"baseline": "stateless", "ttft": RISING}, seeds=seeds)
    assert ("Few conversations: medians are over 15 of them" in said) is warned
    assert ("Few conversations" in said) is warned


@pytest.mark.parametrize(("seeds", "said"), [(1, "One seed:"), (3, "3 seeds: no intervals below 5"), (5, None)])
def test_few_seeds_are_told(seeds: int, said: str | None) -> None:
    trials: list[dict[str, Any]] = [{"baseline": "pensieve", "ttft": FLAT}, {"baseline": "stateless", "ttft": RISING}]
    text = answers(*trials, seeds=seeds)
    assert [part for part in ("One seed:", "3 seeds: no intervals below 5") if part in text] == ([said] if said else [])


def test_trials_that_did_not_complete_are_told_first_of_all_caveats() -> None:
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, n_expected=6, seed="0,1,2")
    for job, (baseline, seed) in enumerate([("pensieve", 0), ("stateless", 0), ("pensieve", 1)]):
        add_trial(store, sweep, job, baseline, turns(FLAT), seed=seed)
    table = sweep_table(store, sweep)  # while it runs
    assert table.answers[1] == (
        "The sweep is running: 3 of its 6 trials have not ended yet; all that is said is of the others."
    )
    assert "same command" not in table.text() and "3 of 6 trials have not begun yet." in table.notes
    failed = store.begin_trial(trial_fields("failed", baseline="stateless", seed=1))
    store.link(sweep, failed, 3, reused=False)
    assert "running: 3 of its 6 trials have not ended yet; all" in sweep_table(store, sweep).answers[1]
    store.finish_trial(failed, "failed", "It broke.")
    assert sweep_table(store, sweep).answers[1] == (
        "The sweep is running: 2 of its 6 trials have not ended yet and 1 did not complete; all that is said is of the "
        "others."
    )
    store.set_sweep(sweep, status="interrupted")
    table = sweep_table(store, sweep)
    assert table.answers[1].startswith(
        "3 of the sweep's 6 trials did not complete, and all that is said is of the others"
    )
    assert "2 of 6 trials were never begun; run the same command again." in table.notes


def test_a_whole_sweep_and_one_with_nothing_say_nothing_of_missing_trials() -> None:
    trial = {"ttft": FLAT}
    assert "did not complete" not in answers({"baseline": "pensieve", **trial}, {"baseline": "stateless", **trial})
    store = ResultsStore(MEMORY)
    assert sweep_table(store, open_sweep(store, n_expected=2)).answers == []


def test_turns_without_a_reply_are_told_since_who_loses_the_slow_ones_looks_fast() -> None:
    counts = {"completed": 90.0, "timeout": 8.0, "failed": 2.0, "refused": 0.0}
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, seed="0,1")
    for job, (baseline, seed) in enumerate([("pensieve", 0), ("stateless", 0), ("pensieve", 1), ("stateless", 1)]):
        trial = add_trial(store, sweep, job, baseline, turns(FLAT), seed=seed)
        own = counts if baseline == "stateless" else {"completed": 100.0}
        store.add_metrics(trial, [MetricValue("turns", value, status) for status, value in own.items()])
    said = " ".join(sweep_table(store, sweep).answers)
    assert "are in no latency, no ratio and no share of history, and end some conversations: " in said
    assert "stateless 20 of 200 (16 timeout, 4 failed)." in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"contended": True}, "holds trials that shared their device with others: do not compare their times"),
        ({"code_hash": "other"}, "holds trials of different versions of the code: do not compare their times"),
    ],
)
def test_what_must_not_be_compared_is_told_above_the_table(changed: dict[str, Any], said: str) -> None:
    both = [{"baseline": "pensieve", "ttft": FLAT}, {"baseline": "stateless", "ttft": RISING}]
    assert said not in answers(*both)
    assert answers(both[0], {**both[1], **changed}).count(said) == 1


def test_hardware_that_an_axis_sweeps_is_no_mixture() -> None:
    trials = [
        {"baseline": baseline, "ttft": FLAT, "hardware": hardware, "simulated": hardware != "cpu"}
        for hardware in ("cpu", "sim_h100")
        for baseline in ("pensieve", "stateless")
    ]
    assert "do not compare" not in answers(*trials, hardware="cpu,sim_h100")


@pytest.mark.parametrize(
    ("load", "ours", "theirs", "said"),
    [
        ("closed", (15.6, 100.0), (13.4, 100.0), "behind at: 15.6 ms a further token where stateless takes 13.4 ("),
        ("open", (15.6, 80.0), (13.4, 100.0), "behind at: 15.6 ms a further token where stateless takes 13.4 ("),
        ("closed", (13.4, 80.0), (13.4, 100.0), "behind at: 80 output tokens/s where stateless makes 100 ("),
        ("closed", (13.6, 98.0), (13.4, 100.0), None),  # 2 %
        ("closed", (10.0, 120.0), (13.4, 100.0), None),  # ahead
    ],
)
def test_what_pensieve_is_behind_at_is_told_beside_its_first_token(
    load: str, ours: tuple[float, float], theirs: tuple[float, float], said: str | None
) -> None:
    def trial(baseline: str, ttft: list[float], given: tuple[float, float]) -> dict[str, Any]:
        rates = {"tpot_ms_mean": given[0], "throughput_output_tok_s": given[1], "throughput_req_s": 5.0}
        return {"baseline": baseline, "ttft": ttft, "metrics": rates, "flags": {"load": load}}

    text = answers(trial("pensieve", FLAT, ours), trial("stateless", RISING, theirs))
    assert "as soon as stateless serving's" in text
    assert (said or "first token") in text
    assert ("is behind" in text) is (said is not None)


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        (1, "14.3 ms a further token where stateless takes 13.4 (1 seed: no interval) (means of trials)."),
        (4, "14.3 ms a further token where stateless takes 13.4 (4 seeds: no interval) (means of trials)."),
        (5, "14.3 ms a further token where stateless takes 13.4 (means of trials, and the same with every seed)."),
    ],
)
def test_with_few_seeds_what_pensieve_is_behind_at_is_no_more_than_means(seeds: int, said: str) -> None:
    trials = [
        {"baseline": name, "ttft": ttft, "metrics": {"tpot_ms_mean": ms}, "flags": {"load": "closed"}}
        for name, ttft, ms in (("pensieve", FLAT, 14.3), ("stateless", RISING, 13.4))
    ]
    text = answers(*trials, seeds=seeds)
    assert f"Pensieve is behind at: {said}" in text
    assert ("the same with every seed" in text) is (seeds == 5)


@pytest.mark.parametrize(("load", "told"), [("open", False), ("partly open", False), ("closed", True)])
def test_throughput_with_start_up_and_drain_of_an_open_load_is_not_called_behind(load: str, told: bool) -> None:
    trials = [
        {"baseline": name, "ttft": ttft, "metrics": {"throughput_output_tok_s": made},
         "flags": {"load": load, "window": "too small"}}
        for name, ttft, made in (("pensieve", FLAT, 80.0), ("stateless", RISING, 100.0))
    ]  # fmt: skip
    assert ("is behind at: 80 output tokens/s where stateless makes 100" in answers(*trials)) is told


def test_what_one_seed_contradicts_is_not_told() -> None:
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, seed="0,1")
    for job, (baseline, seed, ms) in enumerate(
        [("pensieve", 0, 40.0), ("stateless", 0, 10.0), ("pensieve", 1, 9.0), ("stateless", 1, 10.0)]
    ):
        add_trial(store, sweep, job, baseline, turns(FLAT), {"tpot_ms_mean": ms}, seed=seed)
    assert "is behind" not in " ".join(sweep_table(store, sweep).answers)


@pytest.mark.parametrize(("repeats", "seeds", "warned"), [((0,), 1, False), ((0, 1), 1, True), ((0, 1), 2, False)])
def test_one_seed_that_ran_several_times_is_no_more_seeds(repeats: tuple[int, ...], seeds: int, warned: bool) -> None:
    trials = [{"baseline": b, "ttft": FLAT, "repeat": repeat} for b in ("pensieve", "stateless") for repeat in repeats]
    assert (
        "The seed ran 2 times, and each counts as conversations of its own" in answers(*trials, seeds=seeds)
    ) is warned


CUT = {"conversations": 40, "conversations_cut_by_context": 5, "turns_cut_by_context": 12}


def test_a_context_that_cuts_conversations_is_said_before_what_was_found() -> None:
    """Five seeds of 40 conversations; both baselines were asked the same ones, which count once."""
    trial = {"engine": {"workload": CUT}}
    said = answers({"baseline": "pensieve", "ttft": FLAT, **trial}, {"baseline": "stateless", "ttft": RISING, **trial})
    assert said.startswith(
        "The model's context cuts the load: 25 of 200 conversations end early (60 turns are never asked). To ask all"
    )
    assert "Pensieve's first token" in said


@pytest.mark.parametrize("plan", [{}, {"conversations": 40, "conversations_cut_by_context": 0}])
def test_a_context_that_cuts_nothing_is_not_told(plan: dict[str, int]) -> None:
    trial = {"ttft": FLAT, "engine": {"workload": plan}}
    assert "context" not in answers({"baseline": "pensieve", **trial}, {"baseline": "stateless", **trial})


def test_the_settings_whose_conversations_are_cut_are_named() -> None:
    longer = {**CUT, "conversations_cut_by_context": 0, "turns_cut_by_context": 0}
    longer["conversations_too_long_for_the_context"] = 2
    common = {"baseline": "pensieve", "ttft": FLAT}
    said = answers(
        {**common, "model": "opt_13b", "engine": {"workload": CUT}},
        {**common, "model": "llama3_8b", "engine": {"workload": longer}},
        {**common, "model": "tiny", "engine": {"workload": {"conversations": 40}}},
        model="opt_13b,llama3_8b,tiny",
    )
    assert "(model=opt_13b) 25 of 200 conversations end early (60 turns are never asked); (model=llama3_8b) 10 " in said
    assert "10 conversations are left out, whose first prompt does not fit. To ask" in said
    assert "tiny)" not in said
