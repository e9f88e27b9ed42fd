"""Recorded traffic: read back as written, replayed as what it was made of, and refused where it is something else."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pensieve.errors import MalformedInput
from pensieve.lab.traffic import table
from pensieve.lab.traffic.hashing import Salt
from pensieve.lab.traffic.table import Exchange, Facts
from pensieve.lab.workload.base import WorkloadContext
from pensieve.lab.workload.fit import Fit
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.formats.traffic import convert
from pensieve.lab.workload.recording import Blocks, Parts, Text
from tests.shared_data import shared
from tests.workload.formats.test_timed_formats import READ, lines

SALT = Salt(b"of this test")
CONTEXT = WorkloadContext(
    seed=3, gpu_tokens=0, cpu_tokens=0, max_context=10**6, vocab=1000, encode=lambda t: t.encode(), force_lengths=True
)


def written(path, facts, *rows):
    table.write(path, facts, rows)
    return path


def prompts(recording):
    """Tokens of each prompt and reply as a replay sends them, by conversation."""
    found = {}
    for one in recording.conversations:
        for step in Fit(CONTEXT).dialogue(one).steps:
            found.setdefault(one.id, []).append((step.build(), step.said() if step.said else None))
    return found


@pytest.mark.parametrize("name", READ)
def test_a_timed_format_is_replayed_as_before_it_was_converted(name, tmp_path):
    rows, _, _ = READ[name]
    source = load(lines(tmp_path / "file", *rows))
    convert(source, tmp_path / "traffic.parquet", SALT)
    read = load(tmp_path / "traffic.parquet")
    assert read.format == "traffic"
    assert {one.id: [_shape(call) for call in one.calls] for one in read.conversations} == {
        one.id: [_shape(call) for call in one.calls] for one in source.conversations
    }


def _shape(call):
    content = call.content
    if isinstance(content, Blocks):
        content = replace(
            content, hashes=array("q", map(SALT.number, content.hashes)) if _raw(content) else content.hashes
        )
    elif isinstance(content, Parts):
        content = tuple(tokens for _, tokens in content.pieces)
    return content, call.reply, call.at_s, call.continues, call.order, call.pause_s, call.waits_for, call.hint


def _raw(content):
    return all(abs(one) < 2**32 for one in content.hashes)


@pytest.mark.parametrize("name", ["mooncake", "weka"])
def test_a_real_trace_shares_what_it_shared(name, tmp_path):
    files = sorted(shared(name).glob("*.json*"), key=lambda file: file.stat().st_size)
    source = load(next(file for file in files if name == "mooncake" or b'"subagent"' in file.read_bytes()))
    convert(source, tmp_path / "traffic.parquet", SALT)
    read = load(tmp_path / "traffic.parquet")
    assert [_facts(one) for one in read.conversations] == [_facts(one) for one in source.conversations]
    seen = {}  # one hash of the source is one hash of the file, and the other way round
    for ours, theirs in zip(read.conversations, source.conversations, strict=True):
        for call, before in zip(ours.calls, theirs.calls, strict=True):
            for new, old in zip(call.content.hashes, before.content.hashes, strict=True):
                assert seen.setdefault(old, new) == new
    assert len(set(seen.values())) == len(seen)


def _facts(one):
    return one.id, one.begun, [(c.content.tokens, c.reply, c.at_s, c.pause_s, c.waits_for, c.hint) for c in one.calls]


@pytest.mark.parametrize(("unit", "ratio", "size"), [("tokens", None, 4), ("bytes", 0.3, 16)])
def test_the_next_prompt_begins_with_the_prompt_and_the_reply_before_it(unit, ratio, size, tmp_path):
    first, reply, more = bytes(range(88)), bytes(range(88, 140)), bytes(range(140, 200))
    edited = b"x" * 40 + (first + reply)[40:] + more
    width = size * 4 if unit == "tokens" else size

    def row(request, prompt, said):
        blocks = SALT.blocks(prompt, width)
        tokens = [int(len(one) * (ratio or 1 / 4)) for one in (prompt, said)]
        return Exchange(request, float(request), status="completed", session="s", blocks=blocks,
                        prompt_tokens=tokens[0], output_tokens=tokens[1],
                        output_blocks=SALT.blocks(prompt + said, width, len(blocks)))  # fmt: skip

    path = written(
        tmp_path / "t.parquet",
        Facts("proxy", unit=unit, block=size, tokens_per_byte=ratio),
        row(0, first, reply), row(1, first + reply + more, b"abc"), row(2, edited, b"d"),
    )  # fmt: skip
    [((one, answer), (two, _), (three, _))] = prompts(load(path)).values()
    assert two[: len(one + answer)] == one + answer and len(two) > len(one + answer)
    assert three[:8] != two[:8] and three[16:40] == two[16:40], "what lies behind the edit is the same"


def test_the_text_of_conversations_becomes_hashes_alone(tmp_path):
    file = lines(tmp_path / "talks.jsonl", {"messages": [
        {"role": "user", "content": "secret " * 40}, {"role": "assistant", "content": "answer " * 40},
        {"role": "user", "content": "and then"}, {"role": "assistant", "content": "the end"}]})  # fmt: skip
    convert(load(file), tmp_path / "t.parquet", Salt())
    assert b"secret" not in (tmp_path / "t.parquet").read_bytes()
    [((one, answer), (two, _))] = prompts(load(tmp_path / "t.parquet")).values()
    assert two[: len(one + answer)] == one + answer
    assert not any(isinstance(call.content, Text) for call in load(tmp_path / "t.parquet").conversations[0].calls)


def test_two_salts_agree_on_nothing_and_one_salt_on_all():
    data = bytes(range(128))
    assert Salt().blocks(data, 16) != Salt().blocks(data, 16) and Salt().name("a") != Salt().name("a")
    assert SALT.blocks(data, 16)[3:] == SALT.blocks(data, 16, first=3) and len(SALT.blocks(data[:-1], 16)) == 7


def test_what_failed_is_left_out_and_unnamed_sessions_are_found_by_their_prefix(tmp_path):
    def row(request, blocks, **more):
        return Exchange(request, request / 2, blocks=blocks, prompt_tokens=4 * len(blocks or ()) + 1, output_tokens=1,
                        status="completed") if not more else Exchange(request, request / 2, **more)  # fmt: skip

    path = written(tmp_path / "t.parquet", Facts("proxy", block=4),
                   row(0, [1, 2]), row(1, [1, 5]), row(2, [1, 2, 3]), row(3, None, status="failed"),
                   row(4, [9, 5]), row(5, [1, 5, 6]))  # fmt: skip
    read = load(path)
    assert {one.id: [call.order for call in one.calls] for one in read.conversations} == {
        "prefix-0": [0, 2], "prefix-1": [1, 4], "prefix-4": [3],
    }  # fmt: skip
    assert read.facts["requests_left_out"] == 1


def test_a_request_without_a_session_continues_the_one_whose_reply_it_holds(tmp_path):
    turns = [([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]), ([1, 7], [8]), ([1, 2, 3, 9], [])]
    path = written(tmp_path / "t.parquet", Facts("proxy", block=4), *(
        Exchange(place, float(place), prompt_tokens=4 * len(asked), output_tokens=5, blocks=asked, output_blocks=said)
        for place, (asked, said) in enumerate(turns)
    ))  # fmt: skip
    found = {one.id: [call.order for call in one.calls] for one in load(path).conversations}
    assert found == {"prefix-0": [0, 1, 2, 4], "prefix-3": [3]}


def test_other_files_are_refused_with_what_they_lack(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"request": [1]}), path)
    with pytest.raises(MalformedInput, match=r"it lacks the columns arrival_s"):
        load(path)
    written(path, replace(Facts("proxy"), version=2), Exchange(1))
    with pytest.raises(MalformedInput, match="version 2"):
        load(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(MalformedInput, match="cannot be read as Parquet"):
        load(path)
