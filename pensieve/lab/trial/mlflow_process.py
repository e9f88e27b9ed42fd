"""The process that writes to MLflow for this one: started, told lines, listened to, ended."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pensieve

COMMAND = (sys.executable, "-m", "pensieve.lab.results.mlflow_live")


def _environment() -> dict[str, str]:
    above = str(Path(pensieve.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [above, os.environ.get("PYTHONPATH")]))}


class Writer:
    """The other process. What it says on stderr is thrown away: the trial's copy meets the same error and reports it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
        )
        self._heard = b""  # of the next line

    def send(self, line: str) -> None:
        """Raises OSError where the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()

    def answered(self, word: str, within_s: float) -> bool:
        """Wait for this line, whatever MLflow prints between; False where it does not come in time, or the process has
        ended."""
        assert self._process.stdout is not None
        answers, ends = self._process.stdout.fileno(), time.monotonic() + within_s
        while True:
            line, newline, rest = self._heard.partition(b"\n")
            if newline:
                self._heard = rest
                if line.decode(errors="replace") == word:
                    return True
                continue
            left_s = ends - time.monotonic()
            if left_s <= 0 or not select.select([answers], [], [], left_s)[0]:
                return False
            told = os.read(answers, 4096)
            if not told:
                return False
            self._heard += told

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def start_writer() -> Writer | None:
    """None where MLflow is not installed."""
    return Writer() if find_spec("mlflow") is not None else None
