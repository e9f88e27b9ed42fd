"""A trial in a process of its own: a native crash, or the kernel's out-of-memory killer, costs that one trial.

This side starts the process, waits, and records how it died where it could not do so itself; the other side is
trial.isolated. What goes over is one line of JSON on stdin, what comes back one line on stdout.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pensieve.errors import TrialCrashed
from pensieve.results.process import this_process
from pensieve.trial.interrupt import raise_if_interrupted
from pensieve.trial.outcome import Outcome
from pensieve.trial.task import Job
from pensieve.trial.tracking import Tracking

MODULE = "pensieve.trial.isolated"
CRASH_FILE = "crash.log"  # in the job's folder: Python's stack, where a native crash left time to write it
GRACE_S = 30.0  # beyond trial.timeout_s, for the imports before it and for a trial that ends itself in time
WAKE_S = 0.25
PACKAGE_PARENT = Path(__file__).resolve().parents[2]

log = logging.getLogger(__name__)


def run_isolated(resolved: Mapping[str, Any], tracking: Tracking, job: Job, timeout_s: float | None) -> Outcome:
    """One attempt in a process of its own. A process that dies leaves a failed trial; Ctrl-C is handed on to it."""
    asked = {
        "config": dict(resolved),
        "outputs": str(tracking.outputs),
        "mlflow": tracking.mlflow,
        "job": {**asdict(job), "folder": str(job.folder)},
        "parent": {**asdict(this_process()), "process_started_at": this_process().process_started_at.isoformat()},
    }
    job.folder.mkdir(parents=True, exist_ok=True)
    crash = job.folder / CRASH_FILE
    crash.unlink(missing_ok=True)
    found = [path for path in (str(PACKAGE_PARENT), *sys.path) if path]
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(found))},
        start_new_session=True,  # Ctrl-C on the terminal reaches it once, through us
    )
    try:
        answer, late = _wait(process, json.dumps(asked).encode() + b"\n", timeout_s)
    except KeyboardInterrupt:
        _interrupt(process)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if answer.strip() and not late:
        return Outcome(**json.loads(answer))
    return _buried(process, tracking, crash, timeout_s if late else None)


def _wait(process: subprocess.Popen[bytes], asked: bytes, timeout_s: float | None) -> tuple[bytes, bool]:
    """The answer, and whether the process was killed for being late."""
    ends = None if timeout_s is None else time.monotonic() + timeout_s + GRACE_S
    waiting: bytes | None = asked
    while True:
        try:
            return process.communicate(waiting, timeout=WAKE_S)[0], False
        except subprocess.TimeoutExpired:
            waiting = None  # communicate remembers what it has not written yet
            raise_if_interrupted()
            if ends is not None and time.monotonic() > ends:
                process.kill()
                return process.communicate()[0], True


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        log.warning("process %s did not end after Ctrl-C and is killed", process.pid)


def _buried(process: subprocess.Popen[bytes], tracking: Tracking, crash: Path, late_s: float | None) -> Outcome:
    """Record for a process that could not: its trial failed, with what is known of the reason."""
    code = process.returncode
    if late_s is not None:
        sentence = f"The trial ran past trial.timeout_s={late_s:g}, did not stop by itself, and was killed."
    elif code == -signal.SIGKILL:
        sentence = (
            "The trial's process was killed (signal 9), most likely because memory ran out; use a smaller cache or "
            "model, or run the same command again if you ended it yourself."
        )
    elif code < 0:
        sentence = (
            f"The trial's process crashed with {signal.Signals(-code).name}; its stack is in the trial's traceback."
        )
    else:
        sentence = f"The trial's process ended with status {code} and said nothing; see the log in {crash.parent}."
    error = str(TrialCrashed(sentence))
    stack = crash.read_text(encoding="utf-8", errors="replace") if crash.is_file() else ""
    trial_id = tracking.store.close_trial_of(process.pid, error, stack or None)
    return Outcome(trial_id or 0, "failed", error=error)
