"""Claims against whole sweeps, and the table they end up in."""

import pytest
from sqlalchemy import func, select

from pensieve.errors import ResultsError
from pensieve.lab.results.claims import judge_sweep, record_claims, recorded_claims
from pensieve.lab.results.schema import ClaimRow
from pensieve.lab.results.store import ResultsStore
from tests.results.claims.synthetic import claim, sweep, talk
from tests.results.trials import MEMORY, add_trial, open_sweep

FAST, SLOW = talk(10.0, 10.0), talk(30.0, 30.0)


def verdict(store, **changed):
    [one] = judge_sweep(store, 1, [claim(**changed)])
    return one.judgement.verdict, one.judgement.why


def test_swapping_two_baselines_flips_the_verdict():
    assert verdict(sweep({"pensieve": FAST, "stateless": SLOW}))[0] == "holds"
    assert verdict(sweep({"pensieve": SLOW, "stateless": FAST}))[0] == "fails"


def test_an_interval_across_the_bound_is_inconclusive():
    def uneven(seed):
        return talk(10.0 * (1 + 4 * seed), 10.0)(seed)

    assert verdict(sweep({"pensieve": uneven, "stateless": SLOW}), claimed={"above": 1.3}) == (
        "inconclusive",
        "the interval lies across the claim's bound",
    )


def test_a_baseline_that_is_not_there_is_named():
    assert verdict(sweep({"pensieve": FAST, "gpu_only": SLOW}), against=["vllm", "stateless"]) == (
        "not comparable",
        "no completed trial of vllm or stateless in this sweep",
    )


def test_the_first_baseline_that_is_there_is_taken():
    store = sweep({"pensieve": FAST, "gpu_only": talk(11.0, 11.0), "stateless": SLOW})
    [one] = judge_sweep(store, 1, [claim(against=["vllm", "stateless", "gpu_only"])])
    assert (one.ours, one.theirs, one.measured.value) == ("pensieve", "stateless", pytest.approx(3.0))
    assert len(one.measured.trial_ids) == 10


def test_a_condition_that_differs_leaves_the_measurement_to_be_seen():
    store = sweep({"pensieve": FAST, "stateless": SLOW})
    [one] = judge_sweep(store, 1, [claim(conditions={"model": ["opt_13b"]})])
    assert (one.judgement.verdict, one.measured.value) == ("not comparable", pytest.approx(3.0))
    assert "model is tiny here, claimed for opt_13b" in one.judgement.why


def test_another_workload_is_another_question():
    store = sweep({"pensieve": FAST, "stateless": SLOW})
    [one] = judge_sweep(store, 1, [claim(conditions={"workload": ["hotness"]})])
    assert (one.judgement.verdict, one.measured) == ("not comparable", None)


def test_of_several_workloads_those_that_the_claim_is_about_are_taken():
    store = sweep({"pensieve": FAST, "stateless": SLOW})
    for job, name in enumerate(("pensieve", "stateless"), start=50):
        add_trial(store, 1, job, name, FAST(0), workload="other", config={"workload": {"name": "chat"}})
    [one] = judge_sweep(store, 1, [claim(conditions={"workload": ["chat"]})])
    assert (one.judgement.verdict, one.measured.trial_ids) == ("holds", tuple(range(1, 11)))


@pytest.mark.parametrize(
    ("changed", "clause"),
    [
        ({"simulated": True}, "the sweep holds simulated and real trials"),
        ({"code_hash": "other"}, "different versions of the code"),
        ({"weights": "hub"}, "random and trained weights"),
        ({"contended": True}, "shared their device with others"),
    ],
)
def test_trials_that_must_not_stand_beside_each_other(changed, clause):
    store = sweep({"pensieve": FAST, "stateless": SLOW}, seeds=2)
    config = {"workload": {"name": "chat"}}
    add_trial(store, 1, 4, "pensieve", FAST(2), seed=2, config=config, **changed)
    add_trial(store, 1, 5, "stateless", SLOW(2), seed=2, config=config)
    found, why = verdict(store)
    assert found == "not comparable"
    assert clause in why


def test_every_group_of_a_sweep_is_judged_by_itself():
    def ours(seed, cache):
        return talk(10.0 if cache == "large" else 30.0)(seed)

    turns = {"pensieve": ours, "stateless": lambda seed, cache: talk(30.0)(seed)}
    store = sweep(turns, axis="cache.size", values=["large", "small"])
    found = {one.name: one.judgement.verdict for one in judge_sweep(store, 1, [claim()])}
    assert found == {"speedup (cache.size=large)": "holds", "speedup (cache.size=small)": "fails"}


def test_what_no_group_can_speak_to_is_said_once_of_the_nearest_group():
    turns = {"pensieve": lambda seed, size: FAST(seed), "stateless": lambda seed, size: SLOW(seed)}
    store = sweep(turns, axis="cache.size", values=[1, 2, 3])
    conditions = {"model": ["opt_13b"], "cache.size": [2]}
    [one] = judge_sweep(store, 1, [claim(conditions=conditions)])
    assert one.name == "speedup (cache.size=2)"
    assert one.differences == ("model is tiny here, claimed for opt_13b",)


def test_a_failed_trial_and_a_sweep_without_trials_speak_to_nothing():
    store = ResultsStore(MEMORY)
    open_sweep(store, n_expected=2)
    assert verdict(store) == ("not comparable", "no trial of this sweep is completed")
    with pytest.raises(ResultsError, match="no sweep 9"):
        judge_sweep(store, 9, [claim()])


def test_rows_of_the_table_are_replaced_not_added():
    store = sweep({"pensieve": FAST, "stateless": SLOW})
    other = store.open_sweep("other", "chat", None, None, {}, 0, "host", None)
    record_claims(store, other, judge_sweep(store, other, [claim(name="kept")]))
    first = [claim(), claim(name="dropped", claimed={"between": [1.0, 2.0]})]
    record_claims(store, 1, judge_sweep(store, 1, first))
    assert [(row.name, row.verdict) for row in recorded_claims(store, 1)] == [
        ("dropped", "fails"),
        ("speedup", "holds"),
    ]
    for _ in range(2):
        record_claims(store, 1, judge_sweep(store, 1, [claim(claimed={"below": 1.0})]))
    [row] = recorded_claims(store, 1)
    assert (row.name, row.verdict, row.claimed) == ("speedup", "fails", 1.0)
    assert (row.measured, row.n, row.trial_ids) == (pytest.approx(3.0), 20, list(range(1, 11)))
    with store.database.reading() as connection:
        assert connection.scalar(select(func.count()).select_from(ClaimRow)) == 2
