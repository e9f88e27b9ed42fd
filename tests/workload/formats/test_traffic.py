"""Recorded traffic: read back as written, replayed as what it was made of, and refused where it is something else."""

import json
import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pensieve.errors import ConfigError, MalformedInput
from pensieve.lab.traffic import table
from pensieve.lab.traffic.table import Exchange, Facts, Salt
from pensieve.lab.workload.base import WorkloadContext
from pensieve.lab.workload.fit import Fit
from pensieve.lab.workload.formats import load, rows_of
from pensieve.lab.workload.formats.traffic import converted
from pensieve.lab.workload.formats.vllm_events import Events, joined, listen
from pensieve.lab.workload.recording import Count, Text
from tests.shared_data import shared
from tests.workload.dry import lines
from tests.workload.formats.test_timed_formats import READ

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


@pytest.mark.parametrize("name", [*READ, "mooncake", "weka"])
def test_a_format_is_replayed_as_before_it_was_converted(name, tmp_path):
    """Two of them as real files, the smallest of those with a sub-agent."""
    if name in READ:
        source = load(lines(tmp_path / "file", *READ[name][0]))
    else:
        files = sorted(shared(name).glob("*.json*"), key=lambda file: file.stat().st_size)
        source = load(next(file for file in files if name == "mooncake" or b'"subagent"' in file.read_bytes()))
    table.write(tmp_path / "traffic.parquet", *converted(source, SALT))
    read = load(tmp_path / "traffic.parquet")
    assert read.format == "traffic"
    assert [_told(one) for one in read.conversations] == [_told(one) for one in source.conversations]
    seen = {}  # one hash of the source is one hash of the file, and the other way round
    for ours, theirs in zip(read.conversations, source.conversations, strict=True):
        for call, before in zip(ours.calls, theirs.calls, strict=True):
            assert type(call.content) is type(before.content)
            hashes = (getattr(one.content, "hashes", ()) for one in (call, before))
            for new, old in zip(*hashes, strict=True):
                assert seen.setdefault(old, new) == new
    assert len(set(seen.values())) == len(seen)


def _told(one):
    calls = [replace(call, content=Count(call.content.tokens), order=0) for call in one.calls]
    return replace(one, calls=tuple(calls))


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
    table.write(tmp_path / "t.parquet", *rows_of(file, None, Salt()))
    assert b"secret" not in (tmp_path / "t.parquet").read_bytes()
    [((one, answer), (two, _))] = prompts(load(tmp_path / "t.parquet")).values()
    assert two[: len(one + answer)] == one + answer
    assert not any(isinstance(call.content, Text) for call in load(tmp_path / "t.parquet").conversations[0].calls)


def test_what_failed_is_left_out_and_unnamed_sessions_are_found_by_their_prefix(tmp_path):
    rows = [
        Exchange(place, place / 2, blocks=asked, prompt_tokens=4 * len(asked) + 1, output_tokens=1)
        for place, asked in enumerate(([1, 2], [1, 5], [1, 2, 3], [1], [9, 5], [1, 5, 6]))
    ]
    rows[3].status = "failed"
    # A reply ends in a block that all share: who holds it goes on there.
    replies = [([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]), ([1, 7], [8]), ([1, 2, 3, 9], [])]
    said = [
        Exchange(place, float(place), prompt_tokens=4 * len(asked), output_tokens=5, blocks=asked, output_blocks=reply)
        for place, (asked, reply) in enumerate(replies)
    ]
    for found, expected, left_out in (
        (rows, {"prefix-0": [0, 2], "prefix-1": [1, 4], "prefix-4": [3]}, 1),
        (said, {"prefix-0": [0, 1, 2, 4], "prefix-3": [3]}, 0),
    ):
        read = load(written(tmp_path / "t.parquet", Facts("proxy", block=4), *found))
        assert {one.id: [call.order for call in one.calls] for one in read.conversations} == expected
        assert read.facts.get("requests_left_out", 0) == left_out


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


class GenerateReqInput:  # as SGLang's: an object with fields
    def __init__(self, **fields):
        self.__dict__.update(fields)


