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
from pathlib import Path
from typing import IO

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

    talk: its standard input and output are pipes, `sends` and `receives`; otherwise its output goes to the log too.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, talk: bool = False
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        descriptor = self._log.fileno()
        life, keep = os.pipe()
        self._life: int | None = keep
        guard = [sys.executable, "-I", str(Path(__file__).with_name("guard.py")), str(life)]
        pipe = subprocess.PIPE if talk else None
        try:
            self._process = subprocess.Popen(
                [*guard, *command],
                pass_fds=(life,),
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or descriptor,
                stderr=descriptor,
                env={**os.environ, **QUIET, **(environment or {})},
                start_new_session=True,  # Ctrl-C is for the trial, which then ends its engine
            )
        finally:
            os.close(life)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def sends(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def receives(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

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

    def close(self) -> None:
        """End it and all it started; its log goes too. Safe to call twice."""
        if self._life is not None:
            os.close(self._life)
            self._life = None
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the guard: the kernel then kills the command
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._log.close()


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
