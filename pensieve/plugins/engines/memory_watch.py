"""Keeps the processes of a trial within the memory of a smaller machine: whoever was started last is killed beyond it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import psutil

EVERY_S = 0.05
SHARE = 0.05  # of a core, at most: a reading costs milliseconds of CPU a process, which whoever is measured would miss


def resident_bytes(pid: int) -> int:
    """Physical memory of a process, where what several share counts once for all of them together (PSS; unique memory where
    the system does not say). 0 for one that has ended."""
    try:
        memory = psutil.Process(pid).memory_full_info()
    except psutil.NoSuchProcess:
        return 0
    return int(getattr(memory, "pss", 0) or memory.uss)


class MemoryWatch:
    """Reads, every `every_s`, what the processes have resident together, while the block runs.

    processes: their ids and when each was started. limit_bytes: beyond it `kill` gets the one that was started last; None:
    nothing is killed. Readings take no more than SHARE of a core, and a process may pass the limit between two of them.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        processes: Callable[[], Mapping[int, float]],
        kill: Callable[[int], None] | None = None,
        every_s: float = EVERY_S,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._processes, self._kill, self._every_s = processes, kill, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def exceeded(self) -> bool:
        return self.limit_bytes is not None and self.peak_bytes > self.limit_bytes

    def _watch(self) -> None:
        pause_s = self._every_s
        while not self._stop.wait(pause_s):
            began = time.thread_time()
            self.look()
            pause_s = max(self._every_s, (time.thread_time() - began) / SHARE)

    def look(self) -> None:
        """One reading, and what follows from it."""
        started = dict(self._processes())
        held = sum(resident_bytes(pid) for pid in started)
        self.peak_bytes = max(self.peak_bytes, held)
        if self._kill is not None and self.limit_bytes is not None and held > self.limit_bytes and started:
            self._kill(max(started, key=lambda pid: started[pid]))


def this_process() -> Mapping[int, float]:
    return {os.getpid(): 0.0}


def with_children() -> Mapping[int, float]:
    """This process and all that it has started."""
    found = dict(this_process())
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            found[child.pid] = child.create_time()
    return found


def forbid_more(limit_bytes: int) -> None:
    """This process gets no more private memory than that from the kernel (RLIMIT_DATA): one large allocation fails before
    any watch could see it. Nothing happens where the system has no such limit."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
