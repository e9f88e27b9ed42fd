"""History on disk, over the torch worker: each sampled token is the plain model's, whatever is done to the file."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pensieve.core.cache.base import LowerTier
from pensieve.core.cache.two_tier import TwoTierCache
from pensieve.core.plan import GPU, Move, Moved, StepPlan
from pensieve.core.policies.lru import Lru
from pensieve.core.request import History, Length, Request, TokenArray
from pensieve.core.scheduler.scheduler import SchedulerSettings
from pensieve.device.worker import TorchOptions
from pensieve.errors import HardwareMissing
from pensieve.plugins.caches.shared import SharedCache
from pensieve.plugins.tiers.disk import DiskTier
from pensieve.plugins.tiers.disk_transfer import DiskOptions
from pensieve.plugins.tiers.pool_file import PoolFile
from pensieve.serve.record import TurnRecord
from pensieve.sim.profile import Profile
from tests.exact import CheckedEngine
from tests.invariants import check_cache
from tests.simulated import policy_context
from tests.test_exactness import load
from tests.worker.torch.driver import random_tokens

CHUNK = 8
COST = Profile(CHUNK, {128: 0.128, 256: 0.256}, 0.001, {})


class Talk:
    """The next turns of conversations, each token compared with the plain model; a disk that takes no time."""

    def __init__(
        self,
        folder: Path,
        name: str = "llama",
        gpu: int = 20,
        cpu: int = 10,
        disk_blocks: int = 60,
        identity: bytes = bytes(32),
        below: LowerTier | None = None,
        make: type[TwoTierCache] = TwoTierCache,
    ) -> None:
        self.path = folder / "pool.kv"
        cache = make(policy=Lru(policy_context(CHUNK, gpu, cpu)), chunk_tokens=CHUNK, gpu_blocks=gpu, cpu_blocks=cpu)
        below = below or DiskTier(disk_blocks, transfer=DiskOptions(self.path, folder, identity, disk_blocks))
        self.disk: Any = below
        options = TorchOptions(transfer=below.transfer)
        self.engine = CheckedEngine(load(name), cache, SchedulerSettings(max_batch_tokens=64), 512, options=options)
        report = replace(self.engine.report, below_load_s=0.0)
        cache.begin(cost=COST, layers=2, batch_tokens=64, below=self.disk, report=report)
        self.cache, self._numbers = cache, 0

    def request(self, name: str, tokens: int, output: int = 4, **fields: Any) -> Request:
        self._numbers += 1
        prompt = fields.pop("prompt", None)  # whole; without, a message follows what the conversation holds
        if prompt is None:
            message, held = random_tokens(tokens, self._numbers), self.cache.sessions.get(name)
            prompt = message if held is None else held.tokens + message
        return Request(self._numbers, name, self._numbers, prompt, Length(output), **fields)

    def ask(self, name: str, tokens: int = 5, output: int = 4, **fields: Any) -> TurnRecord:
        self.engine.submit(self.request(name, tokens, output, **fields))
        [record] = self.engine.run()
        hits = [record.gpu_hit_tokens, record.cpu_hit_tokens, record.disk_hit_tokens, record.recomputed_tokens]
        assert record.status == "completed" and sum(hit or 0 for hit in hits) == record.history_tokens
        beyond = (record.new_tokens or 0) - (record.shared_hit_tokens or 0)
        assert sum(miss.stop - miss.start for miss in record.missed) == (record.recomputed_tokens or 0) + beyond
        return record

    def tokens(self, name: str) -> TokenArray[int]:
        known = self.cache.sessions.get(name)
        assert known is not None
        return known.tokens[:]

    def close(self) -> None:
        self.engine.torch_worker.close()


def push_out(talk, tokens=150):
    """Other conversations take both tiers."""
    for number in range(3):
        talk.ask(f"other{number}", tokens, 2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_turn_on_gpu_cpu_disk_and_a_hole_gives_the_plain_models_tokens(tmp_path, name):
    talk = Talk(tmp_path, name, gpu=24, cpu=8)
    talk.ask("a", 120, 9)
    talk.ask("b", 135, 4)  # a leaves the GPU, and in part the CPU
    places = talk.engine.cache.places(talk.cache.sessions["a"])
    assert {"C", "D"} <= set(places), places
    session, first = talk.cache.sessions["a"], places.index("D") + 1
    names = session.named(len(session.tokens), CHUNK)
    talk.disk.finish([Moved(0, ok=False, gone=(names[first],))])  # the second chunk of those on disk: a hole
    turn = talk.ask("a", 5, 6)
    assert turn.disk_hit_tokens and turn.cpu_hit_tokens and turn.recomputed_tokens
    assert talk.engine.paths.hole
    talk.close()


def test_a_conversation_finds_on_disk_what_another_one_began_with(tmp_path):
    """Also when that one is forgotten, as long as another has it."""
    talk, prompt = Talk(tmp_path, gpu=24, cpu=8, make=SharedCache), random_tokens(96, 8)
    talk.ask("a", prompt=prompt + random_tokens(20, 101))
    push_out(talk)
    assert set(talk.cache.places(talk.cache.sessions["a"])) == {"D", "-"}
    turn = talk.ask("b", prompt=prompt + random_tokens(20, 102))
    assert turn.history_tokens == 0 and turn.shared_hit_tokens == 96
    assert talk.cache.counters.extra["disk_loaded_chunks"] == 12
    talk.engine.forget("a")
    talk.ask("long", 150, 2)
    assert talk.ask("c", prompt=prompt + random_tokens(20, 103)).shared_hit_tokens == 96, "b has it still"
    talk.close()


def flip(path):
    """One bit of each block, behind its header."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        for place in range(4096 + 100, size, 4096):
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 4]))


