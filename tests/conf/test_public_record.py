"""Hits of two public results, counted again from their raw rows by code of this file."""

import json
from collections import OrderedDict

import pytest

from pensieve.serve.record import is_measured
from tests.composed import replayed
from tests.shared_data import shared


def found(name, path, *overrides):
    """Prompt tokens that each measured request found, in order of arrival."""
    record, _ = replayed(f"experiment=public/{name}", f"workload.path={path}", "baseline=prefix_cache", *overrides)
    turns = [turn for turn in record.turns if is_measured(turn.phase)]
    assert {turn.status for turn in turns} == {"completed"}
    turns.sort(key=lambda turn: turn.intended_s)
    return [turn.gpu_hit_tokens + turn.shared_hit_tokens for turn in turns]


def test_an_unlimited_cache_finds_the_longest_prefix_that_a_weka_session_has_sent():
    file = min(shared("weka").glob("*.json"), key=lambda one: one.stat().st_size)
    sent, expected = set(), []
    for request in json.loads(file.read_text())["requests"]:
        blocks = request["hash_ids"][: (request["in"] - 1) // 64]
        expected.append(64 * next((place for place, one in enumerate(blocks) if one not in sent), len(blocks)))
        sent.update(request["hash_ids"])
    assert sum(expected) > 0
    assert found("weka_unlimited", file) == expected


@pytest.mark.parametrize(("blocks", "share"), [(32, (0.1, 0.45)), (400, (0.6, 0.9))])
def test_the_device_alone_finds_what_a_plain_lru_of_all_cards_blocks_finds(tmp_path, blocks, share):
    """Sessions that grow in turn, as the coding agents' do. blocks: of four cards together."""
    asked = [(turn, one, 40 * turn + 60 + one) for turn in range(6) for one in range(4)]
    rows, idle, expected = [], OrderedDict(), []
    for turn, one, tokens in asked:
        names = [n if n < 2 else 1000 * (one + 1) + n for n in range(tokens // 16)]
        chat = 10 * turn + one
        rows.append({"chat_id": chat, "parent_chat_id": chat - 10 if turn else -1, "timestamp": 100 * chat,
                     "input_length": tokens, "output_length": 1, "type": "text", "turn": turn + 1,
                     "hash_ids": names})  # fmt: skip
        hits = next((n for n, name in enumerate(names) if name not in idle), len(names))
        hits = min(hits, (tokens - 1) // 16)  # the last token is computed
        expected.append(16 * hits)
        for name in names[:hits]:
            del idle[name]
        while blocks - len(idle) < -(-tokens // 16):
            idle.popitem(last=False)
        idle.update(dict.fromkeys(reversed(names)))
    path = tmp_path / "agents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    size = f"cache.gpu={blocks * 16 // 4} tokens"
    assert found("lmcache_lazy", path, size, "hardware=sim_h200", "workload.format=qwen_bailian") == expected
    assert share[0] < sum(expected) / sum(tokens for _, _, tokens in asked) < share[1]
