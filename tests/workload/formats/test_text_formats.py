"""ShareGPT, UltraChat, OpenAI's messages, MT-Bench-101 and agents' sessions, from a few entries each."""

import json

import pytest

from pensieve.errors import ConfigError, MalformedInput
from pensieve.lab.workload.base import part_of
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.playback import Begun
from pensieve.lab.workload.trace import trace_workload
from tests.scripted import context
from tests.workload.dry import drive, lines


def said(recording):
    return {one.id: [(call.content.text, call.reply.text) for call in one.calls] for one in recording.conversations}


def shared(*texts, name="c"):
    """ShareGPT's form: a text alone is a person's, one behind "gpt: " the model's."""
    messages = [text.split(": ", 1) if ": " in text else ("human", text) for text in texts]
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in messages]}


def messages(*each):
    return {"messages": [dict(zip(("role", "content", "tool_calls"), one, strict=False)) for one in each]}


CALLS = [{"type": "function", "function": {"name": "look"}}]
READ = {
    "sharegpt, a list": ("sharegpt", [[
        shared("a", "gpt: b", "c", "gpt: d", name="whole"),
        shared("gpt: left over", "a", "gpt: b", "unanswered", name="from the middle"),
        shared("system: be nice", "user: a", "chatgpt: b", name="other names"),
        shared("a", "gpt: b", "gpt: b2", "c", "gpt: d", name="breaks"),
        shared("a", name="no answer"),
        shared(name="empty"),
    ]], {"whole": [("a", "b"), ("c", "d")], "from the middle": [("a", "b")], "other names": [("be nice\na", "b")],
         "breaks": [("a", "b"), ("c", "d")]}, {"conversations_without_a_reply": 2}),
    "names stay apart": ("sharegpt", [[shared("a", "gpt: b"), shared("a", "gpt: b"), shared("a", "gpt: b", name="")]],
                         {name: [("a", "b")] for name in ("c", "c.1", "conversation.2")},
                         {"conversations_without_a_reply": 0}),
    "ultrachat, lines": ("sharegpt", [
        {"id": "0", "data": ["a", "b", "c", "d"]},
        {"prompt_id": "1", **messages(("user", "a"), ("assistant", "b"))},
    ], {"0": [("a", "b"), ("c", "d")], "1": [("a", "b")]}, {"conversations_without_a_reply": 0}),
    "openai": ("openai_jsonl", [
        messages(("system", "be kind"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("user", "d"), ("assistant", "e")),
        messages(("user", "a"), ("assistant", None, CALLS), ("tool", "found"), ("assistant", "b"), ("user", "unanswered")),
        messages(("user", [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {}}]), ("assistant", "b")),
        messages(("user", "unanswered")),
    ], {"conversation.0": [("be kind\na", "b"), ("c\nd", "e")],
        "conversation.1": [("a", json.dumps(CALLS)), ("found", "b")],
        "conversation.2": [("see", "b")]}, {"conversations_without_a_reply": 1}),
    "mt_bench_101": ("mt_bench_101", [
        {"task": "GR", "id": 1, "history": [{"user": "a", "bot": "b"}, {"user": "c", "bot": ""}]}
    ],
                     {"mt_bench_101-0": [("a", "b"), ("c", "")]}, {}),
    "agents, the shortest first": ("agent_jsonl", [
        {"timestamp": at, "input": prompt, "output": reply, "session_id": who}
        for at, prompt, reply, who in (
            (3, "abc", "x", "s"), (1, "abcdefgh", "y", "s"), (2, "abcde", "z", "s"), (3, "abc", "x", "t")
        )
    ], {"agent-s": [("abc", "x"), ("abcde", "z"), ("abcdefgh", "y")], "agent-t": [("abc", "x")]}, {"sessions_in_file": 2}),
    # 18 of 30 characters are more than half; the third begins with all of the first; 14 of 30 are less than half.
    "agents, cut in the middle": ("agent_jsonl", [
        {"input": prompt, "output": "x", "session_id": "s"}
        for prompt in ("a" * 30, "a" * 18 + "." * 20, "a" * 60, "a" * 14 + "-" * 60)
    ], {"agent-s": [("a" * 30, "x"), ("a" * 18 + "." * 20, "x"), ("a" * 60, "x")], "agent-s/1": [("a" * 14 + "-" * 60, "x")]},
        {"sessions_in_file": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("format", "entries", "found", "facts"), READ.values(), ids=READ)
def test_what_is_read(tmp_path, format, entries, found, facts):
    recording = load(lines(tmp_path / "file", *entries), format)
    assert (recording.format, said(recording), recording.facts, recording.timed) == (format, found, facts, False)
    assert {call.continues for one in recording.conversations for call in one.calls} == {format != "agent_jsonl"}


@pytest.mark.parametrize(
    ("format", "entry", "reason"),
    [
        ("sharegpt", {"id": 1}, "none of conversations, messages and data"),
        ("sharegpt", {"conversations": [{"value": "a"}]}, "conversations.0.from: Field required"),
        ("openai_jsonl", {"messages": 1}, "messages: "),
        ("openai_jsonl", {"messages": [{"role": "user", "content": None}]}, "a message has no content"),
        ("mt_bench_101", {"history": [{"user": "a"}]}, "history.0.bot: Field required"),
        ("agent_jsonl", {"session_id": "s", "input": "", "output": ""}, "input: "),
    ],
)
def test_what_is_malformed(tmp_path, format, entry, reason):
    path = lines(tmp_path / "file", entry)
    with pytest.raises(MalformedInput, match=rf"file:1: .*{reason}"):
        load(path, format)
    with pytest.raises(ConfigError, match="holds no request"):
        load(path, format, "skip")


def test_entries_of_a_list_have_numbers_and_a_broken_list_cannot_be_skipped(tmp_path):
    path = lines(tmp_path / "s.json", [shared("a", "gpt: b"), {"id": 1}])
    with pytest.raises(MalformedInput, match=r"s\.json: entry 2: "):
        load(path, "sharegpt")
    recording = load(path, "sharegpt", "skip")
    assert (recording.malformed, len(recording.conversations)) == (1, 1)
    path.write_text("[{]")
    with pytest.raises(MalformedInput, match="cannot be read as JSON"):
        load(path, "sharegpt", "skip")


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("sharegpt", '[\n {"id": "c",\n "conversations": [{"from": "user", "value": "a"}, {"from": "gpt", "value": "b"}]}]'),
        ("openai_jsonl", json.dumps(messages(("user", "a"), ("assistant", "b")))),
        ("agent_jsonl", '\n{"session_id": "s", "input": "a", "output": "b"}'),
        ("mooncake", '{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [1]}'),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"),
        ("mt_bench_101", '{"task": "GR", "id": 1, "history": [{"user": "a", "bot": "b"}]}'),
        *((None, text) for text in ("", "[]", "{", '{"a": 1}', "a,b\n1,2\n")),
    ],
)  # fmt: skip
def test_a_format_is_told_from_its_first_entry_or_asked_for(tmp_path, format, text):
    (tmp_path / "file").write_text(text)
    if format:
        assert load(tmp_path / "file").format == format
        return
    with pytest.raises(ConfigError, match=r"cannot be told from its first entry; say .* workload\.format=openai_jsonl"):
        load(tmp_path / "file")


