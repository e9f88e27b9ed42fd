"""Trials that are told apart, chosen by words, and compared."""

from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.errors import MissingSeries, MixedPanel, ResultsError
from pensieve.lab.results.compare_trials import _row, _verdict, compare_trials, select_trials
from pensieve.lab.results.frame import differences, listed_values, mixtures, swept_axes
from pensieve.lab.results.store import ResultsStore
from tests.results.trials import MEMORY, add_trial, conversation_turns, open_sweep


def config(baseline, **workload):
    return {"baseline": {"name": baseline}, "workload": {"name": "chat", **workload}}


def fill(store, seeds=3, users=(3,), slow=2.0, simulated=False, flags=None):
    """pensieve, and stateless that is `slow` times slower and has half the throughput."""
    sweep, job = open_sweep(store), 0
    for seed in range(seeds):
        for count in users:
            for baseline, factor in (("pensieve", 1.0), ("stateless", slow)):
                turns = conversation_turns([factor * (10.0 + seed), factor * 20.0], sessions=4)
                metrics = {
                    "ttft_ms_mean": 1.0, "throughput_output_tok_s": (100.0 + seed) / factor,
                    "throughput_req_s": 10.0 / factor, "gpu_hit_rate": 0.5 if factor == 1.0 else 0.0,
                }  # fmt: skip
                made = add_trial(
                    store, sweep, job, baseline, turns, metrics, seed=seed, config=config(baseline, users=count),
                    simulated=simulated,
                )  # fmt: skip
                store.set_trial(made, flags=flags or {"load": "closed"})
                job += 1


def contrasts(store, a="baseline=pensieve", b="baseline=stateless"):
    found = compare_trials(store, select_trials(store, a), select_trials(store, b))
    return {(row.group, row.metric, row.label): row for row in found.rows}, found.notes


def test_trials_of_other_seeds_are_not_compared():
    store = ResultsStore(MEMORY)
    fill(store)
    with pytest.raises(MissingSeries, match="same seeds"):
        contrasts(store, "baseline=pensieve,seed=0", "baseline=stateless,seed=1")


def test_no_trial_takes_anothers_place():
    """Two versions of the code in one side: whichever came last would decide the verdict."""
    store = ResultsStore(MEMORY)
    fill(store, slow=2.0, seeds=5)
    for trial in select_trials(store, "baseline=stateless"):
        store.set_trial(trial.id, code_hash="older", fingerprint=f"older {trial.id}")
    fill(store, slow=0.5, seeds=5)
    with pytest.raises(MixedPanel, match="different versions of the code"):
        contrasts(store, b="baseline=stateless")
    sides = [select_trials(store, f"baseline={name}") for name in ("pensieve", "stateless")]
    with pytest.raises(MixedPanel, match="B has trials 2 and 12 of the same configuration, seed and repeat"):
        compare_trials(store, *sides, allow_mixed=True)
    rows, _ = contrasts(store, "baseline=pensieve", "baseline=stateless,code_hash=d")
    assert rows["", "ttft_ms_mean", ""].verdict == "B is better"


def test_unequal_achieved_rates_are_said_unless_the_load_waits():
    for load, said in (("partly open", True), ("closed", False)):
        store = ResultsStore(MEMORY)
        fill(store, flags={"load": load})
        assert any("achieved rates differ" in note for note in contrasts(store)[1]) is said


@pytest.mark.parametrize(
    ("a", "b", "of_pairs", "ratio"),
    [
        ((1.0, 100.0), (10.0, 10.0), True, 1.0),
        ((0.0, 4.0), (4.0, 4.0), False, 0.5),
        ((1.0, 2.0), (0.0, 0.0), False, None),
    ],
)
def test_the_ratio_is_of_the_pairs_or_where_some_value_is_0_of_the_means(a, b, of_pairs, ratio):
    sides = ({(0, str(place)): value for place, value in enumerate(side)} for side in (a, b))
    row = _row("", "ttft_ms_mean", "", "ms", *sides, "conversations")
    assert (row.of_pairs, row.ratio) == (of_pairs, ratio and pytest.approx(ratio))