def cut(path):
    os.truncate(path, path.stat().st_size // 100)


def swap(path):
    """Every block holds what another one held, header and all."""
    data = path.read_bytes()
    stride = len(data) // 60
    path.write_bytes(data[stride:] + data[:stride])


def test_a_file_cut_under_the_engine_is_a_miss_with_a_line(tmp_path, caplog):
    talk = Talk(tmp_path)
    talk.ask("a", 90)
    push_out(talk)
    settle(talk)
    cut(talk.path)
    with caplog.at_level(logging.WARNING):
        turn = talk.ask("a")
    assert turn.disk_hit_tokens == 0 and (turn.recomputed_tokens or 0) > 60
    assert [record.name.rsplit(".")[-1] for record in caplog.records] == ["disk_transfer"]
    talk.close()


def settle(talk):
    """What is to be written is written."""
    disk, ends = talk.engine.torch_worker._transfer, time.monotonic() + 20
    while disk is not None and disk._staged_bytes:
        assert time.monotonic() < ends
        time.sleep(0.001)


def test_one_bad_chunk_costs_that_chunk_and_no_batch_mate(tmp_path):
    talk = Talk(tmp_path)
    talk.ask("a", 90)
    push_out(talk)
    session = talk.cache.sessions["a"]
    settle(talk)
    names = session.named(len(session.tokens), CHUNK)
    block = talk.disk._block_of[names[2]]
    stride = talk.path.stat().st_size // 60
    with talk.path.open("r+b") as file:
        file.seek(block * stride + 4096 + 10)
        file.write(b"\x55\x55\x55")
    requests = [talk.request("a", 5), talk.request("new", 12, 9)]
    for request in requests:
        talk.engine.submit(request)
    turns = {turn.session: turn for turn in talk.engine.run()}
    on_disk = sum(name in talk.disk._block_of for name in names)
    assert turns["new"].status == turns["a"].status == "completed"
    assert turns["a"].disk_hit_tokens == on_disk * CHUNK > 5 * CHUNK
    assert (turns["a"].history_tokens or 0) - on_disk * CHUNK == turns["a"].recomputed_tokens
    assert (turns["a"].recomputed_tokens or 0) < 3 * CHUNK
    talk.close()


def again(talk, name, tokens):
    """The next message of a conversation of before the restart."""
    prompt = tokens + tokens[:5]
    return talk.ask(name, prompt=prompt, history=History(len(tokens) - 1, "restarted"))


@pytest.mark.parametrize("then", ["the same", "another model", flip, cut, swap])
def test_a_restarted_engine_reads_what_the_file_holds(tmp_path, then, caplog):
    talk = Talk(tmp_path)
    talk.ask("a", 90)
    push_out(talk)
    tokens, held = talk.tokens("a"), talk.cache.places(talk.cache.sessions["a"]).count("D")
    undisturbed = talk.ask("b", prompt=tokens + tokens[:5])
    talk.close()
    if callable(then):
        then(talk.path)
    with caplog.at_level(logging.WARNING):
        talk = Talk(tmp_path, identity=bytes(31) + b"1" if then == "another model" else bytes(32))
        turn = again(talk, "a", tokens)
    assert list(turn.token_ids) == list(undisturbed.token_ids)
    assert turn.history_tokens == len(tokens) - 1
    if then in ("the same", swap):  # a block says itself what it holds, wherever it is
        assert turn.disk_hit_tokens == held * CHUNK > 60
        assert not caplog.records
    else:
        assert turn.disk_hit_tokens == 0
        assert 1 <= len(caplog.records) <= 2, "a line at the start, or at the first read"
    assert {miss.cause for miss in turn.missed} == {"restarted", "new"}
    talk.close()


def test_a_disk_that_stands_still_holds_up_nobody_else(tmp_path):
    talk = Talk(tmp_path)
    talk.ask("a", 90)
    push_out(talk)
    go = threading.Event()
    worker = talk.engine.torch_worker
    read = worker._transfer._file.read_layer

    def slow(*given):
        assert go.wait(20)
        return read(*given)

    worker._transfer._file.read_layer = slow
    talk.engine.submit(talk.request("new", 8, 60))
    while not talk.engine.step():
        pass
    talk.engine.submit(talk.request("a", 5))
    others = 0
    while others < 20:
        others += sum(event.kind == "token" for event in talk.engine.step())
    assert len(talk.engine.scheduler.running) == 2, "it waits for its disk, admitted"
    go.set()
    turns = talk.engine.run()
    assert {turn.session: bool(turn.disk_hit_tokens) for turn in turns} == {"a": True, "new": False}
    talk.close()


def test_what_finds_no_room_to_wait_is_told_before_the_rest_is_written(tmp_path):
    talk = Talk(tmp_path)
    disk = talk.engine.torch_worker._transfer
    disk._staging_bytes = 2 * disk._tensors.block_bytes
    go = threading.Event()

    def full(*_):
        assert go.wait(20)
        raise OSError("no space left")

    disk._file.write = full
    first, second, third = keys = tuple(bytes([number]) * 32 for number in range(3))
    disk.begin(StepPlan(1, moves=(Move(7, GPU, "disk", (0, 1, 2), (3, 4, 5), keys),)))
    assert disk.moved() == (Moved(7, False, (third,)),)
    go.set()
    settle(talk)
    assert disk.moved() == (Moved(7, False, (first,)), Moved(7, False, (second,)))
    talk.close()


def test_a_read_goes_before_writes_but_for_those_to_its_blocks(tmp_path):
    talk = Talk(tmp_path)
    disk, begun, go, seen = talk.engine.torch_worker._transfer, threading.Event(), threading.Event(), []
    write, read = disk._file.write, disk._file.checksums

    def writes(block, *given):
        begun.set()
        assert go.wait(20)
        seen.append(("write", block))
        write(block, *given)

    disk._file.write = writes
    disk._file.checksums = lambda block, key: (seen.append(("read", block)), read(block, key))[1]
    keys = tuple(bytes([number]) * 16 for number in range(4))
    disk.begin(StepPlan(1, moves=(Move(7, GPU, "disk", (0, 1, 2, 3), (3, 4, 5, 6), keys),)))
    assert begun.wait(20), "the first one is under way"
    disk.begin(StepPlan(2, moves=(Move(8, "disk", GPU, (5,), (9,), keys[2:3], urgent=True),)))
    disk.begin(StepPlan(3, moves=(Move(9, GPU, "disk", (1,), (5,), (bytes([9]) * 16,)),)))
    go.set()
    disk.wait()
    talk.close()
    assert seen == [("write", 3), ("write", 5), ("read", 5), ("write", 4), ("write", 6), ("write", 5)]


def test_what_an_earlier_engine_left_of_a_conversation_can_be_given_up(tmp_path):
    talk = Talk(tmp_path)
    talk.ask("a", 90, tenant="alice")
    push_out(talk)
    tokens, held = talk.tokens("a"), talk.cache.places(talk.cache.sessions["a"]).count("D")
    talk.close()
    talk = Talk(tmp_path)
    asked = talk.ask("b", prompt=tokens + tokens[:5], history=History(80, "restarted"), tenant="bob")
    assert asked.disk_hit_tokens == 0, "another tenant finds nothing"
    talk.engine.forget("b")
    before = talk.disk.used
    talk.engine.forget("a", "bob", tokens)
    assert talk.disk.used == before, "nothing of it is his"
    talk.engine.forget("a", "alice", tokens)
    assert held > 0 and talk.disk.used == before - held
    assert list(talk.cache.sessions) == []
    check_cache(talk.cache)
    talk.ask("a", 20)
    talk.engine.forget("a", "", talk.tokens("a"))
    assert list(talk.cache.sessions) == [], "it has been asked since: that goes, too"
    talk.engine.submit(talk.request("b", 20))
    talk.engine.forget("b", "", random_tokens(20, 9))
    assert list(talk.cache.sessions) == ["b"], "it has a request under way"
    talk.engine.run()
    talk.close()


def test_a_file_in_use_or_too_large_is_refused(tmp_path):
    file = PoolFile(tmp_path / "x.kv", tmp_path, bytes(32), 4, 2, 64)
    with pytest.raises(HardwareMissing, match="another server"):
        PoolFile(tmp_path / "x.kv", tmp_path, bytes(32), 4, 2, 64)
    file.close()
    with pytest.raises(HardwareMissing, match=r"cache\.disk takes"):
        PoolFile(tmp_path / "x.kv", tmp_path, bytes(32), 1 << 40, 2, 64)


def test_of_a_chunk_that_was_written_twice_the_newer_one_is_kept(tmp_path):
    given = tmp_path / "x.kv", tmp_path, bytes(32), 4, 2, 64
    file = PoolFile(*given)
    for block in (1, 3, 2):
        file.write(block, b"k" * 16, [memoryview(bytes(64))] * 2)
    file.close()
    file = PoolFile(*given)
    assert file.kept == {b"k" * 16: 2}
    file.close()


def test_the_measured_time_is_that_of_a_read_and_no_block_is_taken(tmp_path):
    file = PoolFile(None, tmp_path, bytes(32), 4, 2, 1 << 16)
    file.write(1, b"k" * 16, [memoryview(bytes(1 << 16))] * 2)
    file.kept = {b"k" * 16: 1}
    assert 1e-6 < file.measure_s() < 5.0
    assert file.kept == {b"k" * 16: 1}
    assert file.checksums(1, b"k" * 16) is not None
    assert [file.checksums(block, bytes(16)) for block in (0, 2, 3)] == [None] * 3
    file.close()
    assert list(tmp_path.iterdir()) == [], "a file without a name ends with its process"
