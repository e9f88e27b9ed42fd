"""An engine in a process of its own: how it is started, waited for and ended, what its log said last; and how much memory
processes have together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from pensieve.errors import EngineFailed

LOG_LINES = 12
POLL_S = 0.05
END_S = 10.0  # the guard's own grace and some
GONE_S = 1.0
WATCH_S = 0.05
WATCH_SHARE = 0.05  # of a core, at most: a reading takes milliseconds of CPU a process from whoever is measured

QUIET = {
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""No engine tells anybody that it runs, and none asks the hub: the weights are a folder here."""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EngineProcess:
    """A command that lives no longer than this object, nor than the process that made it (guard.py). What it prints goes to
    a log in the temporary folder that has no name, so that nothing of it is left, whoever ends first and however.

    talk: its standard input and output are the connections `sends` and `receives`; otherwise its output goes to the log too.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, talk: bool = False
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        hears, self._life = Pipe(duplex=False)
        reads, self.sends = Pipe(duplex=False)
        self.receives, writes = Pipe(duplex=False)
        ends: tuple[Any, Any] = (reads, writes) if talk else (subprocess.DEVNULL, self._log)
        guard = [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(hears.fileno())]
        try:
            self._process = subprocess.Popen(
                [*guard, *command],
                pass_fds=(hears.fileno(),),
                stdin=ends[0],
                stdout=ends[1],
                stderr=self._log,
                env={**os.environ, **QUIET, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for the trial, which then ends its engine
            )
        finally:
            for end in (hears, reads, writes):
                end.close()

    @classmethod
    def ours(
        cls, name: str, code: str, environment: Mapping[str, str] | None = None, talk: bool = False
    ) -> EngineProcess:
        """Python code that finds this package as this process did."""
        found = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        return cls(name, [sys.executable, "-P", "-c", code], {**found, **(environment or {})}, talk)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status; None where it has not ended by then."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def log(self) -> str:
        """All that it has printed; nothing once it is closed."""
        if self._log.closed:
            return ""
        descriptor = self._log.fileno()
        said = os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # its position is where the engine writes
        return said.decode("utf-8", errors="replace")

    def last_lines(self) -> str:
        return "\n".join([line for line in self.log().splitlines() if line.strip()][-LOG_LINES:])

    def failed(self, what: str) -> EngineFailed:
        """The error to raise: what went wrong, and what its log said last."""
        said = self.last_lines()
        return EngineFailed(f"{self.name} {what}" + (f"; the last lines of its log:\n{said}" if said else "."))

    def gone(self) -> EngineFailed:
        """The error of a request that found nobody there."""
        ended = self.wait(GONE_S) is not None  # its pipes break before the guard knows
        return self.failed("ended while it served requests" if ended else "does not answer any more")

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Raises EngineFailed where the process ends before it is ready, or is not ready in time; it is then ended."""
        ends, why = time.monotonic() + timeout_s, ""
        while not ready():
            if (code := self.wait(POLL_S)) is not None:
                why = f"ended with status {code} before it was ready"
            elif time.monotonic() > ends:
                why = f"was not ready after {timeout_s:g} s (baseline.engine.start_timeout_s)"
            if why:
                error = self.failed(why)
                self.close()
                raise error

    def first_word(self, timeout_s: float) -> Any:
        """What it says once it is ready. Raises EngineFailed as `wait_until` does."""
        self.wait_until(self.receives.poll, timeout_s)
        try:
            return self.receives.recv()
        except EOFError:
            raise self.failed("ended before it was ready") from None

    def close(self) -> None:
        """End it and all it started; its log goes too. Safe to call twice."""
        self._life.close()
        if self.wait(END_S) is None:
            self._process.kill()  # the guard: the kernel then kills the command
            self._process.wait()
        for end in (self.sends, self.receives, self._log):
            end.close()


def own_pipes() -> tuple[Connection, Connection]:
    """In a process that talks: what is said to it, and what it says. All that is printed goes to the log."""
    pipes = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    return pipes


# -- memory -----------------------------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    """Physical memory of a process, where what several share counts once for all of them together (PSS; unique memory where
    the system does not say). 0 for one that has ended."""
    try:
        memory = psutil.Process(pid).memory_full_info()
    except psutil.NoSuchProcess:
        return 0
    return int(getattr(memory, "pss", 0) or memory.uss)


class MemoryWatch:
    """Reads what processes have resident together, while the block runs.

    processes: their ids, in the order in which they were started. limit_bytes: beyond it the last one is killed, if it
    `kills`; None: no limit. killed: their ids. Readings take no more than WATCH_SHARE of a core, and a process may pass the
    limit between two of them.
    """

    def __init__(self, limit_bytes: int | None, processes: Callable[[], Sequence[int]], kills: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.killed: set[int] = set()
        self._processes, self._kills = processes, kills
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def exceeded(self) -> bool:
        return self.limit_bytes is not None and self.peak_bytes > self.limit_bytes

    def _watch(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            began = time.thread_time()
            self.look()
            pause_s = max(WATCH_S, (time.thread_time() - began) / WATCH_SHARE)

    def look(self) -> None:
        """One reading, and what follows from it."""
        pids = [pid for pid in self._processes() if pid not in self.killed]
        held = sum(map(resident_bytes, pids))
        self.peak_bytes = max(self.peak_bytes, held)
        if self._kills and pids and self.limit_bytes is not None and held > self.limit_bytes:
            self.killed.add(pids[-1])
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pids[-1]).kill()


def this_process() -> list[int]:
    return [os.getpid()]


def with_children() -> list[int]:
    """This process and all that it has started."""
    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
