"""The process that writes to MLflow for this one: started, told lines, listened to, ended.

Importing MLflow takes longer than a simulated trial. So it begins as soon as there is a trial to run, before what runs it is
imported: this module imports nothing that takes time itself.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pensieve
from pensieve.compose.machine import cores
from pensieve.results.mlflow_live import import_line

COMMAND = (sys.executable, "-m", "pensieve.results.mlflow_live")


class Writer:
    """The other process. What it says on stderr is thrown away: the copy made here meets the same error and reports it."""

    def __init__(self) -> None:
        above = str(Path(pensieve.__file__).parents[1])
        path = os.pathsep.join(filter(None, [above, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self._heard = b""  # of the next line

    def send(self, line: str) -> None:
        """Raises OSError where the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def sent(self, line: str) -> bool:
        """Whether the process is there to read it."""
        try:
            self.send(line)
        except OSError:
            return False
        return True

    def answered(self, word: str, within_s: float) -> bool:
        """Wait for this answer; False where it does not come in time, or the process has ended."""
        return self.answer((word,), within_s) is not None

    def answer(self, words: tuple[str, ...], within_s: float) -> str | None:
        """Wait for a line that begins with one of these words, whatever MLflow prints between; None where none comes in
        time, or the process has ended."""
        assert self._process.stdout is not None
        answers, ends = self._process.stdout.fileno(), time.monotonic() + within_s
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                if (said := line.decode(errors="replace")).startswith(words):
                    return said
                continue
            left_s = ends - time.monotonic()
            if left_s <= 0 or not select.select([answers], [], [], left_s)[0]:
                return None
            told = os.read(answers, 4096)
            if not told:
                return None
            self._heard += told

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def start_writer() -> Writer | None:
    """None where MLflow is not installed."""
    return Writer() if find_spec("mlflow") is not None else None


_beside: list[Writer] = []  # none or one


def import_beside() -> Writer | None:
    """Another process that imports MLflow while a trial runs here, where that is sooner. It touches no store until it is told
    to. take_beside gives it to whoever has something to write; else end_beside ends it."""
    if not _beside and _sooner():
        writer = start_writer()
        if writer is not None:
            _beside.append(writer)
            writer.sent(import_line())
    return _beside[0] if _beside else None


def take_beside() -> Writer | None:
    return _beside.pop() if _beside else None


def end_beside() -> None:
    writer = take_beside()
    if writer is not None:
        writer.kill()


def _sooner() -> bool:
    return "mlflow" not in sys.modules and cores() > 1
