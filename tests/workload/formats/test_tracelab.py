"""TraceLab's rounds: which tokens prompts share, and when they are sent."""

import pytest

from pensieve.core.session import common_prefix as alike
from pensieve.errors import MalformedInput
from pensieve.lab.workload.fit import synthesised
from pensieve.lab.workload.formats import load
from tests.workload.dry import lines


def row(session, index, total, cached, *, asked=0, ended=5, output=7, tool=None, **more):
    def at(second):
        return f"2026-06-01T05:{second // 60:02}:{second % 60:02}.500Z"

    events = [{"event_type": "user_message", "timestamp": at(asked)}, {"event_type": "text", "timestamp": at(ended)}]
    return {
        "provider": "claude", "model": "m", "project": "p", "session_file": f"{session}.jsonl", "session_id": "s",
        "round_index": index, "round_id": f"{session}{index}", "input_tokens_total": total, "prefix_tokens": cached,
        "newly_append_tokens": total - cached, "output_tokens": output, "timing_events": events,
        "tools": [{"tool_name": tool}] if tool else [], **more,
    }  # fmt: skip


@pytest.fixture
def read(tmp_path):
    return lambda *rows, **options: load(lines(tmp_path / "trace.jsonl", *rows), **options)


def prompts(recording):
    """The tokens of each prompt, by conversation."""
    return [
        [synthesised(call.content, 1000, 0, ("own", number)) for number, call in enumerate(one.calls)]
        for one in recording.conversations
    ]


def test_a_prompt_begins_with_the_one_before_and_a_shorter_one_with_what_was_cached(read):
    recording = read(
        row("a", 0, 300, 200, asked=0),
        row("a", 1, 400, 250, asked=20),  # less was cached than it shares: the provider had forgotten it
        row("a", 2, 350, 220, asked=40),
        row("a", 3, 360, 0, asked=60),
    )
    assert recording.format == "tracelab" and recording.facts == {"duplicate_rounds": 0, "shorter_prompts": 1}
    [[first, second, third, fourth]] = prompts(recording)
    assert [len(one) for one in (first, second, third, fourth)] == [300, 400, 350, 360]
    assert (alike(first, second), alike(second, third), alike(third, fourth)) == (300, 220, 350)


def test_sessions_share_what_was_cached_of_their_first_prompts_and_nothing_else(read):
    recording = read(
        row("a", 0, 300, 200), row("b", 0, 500, 120, asked=10), row("c", 0, 300, 200, provider="codex", asked=20)
    )
    [first], [second], [other] = prompts(recording)
    assert alike(first, second) == 120 and alike(first, other) < 3


def test_times_are_of_the_events_and_a_round_told_twice_counts_once(read):
    twice = row("a", 1, 400, 300, asked=30, ended=31, tool="Bash")
    recording = read(twice, row("b", 0, 90, 0, asked=8), row("a", 0, 300, 200, asked=0, ended=5), twice)
    assert recording.facts["duplicate_rounds"] == 1 and recording.requests == 3
    first, second = next(one.calls for one in recording.conversations if len(one.calls) == 2)
    assert (first.at_s, second.at_s, second.pause_s) == (0.0, 30.0, 25.0)
    assert (first.hint.stop_reason, second.hint.stop_reason, second.hint.tool) == ("end_turn", "tool_use", "Bash")
    assert [call.order for one in recording.conversations for call in one.calls] == [0, 2, 1]


def test_what_does_not_add_up_is_said_with_its_line(read):
    wrong = row("a", 0, 300, 200, newly_append_tokens=7)
    with pytest.raises(MalformedInput, match="jsonl:1: prefix_tokens and newly_append_tokens are not 300 together"):
        read(wrong)
    assert read(wrong, row("b", 0, 90, 0), on_malformed="skip").malformed == 1