def test_an_interval_that_holds_one_shows_no_difference():
    a, b = {(0, str(i)): ms for i, ms in enumerate((9.8, 10.3) * 6)}, {(0, str(i)): 10.0 for i in range(12)}
    row = _row("", "ttft_ms_mean", "", "ms", a, b, "conversations")
    assert 0.9 < row.ci_low < 1 < row.ci_high < 1.1 and row.verdict == "no difference shown"
    assert _verdict("ttft_ms_mean", 9.0, 10.0, 0.8, 1.0, 12) == "no difference shown", "an end at 1 holds it"


def trial(number: int, forward: str | None, baseline: str = "pensieve", **config: Any) -> Any:
    """What is compared of one; as many as differ in nothing else are repeats of each other."""
    return SimpleNamespace(
        id=number, simulated=False, contended=False, flags={}, weights="random", code_hash="c", baseline=baseline,
        config={"cache": {"gpu": "512 tokens"}, "seed": number, "trial": {"retries": number}, **config},
        engine={} if forward is None else {"forward": forward}, environment={},
    )  # fmt: skip


def test_one_baseline_and_setting_have_one_forward() -> None:
    one = trial(1, "fused, packed weights")
    [found] = mixtures([one, trial(2, "fused")])
    assert "different forwards (fused; fused, packed weights)" in found.what and "hardware.cpu_memory" in found.remedy
    for other in (
        trial(2, "fused, packed weights"), trial(2, "fused", baseline="native_pytorch"),
        trial(2, "fused", cache={"gpu": "64 tokens"}), trial(2, None),
    ):  # fmt: skip
        assert mixtures([one, other]) == []


def test_trials_that_use_other_files_are_of_one_version_where_their_common_files_are_alike() -> None:
    def of(number: int, code: dict[str, str] | None, **config: Any) -> Any:
        one = trial(number, None, **config)
        one.code_hash, one.environment = str(number), {} if code is None else {"code": code}
        return one

    ours = of(1, {"engine.py": "a", "cache/two_tier.py": "b"})
    assert mixtures([ours, of(2, {"engine.py": "a", "cache/stateless.py": "c"})]) == []
    for other in (of(2, {"engine.py": "x", "cache/stateless.py": "c"}), of(2, None)):
        [found] = mixtures([ours, other])
        assert "different versions of the code" in found.what


def test_an_axis_is_a_list_and_in_older_databases_a_text() -> None:
    given = {
        "one": "'2 GB'", "+lists": ["[1,2]", "[3]"], "chosen": "choice(1,3)", "names": "lru,fifo", "alone": ["x"],
        "hydra.verbose": "1,2",
    }  # fmt: skip
    assert swept_axes(given) == ["lists", "chosen", "names"]
    assert [listed_values(given[name]) for name in ("one", "+lists", "chosen", "names")] == [
        [], ["[1,2]", "[3]"], [], ["lru", "fifo"],
    ]  # fmt: skip


def test_a_sweep_and_conditions_that_all_hold_name_trials_and_what_varies_leaves_seeds_out():
    store = ResultsStore(MEMORY)
    fill(store, seeds=2, users=(3, 6))
    words = {
        "1": 8,
        "latest": 8,
        "sweep=latest,seed=1": 4,
        "baseline=pensieve, workload.users=6": 2,
        "simulated=false": 8,
    }
    assert {one: len(select_trials(store, one)) for one in words} == words
    assert differences(select_trials(store, "1")) == {"baseline.name", "workload.users"}
    assert differences([trial(n, None, repeat=n, experiment_name=str(n)) for n in (1, 2)]) == set()


def test_a_number_is_found_however_it_is_typed():
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store)
    config = {"seed": 0, "hardware": {"flops": 312e12}, "workload": {"think_time_s": 2.0}}
    add_trial(store, sweep, 0, "pensieve", conversation_turns([10.0]), config=config)
    for words in ("hardware.flops=3.12e+14", "hardware.flops=312e12", "workload.think_time_s=2.0"):
        assert len(select_trials(store, words)) == 1
    with pytest.raises(ResultsError, match=r"workload\.think_time_s is 2\.$"):
        select_trials(store, "workload.think_time_s=2.5")
