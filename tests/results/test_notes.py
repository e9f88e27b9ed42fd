"""The notes on a sweep: each on a load that deserves it, and absent on one that does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.lab.results.note_texts import ABOVE, FACTS, TEXTS
from pensieve.lab.results.notes import load_line
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import sweep_table
from pensieve.serve.record import TurnRecord
from tests.results.answers import FLAT, RISING, told, turns, values_of, where
from tests.results.trials import MEMORY, add_trial, open_sweep, trial_fields, turn

OURS: dict[str, Any] = {"baseline": "pensieve", "ttft": FLAT}
THEIRS: dict[str, Any] = {"baseline": "stateless", "ttft": RISING}


def test_every_code_has_a_text_of_short_sentences() -> None:
    assert {*ABOVE, *FACTS} <= TEXTS.keys()
    for code, text in TEXTS.items():
        assert max(len(sentence.split()) for sentence in text.split(". ")) <= 25, code


@pytest.mark.parametrize(("queue", "noted"), [(0.4, None), (0.6, f"stateless {0.6 * 176:,.0f} of {176:,.0f} ms")])
def test_a_baseline_that_mostly_waits_is_near_saturation(queue: float, noted: str | None) -> None:
    # Three conversations at 1.0, 1.1 and 1.2 times the list, five seeds: the median is 1.1 x 160 ms by the seeds' median.
    assert where(told(OURS, {**THEIRS, "queue": queue}), "near_saturation") == noted


@pytest.mark.parametrize(
    ("evicted", "dropped", "read", "code"),
    [
        (521.0, 9.0, 0.0, "cpu_tier_unused"),
        (521.0, 9.0, 0.1, None),
        (0.0, 0.0, 0.0, "nothing_evicted"),
        (0.0, 1.0, 0.0, None),
        (None, None, 0.0, None),
    ],
)
def test_what_says_nothing_about_the_tiers(
    evicted: float | None, dropped: float | None, read: float, code: str | None
) -> None:
    counts = {"evicted_chunks": evicted, "dropped_chunks": dropped, "cpu_hit_rate": read}
    metrics = {name: value for name, value in counts.items() if value is not None}
    table = told({**OURS, "metrics": metrics}, THEIRS)
    assert [n.code for n in table.notes if n.code in ("cpu_tier_unused", "nothing_evicted")] == ([code] if code else [])
    if code == "cpu_tier_unused":
        assert values_of(table, code) == {"chunks": "2,605"}
    if code == "nothing_evicted":
        said = {"raised": "raise workload.pressure (now 2.0)", "lowered": "lower cache.gpu (now 4096 tokens)"}
        assert values_of(table, code) == said


def test_a_busy_machine_is_told_by_its_median_and_its_worst() -> None:
    quiet, busy = ({"flags": {"others_cpu_share": share}} for share in (0.01, 0.62))
    assert values_of(told({**OURS, **quiet}, {**THEIRS, **quiet}), "busy_machine") is None
    gpu_only = {"baseline": "gpu_only", "ttft": FLAT, **quiet}
    mixed = told({**OURS, **quiet}, gpu_only, {**THEIRS, **busy})
    assert values_of(mixed, "busy_machine") == {"share": 0.01, "most": 0.62}


@pytest.mark.parametrize(
    ("flag", "code"),
    [("contaminated", "cache_not_as_declared"), ("cache_state_unverified", "cache_not_verified")],
)
def test_a_cache_that_was_not_what_was_declared_is_told(flag: str, code: str) -> None:
    table = told(OURS, {**THEIRS, "flags": {flag: "It held 64 tokens."}})
    assert where(table, code) == "stateless: It held 64 tokens (and 4 more trials)"
    assert where(told(OURS, THEIRS), code) is None


@pytest.mark.parametrize(("error", "noted"), [(788.0, "+788 %"), (-60.0, "-60 %"), (12.0, None)])
def test_a_cost_model_that_is_far_off_is_told_by_its_worst_error(error: float, noted: str | None) -> None:
    far = {**OURS, "metrics": {"cost_model_error_pct": error}}
    near = {**OURS, "metrics": {"cost_model_error_pct": 5.0}, "cache": "small"}
    assert where(told(far, near), "cost_model_off") == (f"pensieve {noted}" if noted else None)


@pytest.mark.parametrize(
    ("load", "flags", "rate", "noted"),
    [
        ("open", {}, 5.4, True),
        ("partly open", {}, 5.4, True),
        ("open", {}, 8.8, False),  # 2 % less
        ("closed", {}, 5.4, False),  # where people wait for replies the rates are the finding
        ("open", {"window": "too small"}, 5.4, False),  # over all turns, with start-up and drain
    ],
)
def test_a_baseline_that_finished_less_of_an_open_load_is_told(
    load: str, flags: dict[str, str], rate: float, noted: bool
) -> None:
    common = {"flags": {"load": load, **flags}}
    table = told(
        {**OURS, "metrics": {"throughput_req_s": 9.0}, **common},
        {**THEIRS, "metrics": {"throughput_req_s": rate}, **common},
    )
    expected = f"stateless {rate:.3g}, pensieve 9 with the same seeds" if noted else None
    assert where(table, "less_finished") == expected


@pytest.mark.parametrize(
    ("flags", "queue", "noted"),
    [
        ({}, 0.6, True),
        ({"not_steady": "too early"}, 0.6, False),
        ({}, 0.1, False),  # nobody waits: that arrivals were fewer is chance
    ],
)
def test_less_than_was_offered_is_told_where_it_was_waited_for(
    flags: dict[str, str], queue: float, noted: bool
) -> None:
    trial = {
        "ttft": FLAT, "queue": queue, "metrics": {"throughput_req_s": 6.0}, "flags": {"load": "open", **flags},
        "engine": {"workload": {"request_rate_per_s": 10.0}},
    }  # fmt: skip
    table = told({"baseline": "pensieve", **trial}, {"baseline": "stateless", **trial})
    assert where(table, "less_finished") == ("pensieve 6 of 10 offered; stateless 6 of 10 offered" if noted else None)


def test_rates_with_other_seeds_are_other_loads() -> None:
    """Two baselines beside each other with one seed in common: 9 and 9 there, whatever the others gave."""
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, seed="0,1,2")
    given = [("pensieve", 0, 9.0), ("pensieve", 1, 14.0), ("stateless", 0, 9.0), ("stateless", 2, 4.0)]
    for job, (baseline, seed, rate) in enumerate(given):
        trial = add_trial(store, sweep, job, baseline, turns(FLAT), {"throughput_req_s": rate}, seed=seed)
        store.set_trial(trial, flags={"load": "open"})
    assert where(sweep_table(store, sweep), "less_finished") is None


def one_after_another(at_once: int) -> list[TurnRecord]:
    """40 turns: one begins a second, and each takes `at_once` seconds; `at_once` - 1 of them are running when one comes."""
    return [turn(f"s{i}", 1, arrived_s=float(i), admitted_s=float(i), finished_s=i + at_once - 0.5) for i in range(40)]


CROWD = [turn(f"s{i}", 1, arrived_s=0.0, admitted_s=0.0, finished_s=1.0 + i) for i in range(10)]


@pytest.mark.parametrize(
    ("made", "share"),
    # The first four turns come before four are running; of a crowd that comes at once those beyond the slots find them taken.
    [(one_after_another(8), "90%"), (one_after_another(5), "90%"), (one_after_another(4), None), (CROWD, "60%")],
)
def test_slots_that_turns_find_taken_are_told(made: list[TurnRecord], share: str | None) -> None:
    slots = {"baseline": "llama_slots", "turns": made, "engine": {"n_slots": 4}}
    table = told({"baseline": "pensieve", "turns": made}, slots, seeds=2)
    assert where(table, "slots_taken") == (f"llama_slots has 4, taken for {share} of its turns" if share else None)


@pytest.mark.parametrize(("seeds", "count"), [(5, 15), (7, None)])
def test_few_conversations_are_told(seeds: int, count: int | None) -> None:
    """Three a seed: 15 and 21."""
    values = values_of(told(OURS, THEIRS, seeds=seeds), "few_conversations")
    assert values == ({"count": count, "least": 20} if count else None)


@pytest.mark.parametrize(
    ("repeats", "seeds", "codes"),
    [
        ((0,), 1, ["one_seed"]),
        ((0, 1), 1, ["one_seed", "repeated_seed"]),
        ((0, 1), 2, ["few_seeds"]),
        ((0,), 3, ["few_seeds"]),
        ((0,), 5, []),
    ],
)
def test_few_seeds_are_told(repeats: tuple[int, ...], seeds: int, codes: list[str]) -> None:
    table = told(*({**one, "repeat": repeat} for one in (OURS, THEIRS) for repeat in repeats), seeds=seeds)
    assert [note.code for note in table.notes if note.code.endswith(("seed", "seeds"))] == codes


def test_trials_that_did_not_complete_stand_above_the_table() -> None:
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, n_expected=6, seed="0,1,2")
    assert values_of(sweep_table(store, sweep), "sweep_running") == {"waiting": 6, "lost": 0, "expected": 6}
    for job, (baseline, seed) in enumerate([("pensieve", 0), ("stateless", 0), ("pensieve", 1)]):
        add_trial(store, sweep, job, baseline, turns(FLAT), seed=seed)
    failed = store.begin_trial(trial_fields("failed", baseline="stateless", seed=1))
    store.link(sweep, failed, 3, reused=False)
    assert values_of(sweep_table(store, sweep), "sweep_running") == {"waiting": 3, "lost": 0, "expected": 6}
    store.finish_trial(failed, "failed", "The disk is full; free some space.")
    table = sweep_table(store, sweep)
    assert values_of(table, "sweep_running") == {"waiting": 2, "lost": 1, "expected": 6}
    assert where(table, "not_completed") == "stateless, seed 1, failed: The disk is full; free some space"
    store.set_sweep(sweep, status="interrupted")
    table = sweep_table(store, sweep)
    assert values_of(table, "trials_missing") == {"missing": 3, "expected": 6}
    assert table.answers[1] == "3 of 6 trials did not complete. Type the same command again to run them."
    assert values_of(table, "never_begun") == {"count": 2, "expected": 6}


def test_turns_without_a_reply_are_told_since_who_loses_the_slow_ones_looks_fast() -> None:
    lost = {"statuses": {"completed": 90.0, "timeout": 8.0, "failed": 2.0, "refused": 0.0}}
    table = told({**OURS, "statuses": {"completed": 100.0}}, {**THEIRS, **lost}, seeds=2)
    assert where(table, "turns_without_reply") == "stateless 20 of 200 (16 timeout, 4 failed)"


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"contended": True}, "trials that shared their device with others"),
        ({"code_hash": "other"}, "trials of different versions of the code"),
    ],
)
def test_what_must_not_be_compared_stands_above_the_table(changed: dict[str, Any], what: str) -> None:
    assert values_of(told(OURS, THEIRS), "do_not_compare") is None
    table = told(OURS, {**THEIRS, **changed})
    assert (values_of(table, "do_not_compare") or {})["what"] == what
    assert any(what in sentence for sentence in table.answers)


def test_hardware_that_an_axis_sweeps_is_no_mixture() -> None:
    trials = [
        {**one, "hardware": hardware, "simulated": hardware != "cpu"}
        for hardware in ("cpu", "sim_h100")
        for one in (OURS, THEIRS)
    ]
    assert values_of(told(*trials, hardware="cpu,sim_h100"), "do_not_compare") is None


@pytest.mark.parametrize(
    ("load", "flags", "ours", "theirs", "noted"),
    [
        ("closed", {}, (15.6, 100.0), (13.4, 100.0), "TPOT 15.6 ms, stateless 13.4"),
        ("open", {}, (15.6, 80.0), (13.4, 100.0), "TPOT 15.6 ms, stateless 13.4"),
        ("closed", {}, (13.4, 80.0), (13.4, 100.0), "80 output tokens/s, stateless 100"),
        ("partly open", {"window": "too small"}, (13.4, 80.0), (13.4, 100.0), None),  # with start-up and drain
        ("closed", {}, (13.6, 98.0), (13.4, 100.0), None),  # 2 %
        ("closed", {}, (10.0, 120.0), (13.4, 100.0), None),  # ahead
    ],
)
def test_what_pensieve_is_behind_at_is_told(
    load: str, flags: dict[str, str], ours: tuple[float, float], theirs: tuple[float, float], noted: str | None
) -> None:
    def trial(one: dict[str, Any], given: tuple[float, float]) -> dict[str, Any]:
        rates = {"tpot_ms_mean": given[0], "throughput_output_tok_s": given[1], "throughput_req_s": 5.0}
        return {**one, "metrics": rates, "flags": {"load": load, **flags}}

    both = trial(OURS, ours), trial(THEIRS, theirs)
    assert where(told(*both), "slower_at") == noted
    assert where(told(*both, seeds=4), "slower_at") == (f"{noted} (4 seeds)" if noted else None)


def test_what_one_seed_contradicts_is_not_told() -> None:
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store, seed="0,1")
    for job, (baseline, seed, ms) in enumerate(
        [("pensieve", 0, 40.0), ("stateless", 0, 10.0), ("pensieve", 1, 9.0), ("stateless", 1, 10.0)]
    ):
        add_trial(store, sweep, job, baseline, turns(FLAT), {"tpot_ms_mean": ms}, seed=seed)
    assert where(sweep_table(store, sweep), "slower_at") is None


CUT = {"conversations": 40, "conversations_cut_by_context": 5, "turns_cut_by_context": 12}


@pytest.mark.parametrize(
    ("plan", "noted"),
    [
        # Five seeds of 40 conversations; both baselines were asked the same ones, which count once.
        (CUT, "25 of 200 conversations end early (60 turns are never asked)"),
        ({"conversations": 40, "conversations_cut_by_context": 0}, None),
        ({}, None),
    ],
)
def test_a_context_that_cuts_conversations_stands_above_the_table(plan: dict[str, int], noted: str | None) -> None:
    trial = {"engine": {"workload": plan}}
    assert where(told({**OURS, **trial}, {**THEIRS, **trial}), "context_cut") == noted


def test_lengths_in_bytes_stand_above_the_table() -> None:
    trial = {"engine": {"workload": {**CUT, "tokens": "bytes", "load": "closed", "sessions": 3}}}
    table = told({**OURS, **trial}, {**THEIRS, **trial})
    assert [note.code for note in table.notes if note.above] == ["tokens_are_bytes", "context_cut"]
    assert any("(closed, tokens are bytes)" in note.text for note in table.notes)


def test_the_settings_whose_conversations_are_cut_are_named() -> None:
    longer = {"conversations": 40, "conversations_too_long_for_the_context": 2}
    table = told(
        {**OURS, "model": "opt_13b", "engine": {"workload": CUT}},
        {**OURS, "model": "llama3_8b", "engine": {"workload": longer}},
        {**OURS, "model": "tiny", "engine": {"workload": {"conversations": 40}}},
        model="opt_13b,llama3_8b,tiny",
    )
    assert where(table, "context_cut") == (
        "(model=opt_13b) 25 of 200 conversations end early (60 turns are never asked); "
        "(model=llama3_8b) 10 conversations are left out, whose first prompt does not fit"
    )


def test_a_server_that_stores_nothing_has_no_bound() -> None:
    metrics = {"metrics": {"bound_hit_rate": 0.9}}
    table = told({**OURS, **metrics}, {**THEIRS, **metrics})
    assert where(table, "bound") == "pensieve 90.0"
    assert {row.baseline: row.bound_hit_rate for row in table.rows} == {"pensieve": 0.9, "stateless": None}


def test_window_flags_name_the_baselines_that_have_them() -> None:
    table = told({**OURS, "flags": {"halves": "x", "drain_share": 0.4}}, THEIRS, seeds=2)
    assert (where(table, "halves"), where(table, "drain")) == ("pensieve 2 of 2", "pensieve 40%")
    both = {"flags": {"halves": "x"}}
    assert where(told({**OURS, **both}, {**THEIRS, **both}, seeds=2), "halves") == "all trials"


def test_what_ran_is_told_as_facts() -> None:
    table = told(OURS, {**THEIRS, "cpu_tokens": 0}, seeds=2)
    assert where(table, "budgets") == "pensieve GPU 4,096 + CPU 2,048, stateless GPU 4,096; working set 8,200"
    assert values_of(table, "warm_up") == {"count": "4"}
    assert values_of(table, "random_weights") == {} and where(table, "simulated") is None
    simulated = told(*({**one, "simulated": True, "hardware": "sim_h100"} for one in (OURS, THEIRS)))
    assert where(simulated, "simulated") == "sim_h100"


def test_the_load_says_how_long_people_think_at_most() -> None:
    plan = {"load": "closed", "sessions": 10, "think_time_s": 0.5}
    trials: Any = [SimpleNamespace(engine={"workload": facts}) for facts in (plan, {**plan, "think_time_cap_s": 1.25})]
    assert load_line(trials[:1]) == "Load (closed): 10 conversations, 0.5 s of think time."
    assert load_line(trials[1:]) == "Load (closed): 10 conversations, 0.5 s of think time, 1.25 s of it at most."
