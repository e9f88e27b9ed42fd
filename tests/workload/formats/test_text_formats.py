"""ShareGPT, UltraChat, MT-Bench-101 and agents' sessions, from a few entries each."""

import json

import pytest

from pensieve.errors import ConfigError, MalformedInput
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.recording import Begun, Text
from pensieve.lab.workload.trace import trace_workload
from tests.scripted import context
from tests.workload.dry import drive


def said(recording):
    return {one.id: [(call.content.text, call.reply.text) for call in one.calls] for one in recording.conversations}


def sharegpt(*messages, name="c"):
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in messages]}


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def test_sharegpt_pairs_up_messages(tmp_path):
    entries = [
        sharegpt(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), name="whole"),
        sharegpt(("gpt", "left over"), ("human", "a"), ("gpt", "b"), ("human", "unanswered"), name="from the middle"),
        sharegpt(("system", "be nice"), ("user", "a"), ("chatgpt", "b"), name="other names"),
        sharegpt(("human", "a"), ("gpt", "b"), ("gpt", "b2"), ("human", "c"), ("gpt", "d"), name="breaks"),
        sharegpt(("human", "a"), name="no answer"),
        sharegpt(name="empty"),
    ]
    recording = load(write(tmp_path / "s.json", entries), "sharegpt")
    assert said(recording) == {
        "whole": [("a", "b"), ("c", "d")],
        "from the middle": [("a", "b")],
        "other names": [("a", "b")],
        "breaks": [("a", "b")],
    }
    assert recording.facts["conversations_without_a_pair"] == 2
    assert not recording.timed
    assert recording.conversations[0].calls[1].continues


def test_openai_messages_keep_what_is_not_said_by_the_assistant(tmp_path):
    call = [{"type": "function", "function": {"name": "look"}}]
    rows = [
        [("system", "be kind"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d"), ("assistant", "e")],
        [("user", "a"), ("assistant", None, call), ("tool", "found"), ("assistant", "b"), ("user", "unanswered")],
        [("user", [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}]), ("assistant", "b")],
        [("user", "unanswered")],
    ]
    path = tmp_path / "mine.jsonl"
    names = ("role", "content", "tool_calls")
    lines = [{"messages": [dict(zip(names, message, strict=False)) for message in row]} for row in rows]
    path.write_text("\n".join(map(json.dumps, lines)))
    recording = load(path)
    assert recording.format == "openai_jsonl"
    assert said(recording) == {
        "conversation.0": [("be kind\na", "b"), ("c\nd", "e")],
        "conversation.1": [("a", json.dumps(call)), ("found", "b")],
        "conversation.2": [("see", "b")],
    }
    assert recording.facts["conversations_without_a_reply"] == 1


@pytest.mark.parametrize(
    ("message", "reason"), [({"content": "a"}, "no role"), ({"role": "user", "content": None}, "no content")]
)
def test_an_openai_message_that_says_nothing_is_malformed(tmp_path, message, reason):
    with pytest.raises(MalformedInput, match=rf"mine\.jsonl: entry 1: a message has {reason}"):
        load(write(tmp_path / "mine.jsonl", [{"messages": [message]}]))


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("sharegpt", '[\n {"id": "c",\n "conversations": [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}]}]'),
        ("lmbenchmark", '{"input": "a", "output_length": 3}'),
        ("agent_jsonl", '\n{"session_id": "s", "input": "a", "output": "b"}'),
        ("mooncake", '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [1]}'),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"),
        ("mt_bench_101", '{"task": "GR", "id": 1, "history": [{"user": "a", "bot": "b"}]}'),
    ],
)  # fmt: skip
def test_a_format_is_told_from_its_first_entry(tmp_path, format, text):
    (tmp_path / "file").write_text(text)
    assert load(tmp_path / "file").format == format


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "a,b\n1,2\n"])
def test_what_no_format_has_is_asked_for(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be told from its first entry; say .* workload\.format=openai_jsonl"):
        load(tmp_path / "file")


def test_conversations_of_one_name_stay_apart(tmp_path):
    pair = (("human", "a"), ("gpt", "b"))
    recording = load(
        write(tmp_path / "s.json", [sharegpt(*pair), sharegpt(*pair), {**sharegpt(*pair), "id": ""}]), "sharegpt"
    )
    assert [one.id for one in recording.conversations] == ["c", "c.1", "conversation.2"]


def test_both_shapes_of_ultrachat_and_lines_instead_of_a_list(tmp_path):
    path = tmp_path / "u.jsonl"
    rows = [
        {"id": "0", "data": ["a", "b", "c", "d"]},
        {"prompt_id": "1", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert said(load(path, "sharegpt")) == {"0": [("a", "b"), ("c", "d")], "1": [("a", "b")]}


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"id": 1}, "none of conversations, messages and data"),
        ({"conversations": "a"}, "is not a list"),
        ({"conversations": [{"from": "human"}]}, "a message has no value"),
        ({"conversations": ["a"]}, "a message has no from"),
        ({"data": ["a", 2]}, "not a list of texts"),
        ("text", "no JSON object"),
    ],
)
def test_a_malformed_entry_is_named_by_its_number(tmp_path, entry, reason):
    good = sharegpt(("human", "a"), ("gpt", "b"))
    path = write(tmp_path / "s.json", [good, entry])
    with pytest.raises(MalformedInput, match=rf"s\.json: entry 2: .*{reason}"):
        load(path, "sharegpt")
    recording = load(path, "sharegpt", "skip")
    assert (recording.malformed, len(recording.conversations)) == (1, 1)


