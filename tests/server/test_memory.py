"""What a server's process holds, and what its tenants do."""

from __future__ import annotations

import gc
import random
import re
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.errors import TooManySessions
from pensieve.serve.record import TurnRecord
from pensieve.serve.server import memory
from pensieve.serve.server.api import Server
from pensieve.serve.server.conversations import Conversations, Mark
from pensieve.serve.server.state import CACHE_BYTES, StateFile
from pensieve.serve.systems import threaded_system
from pensieve.serve.tokenizer import ByteTokenizer
from tests.baselines.systems import threaded


def test_what_is_held_follows_what_is_kept() -> None:
    before = memory.held()
    kept: Any = [float(number) for number in range(200_000)], bytearray(20_000_000)
    held = memory.held()
    assert held.blocks - before.blocks > 190_000
    if held.malloc_bytes is not None and before.malloc_bytes is not None:
        assert held.malloc_bytes - before.malloc_bytes > 20_000_000
    del kept
    after = memory.held()
    assert after.blocks - before.blocks < 10_000
    if after.malloc_bytes is not None and before.malloc_bytes is not None:
        assert after.malloc_bytes - before.malloc_bytes < 5_000_000


def test_what_is_there_when_the_server_is_warm_is_left_to_itself() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    try:
        memory.settle()
        assert gc.get_freeze_count() > 10_000
        assert not any(one is cycle for one in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.freeze()  # as tests/conftest.py leaves it for all tests


def test_the_tokens_of_a_tenant_are_counted_as_they_come_and_go() -> None:
    rng, now = random.Random(0), iter(range(10**6))
    conversations = Conversations(lambda _: None, now=lambda: float(next(now)))
    conversations.limit(10**6, 4_000, None)
    record, refused = TurnRecord("s", 1), 0
    for _ in range(600):
        tenant = rng.choice("ab")
        mine = conversations.of(tenant)
        try:
            one = conversations.open(tenant) if not mine or rng.random() < 0.4 else rng.choice(mine)
            if one.marks and rng.random() < 0.2:
                one = conversations.fork(one, rng.randrange(len(one.tokens)))
        except TooManySessions:
            refused += 1
            continue
        if rng.random() < 0.2:
            conversations.remove(one)
        else:
            tokens = array("i", rng.choices(range(3), k=rng.randrange(1, 300)))
            conversations.settle(one, tokens, Mark(len(tokens), record, 0))
        for name in "ab":
            held = sum(len(each.tokens) for each in conversations.of(name))
            assert conversations._tokens[name] == held
    assert refused == 0, "the one idle longest makes room"
    assert max(len(conversations.of(name)) for name in "ab") < 60, "so there never were many"


@pytest.mark.parametrize("streamed", [True, False])
def test_the_engine_makes_way_once_for_a_first_token_that_somebody_passes_on(
    streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_way: list[float] = []
    monkeypatch.setattr(threaded_system.time, "sleep", made_way.append)
    system, _ = threaded()
    with Server(system, ByteTokenizer()) as server:
        asked: dict[str, Any] = {"max_new_tokens": 9, "ignore_eos": True}
        if streamed:
            assert server.stream("s", [1, 2, 3], **asked).result().turn.output_tokens == 9
        else:
            server.generate("s", [1, 2, 3], **asked)
    assert made_way.count(threaded_system._HANDOVER_S) == streamed


def arenas(capfd: pytest.CaptureFixture[str]) -> int:
    """Pieces of memory that Python's own allocator has from the system."""
    capfd.readouterr()
    sys._debugmallocstats()
    found = re.search(r"arenas allocated current *= *([\d,]+)", capfd.readouterr().err)
    assert found
    return int(found[1].replace(",", ""))


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="another allocator")
def test_what_as_many_turns_as_there_may_be_hold_is_taken_in_advance_and_kept(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def crowd() -> int:
        """How many pieces more there are while so many turns hold what they may."""
        before = arenas(capfd)
        held = [bytes(100) for _ in range(turns * memory.SMALL_BYTES // 2 // sys.getsizeof(bytes(100)))]
        more = arenas(capfd) - before
        assert held
        return more

    turns, before = 512, arenas(capfd)
    reserve = memory.Reserve(turns)
    there = arenas(capfd)
    assert there - before > turns * memory.SMALL_BYTES / 2**20 / 4, "in part there is room in what was there before"
    assert [crowd(), crowd()] == [0, 0]
    assert arenas(capfd) == there, "and it stays"
    del reserve
    assert arenas(capfd) < there, "it was held by nothing else"


def test_a_reserve_has_a_limit_whatever_the_queue_s() -> None:
    before = memory.held().blocks
    reserve = memory.Reserve(10**9)
    assert memory.held().blocks - before < 1_000
    del reserve


@pytest.mark.parametrize(
    ("shares", "trims_at"),
    [
        ([1, 3, 4], []),
        ([20, 20, 24, 23], [0]),  # all of 20 stays free, without its pages
        ([20, 25, 25, 29, 30], [0, 1, 4]),
        ([20, 3, 24, 25], [0, 3]),
        ([None, None], [0, 1]),  # it does not say
    ],
)
def test_pages_are_given_back_where_much_more_is_free_than_after_the_last_time(
    shares: list[int | None], trims_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """shares: of the reserve, free in the heap at each call. A trim changes none of it."""
    reserve, trims = memory.Reserve(64), []
    for at, share in enumerate(shares):
        told = None if share is None else memory._Mallinfo(fordblks=share * 64 * memory.LARGE_BYTES)
        monkeypatch.setattr(memory, "_mallinfo", lambda told=told: told)
        monkeypatch.setattr(memory, "_C", SimpleNamespace(malloc_trim=lambda _, at=at: trims.append(at)))
        reserve.give_back()
    assert trims == trims_at


def test_a_library_that_cannot_give_back_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = memory.Reserve(64)
    for library in (None, SimpleNamespace()):
        monkeypatch.setattr(memory, "_C", library)
        reserve.give_back()
        memory.one_heap()
        assert memory.held().malloc_bytes is None


@pytest.mark.skipif(not hasattr(memory._C, "mallinfo2"), reason="another C library")
def test_a_heap_with_much_free_in_it_is_trimmed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the C library's own numbers: after a trim they say that as much is free as before."""
    trims: list[int] = []

    def trim(pad: int) -> None:
        trims.append(pad)
        memory._library().malloc_trim(pad)  # type: ignore[union-attr]

    reserve = memory.Reserve(64)
    held = [bytes(100_000) for _ in range(200)]
    del held[::2]  # so that they are not the end of the heap, which is given back by itself
    free = memory._mallinfo()
    assert free is not None and free.fordblks > 2 * memory._ROOM * 64 * memory.LARGE_BYTES
    monkeypatch.setattr(memory, "_C", SimpleNamespace(malloc_trim=trim, mallinfo2=memory._C.mallinfo2))
    for _ in range(3):
        reserve.give_back()
    assert len(trims) == 1 and held


@pytest.mark.skipif(not hasattr(memory._C, "mallinfo2"), reason="another C library")
def test_what_the_file_of_conversations_comes_to_hold_is_what_is_reserved_for_it(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "serve.db", "m")
    run = file._database.execute
    run("INSERT INTO conversation VALUES (1, 'm', '', 'a', 'a', 1, 0, 0, NULL, NULL, 0, 0, 0)")

    def fill(pages: int) -> int:
        for _ in range(pages // 100):
            run("BEGIN")
            for _ in range(100):
                run("INSERT INTO piece VALUES (NULL, 1, 0, ?)", (bytes(3_800),))
            run("COMMIT")
        gc.collect()
        return memory.held().malloc_bytes or 0

    before = fill(100)
    full = fill(700)
    assert 0.6 * CACHE_BYTES < full - before < CACHE_BYTES
    assert abs(fill(400) - full) < 0.1 * CACHE_BYTES, "no more than that"
    file.close()


_HEAPS = """
import ctypes, sys, threading
from pensieve.serve.server import memory
if "one" in sys.argv:
    memory.one_heap()
def free():
    return memory._mallinfo().fordblks
before = free()
reserve = memory.Reserve(256) if "one" in sys.argv else None
libc, there, kept = memory._C, threading.Barrier(5), []
def fill():
    kept.extend(bytes(4000) for _ in range(100))
    there.wait()
    there.wait()
taken = memory._mallinfo().arena, free() - before
for _ in range(4):
    threading.Thread(target=fill).start()
there.wait()
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
print(taken[1] // 256, memory._mallinfo().arena - taken[0], flush=True)
there.wait()
"""


@pytest.mark.skipif(not hasattr(memory._C, "mallinfo2"), reason="another C library")
def test_all_threads_share_one_heap_and_what_is_reserved_of_it() -> None:
    def run(*how: str) -> tuple[int, int, int]:
        command = [sys.executable, "-c", _HEAPS, *how]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        reserved, more = told.rsplit("\n", 2)[1].split()
        return told.count("<heap nr="), int(reserved), int(more)

    heaps, reserved, more = run("one")
    assert heaps == 1
    assert reserved > 0.9 * memory.LARGE_BYTES
    assert more == 0, "four threads that hold 1.6 MB together"
    heaps, _, more = run()
    assert heaps > 1
    assert more > 1_000_000
