"""serve.record: live turns as recorded traffic, which a sweep replays."""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("fastapi")

from pensieve.errors import ConfigError
from pensieve.lab.traffic.table import read, read_facts
from pensieve.lab.workload.formats import load
from pensieve.lab.workload.recording import Blocks
from pensieve.serve.server.create import server_of
from pensieve.serve.server.recording import Recording
from tests.server.test_chat import composed


@pytest.fixture
def config() -> dict[str, Any]:
    fields = composed("hardware=sim_h100")
    del fields["chat"]
    return fields


def test_live_turns_are_recorded_traffic(config: dict[str, Any], tmp_path: Any) -> None:
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


def test_a_file_that_cannot_be_made_is_refused(config: dict[str, Any], tmp_path: Any) -> None:
    with server_of(config) as server, pytest.raises(ConfigError, match="cannot be recorded"):
        Recording(server, tmp_path / "no folder" / "traffic.parquet", config)
