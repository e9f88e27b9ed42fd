"""Whoever was started last is killed when the processes have more than the limit together."""

from __future__ import annotations

import mmap
import os
import subprocess

import pytest

from pensieve.plugins.engines import memory_watch
from pensieve.plugins.engines.memory_watch import MemoryWatch, resident_bytes, this_process, with_children


def watched(monkeypatch: pytest.MonkeyPatch, limit: int | None, held: dict[int, int]) -> tuple[MemoryWatch, list[int]]:
    """Processes 1, 2, 3, ... were started in that order; a killed one holds nothing from then on."""
    monkeypatch.setattr(memory_watch, "resident_bytes", lambda pid: held[pid])
    killed: list[int] = []
    return MemoryWatch(limit, lambda: {pid: float(pid) for pid in held if pid not in killed}, killed.append), killed


def test_the_newest_is_killed_and_only_as_many_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, killed = watched(monkeypatch, 100, {1: 40, 3: 50, 2: 40})
    watch.look()
    assert killed == [3] and watch.peak_bytes == 130 and watch.exceeded
    watch.look()
    assert killed == [3], "80 are left, within the limit"


@pytest.mark.parametrize("limit", [100, None])
def test_nobody_is_killed_at_the_limit_or_without_one(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    watch, killed = watched(monkeypatch, limit, {1: 50, 2: 50})
    watch.look()
    assert not killed and not watch.exceeded and watch.peak_bytes == 100


def test_memory_that_is_touched_counts_and_memory_that_is_only_promised_does_not() -> None:
    size = 64 * 2**20
    before = resident_bytes(os.getpid())
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as promised:
        assert resident_bytes(os.getpid()) - before < size / 2
        for page in range(0, size, mmap.PAGESIZE):
            promised[page] = 1
        assert resident_bytes(os.getpid()) - before > 0.9 * size
    assert resident_bytes(2**22 + 1) == 0, "a process that is gone"


def test_what_this_process_has_started_counts_with_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert {os.getpid(), child.pid} <= set(with_children())
            assert set(this_process()) == {os.getpid()}
        finally:
            child.kill()


def test_a_watch_of_this_process_reads_while_the_block_runs() -> None:
    with MemoryWatch(1, this_process, every_s=0.001) as watch:
        while not watch.peak_bytes:
            pass
    assert watch.exceeded, "nothing was killed: no killer was given"
