"""Trials of one baseline and setting that another forward computed are told apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.errors import ResultsError
from pensieve.lab.results.compare_trials import select_trials
from pensieve.lab.results.frame import differences, listed_values, mixtures, swept_axes, text_of
from pensieve.lab.results.store import ResultsStore
from tests.results.trials import MEMORY, add_trial, conversation_turns, open_sweep


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


@pytest.fixture
def store():
    made = ResultsStore(MEMORY)
    sweep = open_sweep(made)
    job = 0
    for seed in (0, 1):
        for baseline in ("pensieve", "stateless"):
            config = {"seed": seed, "baseline": {"name": baseline}, "workload": {"name": "chat", "users": 3 + seed}}
            add_trial(made, sweep, job, baseline, conversation_turns([10.0]), seed=seed, config=config)
            job += 1
    return made


@pytest.mark.parametrize(
    ("words", "trials"),
    [
        ("1", 4),
        ("latest", 4),
        ("sweep=latest,seed=1", 2),
        ("baseline=pensieve, workload.users=4", 1),
        ("simulated=false", 4),
    ],
)
def test_a_sweep_and_conditions_that_all_hold(store, words, trials):
    assert len(select_trials(store, words)) == trials


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("baseline=vllm", "baseline is pensieve, stateless"),
        ("9", "no sweep 9"),
        ("workload.nothing=1", "workload.nothing is null|none"),
    ],
)
def test_what_is_not_there_is_said(store, words, part):
    with pytest.raises(ResultsError, match=part):
        select_trials(store, words)


def test_what_varies_leaves_seeds_out(store):
    assert differences(select_trials(store, "1")) == {"baseline.name", "workload.users"}
    assert differences(select_trials(store, "seed=0")) == {"baseline.name"}
    assert differences([trial(n, None, repeat=n, experiment_name=str(n)) for n in (1, 2)]) == set()


@pytest.mark.parametrize(
    ("value", "text"),
    [(312e12, "3.12e+14"), (2.0, "2"), (1234567.0, "1234567"), (0.1 + 0.2, "0.30000000000000004"), (float("nan"), "nan"),
     (21474836480, "21474836480"), (True, "true"), (None, "none")],
)  # fmt: skip
def test_a_number_is_written_as_it_would_be_typed(value, text):
    assert text_of(value) == text


def test_a_number_is_found_however_it_is_typed():
    store = ResultsStore(MEMORY)
    sweep = open_sweep(store)
    config = {"seed": 0, "hardware": {"flops": 312e12}, "workload": {"think_time_s": 2.0}}
    add_trial(store, sweep, 0, "pensieve", conversation_turns([10.0]), config=config)
    for words in ("hardware.flops=3.12e+14", "hardware.flops=312e12", "workload.think_time_s=2.0"):
        assert len(select_trials(store, words)) == 1
    with pytest.raises(ResultsError, match=r"workload\.think_time_s is 2\.$"):
        select_trials(store, "workload.think_time_s=2.5")
