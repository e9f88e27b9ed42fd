"""Trials on a server that runs on between them: whether its cache was what the trial declares, by its own counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pensieve.lab.compose.settings import resolved
from pensieve.lab.results.frame import mixtures
from pensieve.lab.trial.job import Job, Tracking, open_tracking
from pensieve.lab.trial.run import run_trial
from tests.composed import checked, composed
from tests.engines.endpoint import Endpoint

SMALL = (
    "tracking=local", "baseline=openai_http", "model=tiny", "hardware=cpu", "hardware.threads=1", "workload=rounds",
    "workload.conversations=2", "workload.rounds=2", "workload.message_tokens=40", "workload.reply_tokens=4",
    "trial.exclusive=false", "force=true",
)  # fmt: skip


@pytest.fixture(autouse=True)
def keeps(endpoint: Endpoint) -> None:
    endpoint.caches = True


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    return replace(open_tracking(checked("tracking=local").tracking), mlflow=False)


def run(tracking: Tracking, endpoint: Endpoint, *words: str) -> Any:
    words = (*SMALL, f"baseline.engine.base_url={endpoint.url}", *words)
    outcome = run_trial(Job("test", tracking.outputs / "x", resolved(composed(*words))), tracking)
    assert outcome.completed, outcome.error
    return tracking.store.trial(outcome.trial_id)


def test_a_trial_is_reused_while_its_server_says_that_it_is_the_same(
    tracking: Tracking, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def say(text: str) -> None:
        if text.startswith("Runs again"):
            lines.append(text)

    monkeypatch.setattr("pensieve.lab.trial.run.say", say)

    def trial(*words: str) -> int:
        return int(run(tracking, endpoint, "force=false", *words).id)

    assert [trial(), trial()] == [1, 2], "it states nothing but a name"
    assert lines == [
        f"Runs again: the server at {endpoint.url} does not state its version, so another model may answer there now "
        "(resume=config accepts trial 1)."
    ]
    assert trial("resume=config") == 2
    endpoint.pages["/version"] = {"version": "0.32.0"}
    card = {"id": "served", "root": "org/model", "max_model_len": 4096, "created": 1, "permission": [{"id": "x"}]}
    endpoint.listing = 200, {"data": [card]}
    assert [trial(), trial()] == [3, 3]
    card |= {"created": 2, "permission": [{"id": "y"}]}  # others at each answer
    assert trial() == 3
    card["root"] = "org/other"
    assert trial() == 4 and "served_model org/model -> org/other" in lines[-1]
    card["max_model_len"] = 8192
    assert trial() == 5 and "served_context 4096 -> 8192" in lines[-1]
    endpoint.pages["/version"]["version"] = "0.33.0"
    assert trial() == 6 and "server_version 0.32.0 -> 0.33.0" in lines[-1]
    assert trial("baseline.engine.model=served") == 7
    card["id"] = "another"
    assert trial("baseline.engine.model=served") == 8 and "does not list the model" in lines[-1]


def held(*trials: Any) -> list[tuple[int, ...]]:
    return [one.trials for one in mixtures(trials) if "an earlier run had asked" in one.what]


def test_a_warm_server_that_was_declared_cold_is_flagged_and_not_compared(
    tracking: Tracking, endpoint: Endpoint
) -> None:
    first = run(tracking, endpoint)
    assert "contaminated" not in first.flags
    assert held(first) == []
    turns = tracking.store.turns_of(first.id)
    assert sum(turn.gpu_hit_tokens for turn in turns) > 0, "second turns found their own first ones"

    again = run(tracking, endpoint)
    said = again.flags["contaminated"]
    assert "declared cold, but 6 of 6 turns found" in said
    unseen = [turn for turn in tracking.store.turns_of(again.id) if turn.turn == 1]
    assert all(turn.shared_hit_tokens == 39 for turn in unseen), "all but the last token of what it was asked before"
    assert held(first, again) == [(again.id,)]
    assert "held_whole" not in first.flags
    assert again.flags["held_whole"].startswith("4 measured prompts were cached but for their last token")


def test_salted_conversations_are_new_to_a_warm_server_until_they_are_asked_again(
    tracking: Tracking, endpoint: Endpoint
) -> None:
    run(tracking, endpoint)
    assert "contaminated" not in run(tracking, endpoint, "cache_state=salted").flags
    assert "declared salted" in run(tracking, endpoint, "cache_state=salted").flags["contaminated"]
    assert "contaminated" not in run(tracking, endpoint, "cache_state=salted", "seed=1").flags
    assert "contaminated" not in run(tracking, endpoint, "cache_state=warm").flags, "what warmed it was asked before"


def test_a_server_that_reports_nothing_cannot_be_held_to_it(tracking: Tracking, endpoint: Endpoint) -> None:
    endpoint.reports = False
    trial = run(tracking, endpoint)
    assert "nobody can tell" in trial.flags["cache_state_unverified"]
    assert "contaminated" not in trial.flags
