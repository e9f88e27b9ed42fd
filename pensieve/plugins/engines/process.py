"""An engine in a process of its own: how it is started, waited for and ended, and what its log said last."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pensieve.errors import EngineFailed, RequestFailed
from pensieve.plugins.engines.completions import AnswerBroken

LOG_LINES = 12
POLL_S = 0.05
END_S = 10.0  # the guard's own grace and some

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

    sends: Connection
    receives: Connection

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, talk: bool = False
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        life, keep = os.pipe()
        self._life: int | None = keep
        guard = [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(life)]
        self._talks = talk
        theirs: list[Connection] = []
        ends: list[Any] = [subprocess.DEVNULL, self._log]
        if talk:
            reads, self.sends = Pipe(duplex=False)
            self.receives, writes = Pipe(duplex=False)
            ends = theirs = [reads, writes]
        try:
            self._process = subprocess.Popen(
                [*guard, *command],
                pass_fds=(life,),
                stdin=ends[0],
                stdout=ends[1],
                stderr=self._log,
                env={**os.environ, **QUIET, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for the trial, which then ends its engine
            )
        finally:
            os.close(life)
            for end in theirs:
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

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status; None where it has not ended by then."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def log(self) -> str:
        """All that it has printed; nothing once it is closed."""
        try:
            descriptor = self._log.fileno()
        except ValueError:
            return ""
        said = os.pread(descriptor, os.fstat(descriptor).st_size, 0)  # its position is where the engine writes
        return said.decode("utf-8", errors="replace")

    def last_lines(self) -> str:
        return "\n".join([line for line in self.log().splitlines() if line.strip()][-LOG_LINES:])

    def failed(self, what: str) -> EngineFailed:
        """The error to raise: what went wrong, and what its log said last."""
        said = self.last_lines()
        return EngineFailed(f"{self.name} {what}" + (f"; the last lines of its log:\n{said}" if said else "."))

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Raises EngineFailed where the process ends before it is ready, or is not ready in time; it is then ended."""
        ends = time.monotonic() + timeout_s
        while not ready():
            code = self._process.poll()
            if code is not None:
                error = self.failed(f"ended with status {code} before it was ready")
            elif time.monotonic() > ends:
                error = self.failed(f"was not ready after {timeout_s:g} s (baseline.engine.start_timeout_s)")
            else:
                time.sleep(POLL_S)
                continue
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
        if self._life is not None:
            os.close(self._life)
            self._life = None
        if self.wait(END_S) is None:
            self._process.kill()  # the guard: the kernel then kills the command
            self._process.wait()
        if self._talks:
            self.sends.close()
            self.receives.close()
        self._log.close()


def own_pipes() -> tuple[Connection, Connection]:
    """In a process that talks: what is said to it, and what it says. All that is printed goes to the log."""
    pipes = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    return pipes


@contextmanager
def while_it_serves(process: EngineProcess, reachable: Callable[[], bool]) -> Iterator[None]:
    """An engine's answer that breaks off because the engine ended is told as that, with the last lines of its log; where it
    still answers, the request has failed alone."""
    try:
        yield
    except EngineFailed as error:
        if isinstance(error, AnswerBroken) and reachable():
            raise RequestFailed(str(error)) from error
        if process.alive and not isinstance(error, AnswerBroken):
            raise
        what = "does not answer any more" if process.alive else "ended while it served requests"
        raise process.failed(what) from error
