"""What served and how its self-check came out stands under every table of real trials."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from pensieve.lab.results.compare_trials import compare_trials, select_trials
from pensieve.lab.results.served_by import footer
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.results.sweep_table import sweep_table
from pensieve.lab.trial.summary import summary
from tests.results.trials import MEMORY, add_trial, conversation_turns, open_sweep


def settings(difference: float = 0.001, limit: float = 0.004, **changed: Any) -> dict[str, Any]:
    served = {
        "attention_backend": "triton", "attention_version": "3.9.0", "forward": "fused", "attention_note": "Not varlen: old.",
        "forward_note": "", "fell_back": False, "self_check_against": "float32",
    }  # fmt: skip
    return {**served, "self_check_difference": difference, "self_check_limit": limit, **changed}


def shown(store: ResultsStore, trial: int) -> str:
    """A trial's summary."""
    text = StringIO()
    Console(file=text, width=300).print(summary(store, trial))
    return text.getvalue()


def sweep_of(store: ResultsStore, **engines: Any) -> int:
    sweep = open_sweep(store, n_expected=2 * len(engines), seed="0,1", baseline=",".join(engines))
    jobs = [(seed, baseline) for seed in range(2) for baseline in engines]
    for job, (seed, baseline) in enumerate(jobs):
        engine = engines[baseline][seed] if isinstance(engines[baseline], list) else engines[baseline]
        add_trial(store, sweep, job, baseline, conversation_turns([40.0, 50.0]), seed=seed, engine=engine)
    return sweep


def test_one_way_of_serving_is_one_sentence_with_the_check_that_was_nearest_to_its_limit() -> None:
    store = ResultsStore(MEMORY)
    sweep = sweep_of(store, pensieve=[settings(0.001), settings(0.003)], stateless=settings(0.0035, limit=0.008))
    said = (
        "Attention: triton 3.9.0; forward: fused. Self-check passed: logits differ from those of the same weights in float32 "
        "by 0.003, of 0.004 allowed."
    )
    trials = select_trials(store, "latest")
    assert footer(trials) == [said]
    assert said in [note.text for note in sweep_table(store, sweep).notes]
    pairs = [[trial for trial in trials if trial.baseline == name] for name in ("pensieve", "stateless")]
    assert said in compare_trials(store, *pairs).notes
    assert trials[2].seed == 1 and said in shown(store, trials[2].id)


@pytest.mark.parametrize(
    ("changed", "said"),
    [({"contended": True}, "shared their device with others: do not compare its times"), ({}, None)],
)
def test_one_trial_that_is_to_be_compared_with_none_says_so(changed: dict[str, Any], said: str | None) -> None:
    store = ResultsStore(MEMORY)
    text = shown(store, add_trial(store, open_sweep(store), 0, "pensieve", conversation_turns([40.0]), **changed))
    assert (said or "trial 1:") in text and ("do not compare" in text) is (said is not None)


def test_several_ways_are_told_apart_and_a_fall_back_is_said_with_its_reason() -> None:
    store = ResultsStore(MEMORY)
    fell = settings(
        1e-6, 1e-4, attention_backend="reference", attention_version="", fell_back=True, self_check_against="eager"
    )
    sweep_of(store, pensieve=settings(), stateless=fell)
    first, second = footer(select_trials(store, "latest"))
    assert first.startswith("Attention (pensieve): triton 3.9.0; ") and "Something better" not in first
    assert second.startswith("Attention (stateless): reference; ") and "from the model's own by 1e-06" in second
    assert second.endswith("Something better did not serve. Not varlen: old.")


def test_engines_of_others_and_simulated_trials_have_none() -> None:
    store = ResultsStore(MEMORY)
    sweep_of(store, pensieve={"engine": "vllm"}, stateless=None)
    trials = select_trials(store, "latest")
    assert footer(trials) == []
    trials[0].simulated, trials[0].engine = True, settings()
    assert footer(trials[:1]) == []


def test_what_a_context_cut_stands_above_one_trials_numbers() -> None:
    store, engine = ResultsStore(MEMORY), {"workload": {"conversations": 40, "conversations_cut_by_context": 5}}
    trial = add_trial(store, open_sweep(store), 0, "pensieve", conversation_turns([40.0]), engine=engine)
    assert shown(store, trial).startswith("The model's context cuts the load: 5 of 40 conversations end early.")


@pytest.mark.parametrize(
    ("queue_ms", "offered", "told"),
    [
        (7_890_000.0, 5.0, "7,890,000 of 7,899,844 ms of TTFT (p50) is queueing"),
        (7_890_000.0, None, "7,890,000 of 7,899,844 ms"),
        (10.0, 5.0, None),
    ],
)
def test_overload_stands_above_one_trials_numbers(queue_ms: float, offered: float | None, told: str | None) -> None:
    store = ResultsStore(MEMORY)
    metrics = {"queue_ms_p50": queue_ms, "ttft_ms_p50": 7_899_844.0, "throughput_req_s": 3.5}
    engine = {"workload": {"request_rate_per_s": offered}}
    trial = add_trial(store, open_sweep(store), 0, "pensieve", conversation_turns([40.0]), metrics, engine=engine)
    said = shown(store, trial)
    assert said.startswith("Near saturation: ") is (told is not None)
    assert told is None or told in said
    assert ("Finished 3.5 of 5 requests/s offered" in said) is (told is not None and offered is not None)
