"""Conversations of a file, of the hub, and drawn from published means."""

import json
from dataclasses import replace
from statistics import mean, median

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose.build import make_workload
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.statistics import nearest_rank
from pensieve.lab.workload.trace import PUBLISHED, draw
from tests.composed import checked
from tests.scripted import context
from tests.workload.dry import drive, measured, sharegpt_workload


def entry(name, turns):
    said = [{"from": ("human", "gpt")[place % 2], "value": f"{name} says {place}"} for place in range(2 * turns)]
    return {"id": name, "conversations": said}


@pytest.fixture
def real(tmp_path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([entry(f"c{n}", 1 + n % 4) for n in range(12)]))
    return path


def test_a_real_file_is_what_is_said(real):
    workload = sharegpt_workload(context(), path=str(real), min_turns=2, max_turns=3)
    plan, seen = workload.describe(), measured(drive(workload))
    assert plan.sessions == 9
    assert plan.facts["conversations_with_too_few_turns"] == 3
    assert plan.facts["source"] == "sharegpt.json" and not plan.facts["synthetic"]
    assert plan.facts["mean_turns"] == round((2 + 3 + 3) / 3, 3)
    second = next(one for one in seen if one.request.session == "c1" and one.request.turn == 2)
    request = second.due()
    assert bytes(list(request.prompt)).decode() == "\nUser: c1 says 2\nAssistant:"
    assert request.output.max_new_tokens == len("c1 says 3")
    assert second.continues


@pytest.fixture
def few_means(monkeypatch):
    monkeypatch.setattr("pensieve.lab.workload.trace.MEANS_OF", 100)


def capacity(lengths):
    """A capacity that depends on the lengths alone: one over the mean prompt."""
    return len(lengths) / sum(prompt for prompt, _ in lengths)


def test_a_relative_rate_is_a_multiple_of_what_stateless_serving_could_finish(few_means):
    known = replace(context(), stateless_capacity=capacity)
    half, double = (sharegpt_workload(known, relative_rate=rate).describe().facts for rate in (0.5, 2.0))
    assert half["stateless_capacity_req_s"] == double["stateless_capacity_req_s"]
    assert double["request_rate_per_s"] == pytest.approx(4 * half["request_rate_per_s"])
    steps = [step for each in sharegpt_workload(known, conversations=100)._measured for step in each.steps]
    prompts = sum(step.prompt for step in steps) / len(steps)
    assert 2 * half["request_rate_per_s"] == pytest.approx(1 / prompts)
    with pytest.raises(ConfigError, match=r"set workload\.request_rate"):
        sharegpt_workload(context(), relative_rate=1.0)
    with pytest.raises(ConfigError, match=r"workload\.users sets the load"):
        sharegpt_workload(context(), users=3, arrivals_s=10.0)


def test_conversations_arrive_for_as_long_as_is_asked(few_means):
    plans = [sharegpt_workload(context(), arrivals_s=500.0, request_rate=rate).describe() for rate in (1.0, 4.0)]
    for plan, rate in zip(plans, (1.0, 4.0), strict=True):
        assert plan.sessions * plan.facts["arrival_s_mean"] == pytest.approx(500.0, rel=0.1)
        assert plan.facts["request_rate_per_s"] == rate
    assert plans[1].sessions == pytest.approx(4 * plans[0].sessions, abs=4)


def test_every_baseline_of_a_simulated_machine_is_offered_the_same(few_means):
    def rate(*overrides):
        config = ["hardware=sim_a100_80g", "model=llama3_8b", "workload=sharegpt", "workload.relative_rate=1.5"]
        plan = plan_trial(checked(*config, *overrides))
        tokenizer = build_tokenizer(plan.config.model, plan.model.vocab, simulated=True)
        return make_workload(plan, tokenizer).describe().facts["request_rate_per_s"]

    stateless = rate("baseline=stateless")
    assert rate("baseline=pensieve") == rate("baseline=prefix_cache") == stateless
    assert rate("hardware=sim_h100") > stateless
    assert rate("cache.gpu=8192 tokens") > stateless


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_the_means_are_the_published_ones_and_the_tails_are_long(published):
    conversations = draw(published, 2_500, seed=0).conversations
    calls = [call for one in conversations for call in one.calls]
    turns = [len(one.calls) for one in conversations]
    messages, replies = [call.content.tokens for call in calls], [call.reply for call in calls]
    assert mean(turns) == pytest.approx(published.turns, rel=0.06)
    assert mean(messages) == pytest.approx(published.message_tokens, rel=0.06)
    assert mean(replies) == pytest.approx(published.reply_tokens, rel=0.04)
    assert min(turns) == 1 and min(messages) >= 1 and min(replies) >= 1
    for values in (turns, messages, replies):
        assert nearest_rank(values, 0.99) > 3.5 * mean(values) > 4 * median(values)