def test_a_broken_list_cannot_be_skipped(tmp_path):
    path = tmp_path / "s.json"
    path.write_text("[{]")
    with pytest.raises(MalformedInput, match="cannot be read as JSON"):
        load(path, "sharegpt", "skip")


def test_mt_bench_101(tmp_path):
    row = {"task": "GR", "id": 1, "history": [{"user": "a", "bot": "b"}, {"user": "c", "bot": "d"}]}
    assert list(said(load(write(tmp_path / "m.jsonl", row), "mt_bench_101")).values()) == [[("a", "b"), ("c", "d")]]
    for bad in ({"history": []}, {"history": [{"user": "a"}]}):
        with pytest.raises(MalformedInput, match=r"m\.jsonl:1: "):
            load(write(tmp_path / "m.jsonl", bad), "mt_bench_101")


def test_agents_calls_are_ordered_by_the_length_of_their_input(tmp_path):
    rows = [
        {"timestamp": 3, "input": "abc", "output": "x", "session_id": "s"},
        {"timestamp": 1, "input": "abcdefgh", "output": "y", "session_id": "s"},
        {"timestamp": 2, "input": "abcde", "output": "z", "session_id": "s"},
    ]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "two.jsonl").write_text(json.dumps({**rows[0], "session_id": "t"}))
    recording = load(tmp_path, "agent_jsonl")
    assert said(recording) == {"agent-s": [("abc", "x"), ("abcde", "z"), ("abcdefgh", "y")], "agent-t": [("abc", "x")]}
    assert not any(call.continues for one in recording.conversations for call in one.calls)
    assert not recording.timed
    assert len(load(tmp_path / "two.jsonl", "agent_jsonl").conversations) == 1


