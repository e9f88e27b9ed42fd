"""Conversations of a file, at their times or in turn, and of published lengths."""

from dataclasses import replace
from statistics import mean, median

import pytest

from pensieve.errors import ConfigError
from pensieve.lab.compose.build import make_workload
from pensieve.lab.compose.model_files import build_tokenizer
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.statistics import nearest_rank
from pensieve.lab.workload.trace import PUBLISHED, draw, trace_workload
from tests.composed import checked, replayed
from tests.scripted import context
from tests.workload.dry import drive, lines, measured, sharegpt_workload


def mooncake(path, *rows):
    """rows: (ms, input_length, output_length, hash_ids)."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return lines(path, *(dict(zip(names, row, strict=True)) for row in rows))


@pytest.fixture
def trace(tmp_path):
    """Five conversations, the first of three requests; block 0 is everybody's."""
    return mooncake(
        tmp_path / "trace.jsonl",
        (0, 600, 5, [0, 1]),
        (10_000, 1_100, 6, [0, 1, 2]),
        (12_000, 700, 7, [0, 10]),
        (20_000, 900, 8, [0, 20]),
        (30_000, 1_500, 9, [0, 1, 3]),
        (40_000, 513, 0, [0, 30]),
        (50_000, 520, 3, [0, 40]),
    )


def build(path, format="mooncake", seed=0, model_context=8192, **fields):
    return trace_workload(context(seed, max_context=model_context), path=str(path), format=format, **fields)


def sent(workload):
    arrivals = measured(drive(workload))
    return [(a.request.session, a.request.turn, round(a.at_s - arrivals[0].at_s, 6)) for a in arrivals]


def test_requests_come_at_their_times_with_their_whole_prompts(trace):
    workload = build(trace)
    assert workload.describe().load == "open"
    assert sent(workload) == [
        ("mooncake-0", 1, 0.0), ("mooncake-0", 2, 10.0), ("mooncake-2", 1, 12.0), ("mooncake-3", 1, 20.0),
        ("mooncake-0", 3, 30.0), ("mooncake-5", 1, 40.0), ("mooncake-6", 1, 50.0),
    ]  # fmt: skip
    assert [at for _, _, at in sent(build(trace, time_scale=0.1))] == [0, 1, 1.2, 2, 3, 4, 5]
    assert [at for _, _, at in sent(build(trace, window_s=20.0))] == [0, 10, 12], "the window's end is not in it"
    for field in ({"users": 2}, {"relative_rate": 2.0}, {"arrivals_s": 9.0}):
        with pytest.raises(ConfigError, match="has a time for each request"):
            build(trace, **field)
    arrivals = measured(drive(build(trace)))
    requests = [one.due() for one in arrivals]
    assert [len(one.prompt) for one in requests] == [600, 1100, 700, 900, 1500, 513, 520]
    assert [one.output.max_new_tokens for one in requests] == [5, 6, 7, 8, 9, 1, 3]
    assert not any(one.continues for one in arrivals)
    assert requests[0].prompt[:512] == requests[2].prompt[:512]
    assert requests[0].prompt == requests[1].prompt[:600]
    assert requests[4].prompt[:1024] == requests[1].prompt[:1024]
    assert requests[4].prompt[1024:1100] != requests[1].prompt[1024:1100]


def test_parts_are_disjoint_make_the_whole_and_depend_on_no_seed(trace):
    whole = {session for session, _, _ in sent(build(trace))}
    parts = [{session for session, _, _ in sent(build(trace, part=part))} for part in ("1/2", "2/2")]
    assert parts[0] | parts[1] == whole and not parts[0] & parts[1] and all(parts)
    assert parts[1] == {session for session, _, _ in sent(build(trace, part="2/2", seed=5))}
    for wrong in ("3/2", "0/2", "half", "1/1000"):
        with pytest.raises(ConfigError, match=r"workload\.part='.*' is none; 1/2 is the first"):
            build(trace, part=wrong)
    with pytest.raises(ConfigError, match="has no conversation"):
        build(trace, part="77/99")


def test_a_sample_is_drawn_by_the_seed_and_holds_one_for_each_user(trace):
    drawn = [{session for session, _, _ in sent(build(trace, seed=seed, conversations=2))} for seed in range(4)]
    assert {len(one) for one in drawn} == {2} and len(set(map(frozenset, drawn))) > 1
    assert sharegpt_workload(context(), users=9, conversations=4).describe().sessions == 9


def test_the_record_states_the_rule_and_the_counts(trace):
    with trace.open("a") as file:
        file.write("{}\n")
    facts = build(trace, min_turns=2, max_turns=2, on_malformed="skip").describe().facts
    assert "continues the earlier one that it shares most leading blocks with" in facts["rule"]
    assert {
        "requests_in_file": 7, "conversations_in_file": 5, "conversations_with_too_few_turns": 4, "mean_turns": 2.0,
        "file_blocks": 16, "file_unique_blocks": 8, "file_repeated_blocks_share": 0.5, "malformed_lines": 1,
        "source": "trace.jsonl", "format": "mooncake",
    }.items() <= facts.items()  # fmt: skip
    assert facts["malformed_examples"] == [f"{trace}:8: timestamp: Field required"]