class Runs:
    """What a pickle must not get run."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def sglang(path):
    ids, said = list(range(40)), list(range(40, 50))
    meta = {"prompt_tokens": 40, "completion_tokens": 10, "cached_tokens": 0, "finish_reason": {"type": "stop"}}
    more = {**meta, "prompt_tokens": 60, "cached_tokens": 48}
    requests = [
        (GenerateReqInput(input_ids=ids + said + ids[:10], rid="b"), {"meta_info": more}, 13.5, 15.0),
        (GenerateReqInput(input_ids=ids, rid="a"), {"meta_info": meta, "output_ids": said}, 10.0, 12.0),
    ]
    path.write_bytes(pickle.dumps({"server_args": Runs(), "requests": requests}))


def lookups(path):
    def one(at_s, name, tokens, *hashes):
        return {"timestamp": at_s, "request_id": name, "model_name": "m", "chunk_size": 16, "seq_len": tokens,
                "chunk_hashes": list(hashes)}  # fmt: skip

    twice = (one(at_s, "a", 40, "0xa", "0xb") for at_s in (10.0, 10.1))
    lines(path, *twice, one(13.5, "b", 60, "0xa", "0xb", "0xc"))


def lifecycle(path):
    def one(at_s, tokens, *said):
        body = {"messages": [{"role": "user", "content": one} for one in said]}
        info = {"input_tokens": tokens, "output_tokens": 10, "output_token_times": [at_s + 0.5]}
        return {"start_time": at_s, "end_time": at_s + 2, "request": json.dumps(body), "info": info, "error": None}

    path.write_text(json.dumps([one(13.5, 60, "hello " * 30, "and " * 20), one(10.0, 40, "hello " * 30)]))


def profiled(path):
    def one(at_s, tokens):
        metrics = {"input_sequence_length": tokens, "output_sequence_length": 10, "time_to_first_token": 500.0}
        about = {"request_start_ns": at_s * 1e9, "request_end_ns": (at_s + 2) * 1e9, "x_correlation_id": "s"}
        return {"metadata": about, "metrics": {name: {"value": value} for name, value in metrics.items()}}

    lines(path, one(10.0, 40), one(13.5, 60))


SOURCES = {"lmcache_lookup": lookups, "sglang_dump": sglang, "inference_perf": lifecycle, "aiperf": profiled}


@pytest.mark.parametrize("name", SOURCES)
def test_what_others_wrote_of_served_requests_becomes_rows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / ("source.pkl" if name == "sglang_dump" else "source.json")
    SOURCES[name](source)
    table.write(tmp_path / "t.parquet", *rows_of(source, None, SALT))
    rows = list(table.read(tmp_path / "t.parquet"))
    assert [(row.request, row.arrival_s, row.prompt_tokens, row.status) for row in rows] == [
        (0, 0.0, 40, "completed"), (1, 3.5, 60, "completed"),
    ]  # fmt: skip
    if name != "aiperf":
        assert rows[1].blocks[:2] == rows[0].blocks[:2] and 2 <= len(rows[0].blocks) < len(rows[1].blocks)
    if name in ("inference_perf", "aiperf"):
        assert rows[1].first_token_s == 4.0 and rows[1].end_s == 5.5
    if name == "sglang_dump":
        assert [row.cached_tokens for row in rows] == [0, 48] and rows[1].blocks[2] == rows[0].output_blocks[0]
    assert not (tmp_path / "ran").exists()
    direct, converted = load(source), load(tmp_path / "t.parquet")
    assert direct.format == name and direct.requests == converted.requests == 2
    assert [one.calls[-1].content.tokens for one in converted.conversations][-1] == 60


def test_a_reply_that_was_aborted_is_cancelled_and_chunks_of_two_sizes_say_their_lengths(tmp_path):
    meta = {"prompt_tokens": 9, "finish_reason": {"type": "abort"}}
    dumped = {"requests": [(GenerateReqInput(rid="a"), {"meta_info": meta}, 1.0, 2.0)]}
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(dumped))
    [row] = rows_of(tmp_path / "a.pkl", None, SALT)[1]
    assert (row.status, row.prompt_tokens, row.blocks) == ("cancelled", 9, None)
    file = tmp_path / "lookup_hashes_0.jsonl"
    lookups(file)
    first, again, second = file.read_text().splitlines()
    lines(file, first, again, second.replace('"chunk_size": 16', '"chunk_size": 20'))
    _, rows = rows_of(file, None, SALT)
    assert [row.lengths for row in rows] == [[16, 16], [20, 20, 20]]


def test_an_unknown_format_is_refused_with_what_it_lacks(tmp_path):
    with pytest.raises(ConfigError, match="nearest to mooncake, and lacks hash_ids"):
        load(lines(tmp_path / "x.jsonl", {"input_length": 3, "when": 0}))


VLLM = Path(__file__).with_name("vllm_events")
"""Of vLLM 0.32 on a CPU, 48 + 120 blocks of 32: 40 requests, two at a time from the 25th on. Token ids are other ones."""
FOUND = [0, 64, 64, 64, 64, 64, 64, 64, 96, 128, 96, 96, 96, 128, 128, 96, 160, 160, 160, 128]
FOUND += [192, 160, 128, 192, 224, 224, 192, 160, 224, 224, 256, 160, 320, 256, 224, 256, 288, 224, 288, 288]
"""cached_tokens of its replies."""


def test_what_vllm_found_is_read_from_its_events_and_its_log(tmp_path):
    table.write(tmp_path / "t.parquet", *rows_of(VLLM, None, SALT))
    facts, rows = table.read_facts(tmp_path / "t.parquet"), list(table.read(tmp_path / "t.parquet"))
    assert [row.cached_tokens for row in rows] == FOUND
    assert facts.block == 32 and facts.engine["name"] == "vllm" and sum(row.cached_cpu_tokens for row in rows) == 1024
    assert len({row.session for row in rows if row.session}) == 8 and all(row.output_tokens == 12 for row in rows)
    assert [row.arrival_s for row in rows] == sorted(row.arrival_s for row in rows)
    assert all(row.first_token_s is None or row.first_token_s >= row.arrival_s for row in rows)
    replies = [(row.blocks, row.output_blocks) for row in rows if row.output_blocks]
    later = [tuple(row.blocks) for row in rows]
    followed = [one for one in later for blocks, said in replies if one[: len(blocks) + 1] == (*blocks, *said)]
    assert len(replies) >= 8 and len(followed) >= 6, "the next prompt holds the block of the reply"


@pytest.mark.parametrize(
    ("kept", "changed", "reason"),
    [
        ("vllm.log", {}, r"lack BlockStored with token_ids"),
        ("events.jsonl", {}, r"\.log"),
        (None, {"prompt_token_ids": "ids"}, "lacks prompt_token_ids"),
        (None, {"block_size": "size"}, "batch 1: a BlockStored lacks block_size"),
        (None, {"BlockStored": "Kept"}, "'Kept' is no event of vLLM's cache"),
    ],
)
def test_events_and_log_that_say_too_little_are_refused_with_what_they_lack(kept, changed, reason, tmp_path):
    for file in VLLM.iterdir():
        if kept in (None, file.name):
            said = file.read_text()
            for old, new in changed.items():
                said = said.replace(old, new)
            (tmp_path / file.name).write_text(said)
    with pytest.raises(MalformedInput, match=reason):
        load(tmp_path, "vllm_events")


def test_events_are_taken_live_and_their_tokens_are_not_kept(tmp_path):
    zmq, msgpack = pytest.importorskip("zmq"), pytest.importorskip("msgpack")
    batches = [json.loads(line) for line in (VLLM / "events.jsonl").read_text().splitlines()]
    events = Events(SALT)
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        listening = threading.Thread(
            target=listen, args=(f"tcp://127.0.0.1:{port}", events, lambda: len(events.taken) >= 175), daemon=True
        )
        listening.start()
        assert publisher.poll(20_000)  # the subscription
        for number, batch in enumerate(batches):
            publisher.send_multipart([b"", number.to_bytes(8, "big"), msgpack.packb(batch)])
        listening.join(20)
    _, rows = joined(events, [VLLM / "vllm.log"])
    assert [row.cached_tokens for row in rows] == FOUND