def test_roles_that_take_turns_in_a_session_are_conversations_in_one_half(tmp_path):
    """An agent and the model that plays its user, each with a prompt of its own that grows."""
    agent, user, rows = "You book flights. " * 5, "You want to fly to Oslo. " * 4, []
    for turn in range(6):
        agent += f"<user> question {turn} " * 3
        user += f"<agent> answer {turn} " * 3
        rows += [{"input": one, "output": "r", "session_id": "s"} for one in (agent, user)]
    lines(tmp_path / "roles.jsonl", *rows)
    first, second = load(tmp_path, "agent_jsonl").conversations
    assert (first.id, second.id, first.begun, second.begun) == ("agent-s", "agent-s/1", None, Begun("agent-s", 1))
    roles = [[call.content.text for call in one.calls] for one in (first, second)]
    assert sorted(roles) == [[row["input"] for row in rows[start::2]] for start in (0, 1)]
    half = f"{part_of('agent-s', 2)}/2"
    workload = trace_workload(
        context(max_context=4096), path=str(tmp_path), format="agent_jsonl", part=half, warmup_turns=1
    )
    arrivals = [arrival for arrival in drive(workload) if arrival.request.phase != "warmup"]
    at = {(one.request.session, one.request.turn): one.at_s for one in arrivals}
    assert sorted(at) == sorted((name, turn) for name in ("agent-s", "agent-s/1") for turn in range(1, 7))
    assert at["agent-s/1", 1] >= at["agent-s", 1] + 1.0, "a second is what a reply takes"
