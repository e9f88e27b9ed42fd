"""serve.record: live turns as recorded traffic, which a sweep replays."""

import random
from array import array
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pensieve.lab.traffic.table import read, read_facts
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.recording import Blocks
from pensieve.serve.server.api import server_of
from pensieve.serve.server.observers import Recording
from tests.composed import replayed
from tests.server.test_chat import composed


def test_live_turns_are_recorded_traffic(tmp_path: Any) -> None:
    config = composed("hardware=sim_h100")
    with server_of(config) as server:
        server.generate("before", text="not recorded", max_new_tokens=2)
        recording = Recording(server, tmp_path / "traffic.parquet", config)
        turns = [server.generate("a", text=f"message {i} " * 5, max_new_tokens=30).turn for i in range(3)]
        with pytest.raises(Exception, match="context"):
            server.generate("b", prompt_ids=[1] * 10**6, max_new_tokens=30)
        recording.close()
    facts, rows = read_facts(recording.path), list(read(recording.path))
    assert facts.engine["policy"] == "retention_value" and facts.engine["gpu_tokens"] > 0
    assert [row.status for row in rows] == ["completed"] * 3 + ["failed"]
    told = [(turn.prompt_tokens, turn.output_tokens, turn.gpu_hit_tokens, turn.finish_reason) for turn in turns]
    assert [(r.prompt_tokens, r.output_tokens, r.cached_gpu_tokens, r.finish_reason) for r in rows[:3]] == told
    assert rows[2].cached_tokens > rows[1].cached_tokens > 0
    for row, turn in zip(rows, turns, strict=False):
        assert (row.first_token_s - row.arrival_s) * 1e3 == pytest.approx(turn.ttft_ms)
    [conversation] = load(recording.path).conversations
    calls = [call for call in conversation.calls if isinstance(call.content, Blocks) and isinstance(call.reply, Blocks)]
    for call, after in pairwise(calls):  # the next prompt begins with prompt and reply
        assert after.content.hashes[: len(call.reply.hashes)] == call.reply.hashes
    assert len(calls) == 3 and isinstance(turns[0].token_ids, array) and turns[0].token_ids


@pytest.mark.parametrize("baseline", ["pensieve", "prefix_cache"])
def test_a_replay_finds_what_the_server_found_token_for_token(baseline: str, tmp_path: Any) -> None:
    typed = ("model=tiny", f"baseline={baseline}", "cache.gpu=4096 tokens", "cache.cpu=4096 tokens")
    fields = composed("hardware=sim_h100", *typed)
    draw = random.Random(1)
    with server_of(fields) as server:
        recording = Recording(server, tmp_path / "traffic.parquet", fields)
        for _ in range(60):
            text = "word " * draw.randrange(5, 60)
            server.generate(f"s{draw.randrange(12)}", text=text, max_new_tokens=draw.randrange(5, 60), ignore_eos=True)
        recording.close()
    rows = list(read(recording.path))
    record, _ = replayed("workload=trace", f"workload.path={recording.path}", *typed)
    turns = sorted((turn for turn in record.turns if turn.phase != "warmup"), key=lambda turn: turn.intended_s)
    assert [(turn.prompt_tokens, turn.gpu_hit_tokens, turn.cpu_hit_tokens) for turn in turns] == [
        (row.prompt_tokens, row.cached_gpu_tokens, row.cached_cpu_tokens) for row in rows
    ]
    assert 0 < sum(row.cached_tokens for row in rows) < sum(row.prompt_tokens for row in rows) * 0.7
