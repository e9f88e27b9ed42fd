"""pensieve advise, from a file of recorded traffic to its page."""

import json
import random
import sys
from collections import OrderedDict

import pytest
from hydra import compose, initialize_config_dir

from pensieve import cli
from pensieve.errors import ConfigError, MalformedInput
from pensieve.lab.commands.advise import advice as module
from pensieve.lab.commands.advise.advice import Outcome, advise
from pensieve.lab.commands.advise.causes import Reading
from pensieve.lab.commands.advise.page import page_of, render
from pensieve.lab.commands.advise.replays import moved, open_source, replayed
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.statistics import Estimate
from pensieve.lab.traffic.table import Exchange, Facts, write
from pensieve.lab.workload.recording import Blocks, Call, Conversation, hashes_of

SIZE = 16
POOL = 60


class LruBlocks:
    """vLLM's prefix cache for one request at a time, counted apart from the project's: blocks in use, and idle ones least
    recently used first, of a request its last block first."""

    def __init__(self, blocks):
        self.room, self.idle = blocks, OrderedDict()

    def ask(self, blocks, tokens, reply):
        names = [tuple(blocks[: place + 1]) for place in range(len(blocks))]
        found = 0
        while found < (tokens - 1) // SIZE and names[found] in self.idle:
            found += 1
        own = names[:found]
        for name in own:
            del self.idle[name]
        while self.room - len(self.idle) < -(-(tokens + reply) // SIZE):
            self.idle.popitem(last=False)
        said = [(*names[-1:], tokens, random.random()) for _ in range((tokens + reply - 1) // SIZE - len(names))]
        for name in reversed([*names, *said]):
            self.idle[name] = None
        return found * SIZE


def traffic(stamp=None, conversations=8, turns=4):
    """One request at a time. stamp: a block that differs in every prompt. Each says what LruBlocks found."""
    draw, cache, said, rows = random.Random(3), LruBlocks(POOL), {}, []
    for _ in range(turns):
        for name in range(conversations):
            fresh = [draw.getrandbits(60) for _ in range(draw.randint(1, 3))]
            said[name] = [*said.get(name, range(4)), *fresh]
            blocks = list(said[name])
            if stamp is not None:
                blocks[stamp] = draw.getrandbits(60)
            tokens, at_s = SIZE * len(blocks) + draw.randint(1, SIZE - 1), 100.0 * len(rows)
            found = cache.ask(blocks, tokens, 5)
            rows.append(
                Exchange(len(rows), at_s, at_s + 0.1, at_s + 1, "completed", session=str(name), prompt_tokens=tokens,
                         output_tokens=5, cached_tokens=found, blocks=blocks)
            )  # fmt: skip
    return rows


ENGINE = {"name": "vllm", "gpu_tokens": POOL * SIZE, "block_tokens": SIZE}


def written(folder, rows, **facts):
    path = folder / "traffic.parquet"
    write(path, Facts("proxy", block=SIZE, **{"engine": ENGINE, **facts}), rows)
    return path


def advised(path, *overrides, monkeypatch):
    monkeypatch.setattr(module, "replay_all", lambda tasks: map(replayed, tasks))  # in this process
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        cfg = compose("advise", [f"workload.path={path}", "hardware.cpu_memory=4MB", *overrides])
    return advise(cfg, lambda _: None)


@pytest.mark.parametrize("stamp", [None, 2])
def test_the_replay_is_the_recorded_engine_token_for_token_and_a_timestamp_is_worth_moving(
    tmp_path, monkeypatch, stamp
):
    path = written(tmp_path, traffic(stamp))
    found = advised(path, "model=tiny", "prices.cpu_gib_hour=1000", monkeypatch=monkeypatch)
    assert found.largest_difference == 0 and found.engine_found == pytest.approx(found.base.rate)
    page = page_of(found)
    assert "largest difference of a request 0 tokens" in page["notes"][0]
    named = [note for note in page["notes"] if f"at token {2 * SIZE}" in note]
    move = [one for one in found.outcomes if one.option.moved == 2 * SIZE]
    assert bool(named) == bool(move) == (stamp is not None)
    assert all(one.more.value > 0 for one in move)
    for one, line in zip(found.outcomes, page["replays"][1:], strict=True):
        hour = 1000 * one.option.added.get("cpu", 0) / 2**30  # a disk has no price here
        priced = set(one.option.added) == {"cpu"}
        assert line["price"].endswith(f", {hour:.3g} an hour") == priced == ("an hour" in line["price"])
    html = render(page)
    assert page["answer"].split(".")[0] in html and all(line["cause"] in html for line in page["causes"])


def test_what_helps_finds_enough_with_its_whole_interval_above_nothing():
    for value, low, helps in ((0.01, 0.001, True), (0.01, -0.001, False), (0.004, 0.003, False)):
        assert Outcome(None, None, Estimate(value, low, 0.02, 9, 1), None).helps is helps


def test_what_the_engine_found_is_unknown_where_it_does_not_say_and_sizes_are_assumed(tmp_path, monkeypatch):
    rows = traffic()
    for one in rows:
        one.cached_tokens = None
    found = advised(written(tmp_path, rows, engine={}), "model=tiny", "cache.gpu=960 tokens", monkeypatch=monkeypatch)
    page = page_of(found)
    assert "nothing was checked" in page["notes"][0] and page["facts"]["found by the engine"] == "unknown"
    assert any("assumed" in note for note in page["notes"])
    other = advised(written(tmp_path, traffic()), "model=tiny", "blocks=30", "engine=vllm", monkeypatch=monkeypatch)
    assert other.largest_difference > 0  # not the sizes that it had


def test_a_clock_that_jumps_is_counted_and_a_file_that_ends_early_is_refused(tmp_path):
    rows = traffic()
    rows[-1].arrival_s += 1e7
    rows[5].end_s = rows[5].arrival_s - 50
    path = written(tmp_path, rows)
    source = open_source(path, None)
    assert source.strays == 1 and len(source.rows) == len(rows) - 1
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MalformedInput, match=r"record it again|give a file"):
        open_source(path, None)
    for one in rows:
        one.arrival_s = None
    with pytest.raises(ConfigError, match="no times of arrival"):
        open_source(written(tmp_path, rows), None)


def test_a_recording_beyond_memory_is_read_by_whole_conversations(tmp_path, monkeypatch):
    monkeypatch.setattr("pensieve.lab.commands.advise.replays.MOST_REQUESTS", 16)
    source = open_source(written(tmp_path, traffic()), None)
    assert source.in_file == 32 and 0 < len(source.rows) < 32 and source.named
    unnamed = tmp_path / "mooncake.jsonl"
    unnamed.write_text('{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}')
    assert not open_source(unnamed, None).named
    assert {len(one.calls) for one in source.conversations} == {4}


def test_tenants_find_nothing_of_each_other(tmp_path):
    same = [Exchange(place, 10.0 * place, status="completed", tenant=name, prompt_tokens=70, blocks=[1, 2, 3])
            for place, name in enumerate("xyx")]  # fmt: skip
    source = open_source(written(tmp_path, same), None)
    reading = Reading(source.facts, source.rows)
    assert [one.ever for one in reading.sent] == [0, 0, 48] and len(reading.tenants) == 2
    assert len({tuple(call.content.hashes) for one in source.conversations for call in one.calls}) == 2


def test_what_changes_is_moved_and_all_else_stays():
    def call(*blocks):
        return Call(Blocks(hashes_of(list(blocks)), SIZE, SIZE * len(blocks) + 1), 1, 0.0, continues=False)

    talk = Conversation("a", (call(1, 71, 3), call(1, 72, 3, 4), call(1, 73, 3, 4, 5), call(9, 8)))
    [found] = moved([talk], SIZE)
    assert [list(one.content.hashes) for one in found.calls] == [[1, 71, 3], [1, 71, 3, 4], [1, 71, 3, 4, 5], [9, 8]]
    assert moved([talk], 2 * SIZE) == [talk]


def test_the_command_prints_the_page_and_writes_it(tmp_path, monkeypatch, capsys):
    path = written(tmp_path, traffic())
    monkeypatch.setenv("PENSIEVE_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(module, "replay_all", lambda tasks: map(replayed, tasks))
    monkeypatch.setattr(sys, "argv", ["pensieve advise", str(path), "model=tiny", "hardware.cpu_memory=40MB"])
    cli.advise()
    told = capsys.readouterr().out
    assert "Where the misses come from" in told and "of these prompts, its replay" in told
    line = next(line for line in told.splitlines() if "--kv-transfer-config" in line)
    extra = json.loads(line.split("'")[1])["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] > 0 and extra["eviction_policy"] in ("lru", "arc", "retention_value")
    assert "What would help" in (tmp_path / "traffic.advice.html").read_text()