def test_requests_that_the_context_cannot_hold_are_cut_and_counted(trace):
    for workload in (build(trace, model_context=1_000), build(trace, max_context=1_000)):
        facts = workload.describe().facts
        assert facts["conversations_cut_by_context"] == 1 and facts["turns_cut_by_context"] == 2
        assert facts["longest_conversation_tokens"] <= 1_000
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        build(trace, model_context=100)
    with pytest.raises(ConfigError, match=r"needs workload\.path=FILE"):
        trace_workload(context(), format="mooncake")


def lengths(workload):
    return [len(one.due().prompt) for one in measured(drive(workload))]


def ten(tmp_path, *times):
    return mooncake(tmp_path / "trace.jsonl", *((ms, 500 + n, 1, [n]) for n, ms in enumerate(times)))


EVEN = [1000 * n for n in range(10)]


@pytest.mark.parametrize(
    ("times", "left"),
    [
        ([*EVEN, 10**12], range(500, 510)),  # a time in another unit
        ([-(10**9), *EVEN, 10**12], range(501, 511)),
        ([*EVEN, 9_000 + 3_600_000], None),  # an hour's pause
        ([*EVEN, 10**8, 10**8 + 1000, 10**8 + 2000], None),  # three of 13 at another time: a part of the recording
        ([0, 10**9], None),
    ],
)
def test_a_time_far_from_all_others_is_left_out_and_counted_and_pauses_stay(tmp_path, times, left):
    path = ten(tmp_path, *times)
    if left is None:
        assert len(lengths(build(path))) == len(times)
        return
    workload = build(path)
    assert workload.describe().facts["requests_far_from_all_others"] == len(times) - 10
    sends = measured(drive(workload))
    assert max(one.at_s for one in sends) - min(one.at_s for one in sends) == 9.0
    assert lengths(build(path)) == list(left)


def test_formats_without_times_are_conversations_that_wait_for_replies(tmp_path):
    history = [{"user": "a", "bot": "bb"}, {"user": "c", "bot": "dd"}]
    path = lines(tmp_path / "m.jsonl", *({"task": "x", "id": n, "history": history} for n in range(6)))
    workload = build(path, "mt_bench_101", request_rate=4.0)
    plan = workload.describe()
    assert (plan.load, plan.facts["conversation_rate_per_s"], len(sent(workload))) == ("partly open", 2.0, 12)
    with pytest.raises(ConfigError, match="has no times"):
        build(path, "mt_bench_101", window_s=10)


def test_a_continued_prompt_is_found_up_to_its_last_common_block(trace):
    record, _ = replayed(
        "workload=trace", "workload.format=mooncake", f"workload.path={trace}",
        "model.architecture.max_position_embeddings=8192",
        "cache.gpu=16384 tokens",
    )  # fmt: skip
    turns = [turn for turn in record.turns if turn.phase != "warmup"]
    assert {turn.status for turn in turns} == {"completed"}
    history = {(turn.session, turn.turn): turn.history_tokens for turn in turns}
    assert history["mooncake-0", 2] == 600  # the first prompt was a prefix, partly filled block included
    assert history["mooncake-0", 3] == 1024
    assert {count for (_, turn), count in history.items() if turn == 1} == {0}
    assert sum(turn.gpu_hit_tokens for turn in turns) == 600 + 1024


# -- conversations of a ShareGPT file, and drawn from published means --------------------------------------------------------


def test_a_real_file_is_what_is_said(tmp_path):
    def said(name, turns):
        return [{"from": ("human", "gpt")[place % 2], "value": f"{name} says {place}"} for place in range(2 * turns)]

    entries = ({"id": f"c{n}", "conversations": said(f"c{n}", 1 + n % 4)} for n in range(12))
    path = lines(tmp_path / "sharegpt.jsonl", *entries)
    workload = sharegpt_workload(context(), path=str(path), min_turns=2, max_turns=3)
    facts = workload.describe().facts
    assert (facts["conversations"], facts["conversations_with_too_few_turns"], facts["mean_turns"]) == (9, 3, 2.667)
    assert facts["source"] == "sharegpt.jsonl" and not facts["synthetic"]
    [second] = [one for one in drive(workload) if (one.request.session, one.request.turn) == ("c1", 2)]
    assert bytes(list(second.due().prompt)).decode() == "\nUser: c1 says 2\nAssistant:"
    assert second.continues and second.due().output.max_new_tokens == len("c1 says 3")


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
        assert plan.sessions / plan.facts["conversation_rate_per_s"] == pytest.approx(500.0, rel=0.1)
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


@pytest.mark.parametrize("dataset", PUBLISHED)
def test_the_means_are_the_published_ones_and_the_tails_are_long(dataset):
    _, *published = PUBLISHED[dataset]
    conversations = draw(dataset, 2_500, seed=0).conversations
    calls = [call for one in conversations for call in one.calls]
    turns = [len(one.calls) for one in conversations]
    messages, replies = [call.content.tokens for call in calls], [call.reply for call in calls]
    assert [mean(turns), mean(messages), mean(replies)] == pytest.approx(published, rel=0.04)
    assert min(turns) == 1 and min(messages) >= 1 and min(replies) >= 1
    for values in (turns, messages, replies):
        assert nearest_rank(values, 0.99) > 3.5 * mean(values) > 4 * median(values)