def role_play(folder, turns=6):
    """A session in which an agent and the model that plays its user take turns, each with a prompt of its own that grows."""
    agent, user, rows = "You book flights. " * 5, "You want to fly to Oslo. " * 4, []
    for turn in range(turns):
        agent += f"<user> question {turn} " * 3
        rows.append({"input": agent, "output": "a", "session_id": "s"})
        user += f"<agent> answer {turn} " * 3
        rows.append({"input": user, "output": "u", "session_id": "s"})
    (folder / "roles.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [row["input"] for row in rows]


def alike(one, other):
    """Characters until they differ."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def found_again(conversations):
    """Of all characters of prompts, those that the prompt before in the same conversation begins with."""
    pairs = [(one[at - 1] if at else "", one[at]) for one in conversations for at in range(len(one))]
    return sum(alike(*pair) for pair in pairs) / sum(len(prompt) for _, prompt in pairs)


def test_roles_that_take_turns_in_a_session_find_the_best_earlier_prompt(tmp_path):
    prompts = sorted(role_play(tmp_path), key=len)
    recording = load(tmp_path, "agent_jsonl")
    roles = [[call.content.text for call in one.calls] for one in recording.conversations]
    assert [len(role) for role in roles] == [6, 6] and all(len({prompt[:9] for prompt in role}) == 1 for role in roles)
    best = [max(alike(earlier, prompt) for earlier in prompts[:at]) for at, prompt in enumerate(prompts) if at]
    best = sum(best) / sum(map(len, prompts))
    assert found_again(roles) == pytest.approx(best, abs=0.01), "the roles share no more than how a sentence begins"
    assert found_again([prompts]) < 0.2 < 0.7 < best, "one after another by their lengths, each is the other's end"


def test_the_second_role_begins_after_a_reply_to_the_first_and_is_not_left_behind(tmp_path):
    role_play(tmp_path)
    first, second = load(tmp_path, "agent_jsonl").conversations
    assert (first.id, second.id, first.begun, second.begun) == ("agent-s", "agent-s/1", None, Begun("agent-s", 1))
    for part, sessions in (("1/2", {"agent-s", "agent-s/1"}), ("2/2", {"agent-s", "agent-s/1"})):
        try:
            workload = trace_workload(
                context(max_context=4096), path=str(tmp_path), format="agent_jsonl", part=part, warmup_turns=1
            )
        except ConfigError:  # the session is in the other half
            continue
        arrivals = [arrival for arrival in drive(workload) if arrival.request.phase != "warmup"]
        assert {arrival.request.session for arrival in arrivals} == sessions, "both roles are in one half"
        assert [arrival.request.session for arrival in arrivals].count("agent-s/1") == 6
        at = {(one.request.session, one.request.turn): one.at_s for one in arrivals}
        assert at["agent-s/1", 1] >= at["agent-s", 1] + 1.0, "a second is what a reply takes"
        return
    pytest.fail("the session is in no half")


def test_an_input_that_was_cut_in_the_middle_is_still_of_its_conversation(tmp_path):
    whole = "abcdefghij" * 6
    said = (whole[:30], whole[:18] + "." * 20, whole, whole[:14] + "-" * 60)
    rows = [{"input": one, "output": "x", "session_id": "s"} for one in said]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    roles = load(tmp_path, "agent_jsonl").conversations
    # 18 of 30 characters are more than half; the third begins with all of the first; 14 of 30 are less than half.
    assert [[call.content.text for call in one.calls] for one in roles] == [[said[0], said[1], said[2]], [said[3]]]


def test_a_folder_without_sessions(tmp_path):
    with pytest.raises(MalformedInput, match=r"holds no \*\.jsonl"):
        load(tmp_path, "agent_jsonl")


def test_lmbenchmark_counts_the_tokens_of_an_answer_itself(tmp_path):
    entry = sharegpt(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))
    entry["conversations"][1]["num_tokens"] = 40
    path = write(tmp_path / "ShareGPT.json", [entry])
    assert [call.reply for call in load(path, "lmbenchmark").conversations[0].calls] == [40, Text("d")]
    assert [call.reply for call in load(path, "sharegpt").conversations[0].calls] == [Text("b"), Text("d")]
    entry["conversations"][1]["num_tokens"] = 0
    with pytest.raises(MalformedInput, match="num_tokens=0"):
        load(write(path, [entry]), "lmbenchmark")


def test_lmbenchmark_prompts_continue_the_longest_one_that_they_begin_with(tmp_path):
    prompts = [("Hello there, who are you?", 5), ("Something else altogether", 6),
               ("Hello there, who are you?\nI am.\nAnd I?", 7), ("Hello there, who are you?\nI am.\nAnd I?\nYou.\nOh", 8),
               ("Hello there, who are you?", 9)]  # fmt: skip
    path = write(tmp_path / "run.json", [{"input": text, "output_length": length} for text, length in prompts])
    recording = load(path, "lmbenchmark")
    assert [[call.reply for call in one.calls] for one in recording.conversations] == [[5, 7, 8], [6], [9]]
    assert not any(call.continues for one in recording.conversations for call in one.calls)
    with pytest.raises(MalformedInput, match="entry 1: input is empty"):
        load(write(path, [{"input": "", "output_length": 1}]), "lmbenchmark")


def test_mt_bench_has_questions_only_and_needs_to_be_told_how_long_replies_are(tmp_path):
    path = tmp_path / "question.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
        {"question_id": 81, "category": "math", "turns": ["One and one?"], "reference": ["2"]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    recording = load(path, "mt_bench")
    assert [(one.id, len(one.calls)) for one in recording.conversations] == [("mt_bench-81", 2), ("mt_bench-81.1", 1)]
    with pytest.raises(ConfigError, match=r"workload\.max_new_tokens"):
        trace_workload(context(), path=str(path), format="mt_bench")
    sent = drive(trace_workload(context(), path=str(path), format="mt_bench", max_new_tokens=30))
    assert {one.request.output.max_new_tokens for one in sent} == {30}
    path.write_text('{"question_id": 1, "turns": []}')
    with pytest.raises(MalformedInput, match="turns is not a list of texts"):
        load(path, "mt_bench")
