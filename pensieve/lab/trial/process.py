"""The process of a trial: its heartbeat, its deadline, its end when the one that started it is gone, its device's lock; and a
process of its own for a trial: a native crash, or the out-of-memory killer, then costs that one trial.

Trials of a sweep may follow each other in one such process, which keeps the model (pensieve.plugins.device.shelf). A trial
that does not complete ends its process, and the next one gets a new one.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from pensieve.errors import HardwareMissing, PensieveError, ResultsError, TrialCrashed, TrialTimeout
from pensieve.lab.compose.machine import Device
from pensieve.lab.compose.plan import plan_trial
from pensieve.lab.compose.settings import check
from pensieve.lab.results.environment import Owner, is_alive, this_process
from pensieve.lab.results.store import ResultsStore
from pensieve.lab.trial.job import Asked, Job, Outcome, Tracking, identity_of, open_tracking
from pensieve.lab.trial.terminal import INTERRUPTED, raise_if_interrupted, remember_interrupts, say
from pensieve.plugins.device.shelf import open_shelf

HEARTBEAT_S = 15.0  # well below the 60 s after which a silent trial counts as dead
OWNER_CHECK_S = 0.25
ORPHANED = 3  # exit status; nobody is left to read it

log = logging.getLogger(__name__)


@contextmanager
def heartbeat(store: ResultsStore, trial_id: int, interval_s: float = HEARTBEAT_S) -> Iterator[None]:
    """Writes the trial's heartbeat while the block runs. A write that fails is logged, and the next one is tried."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(interval_s):
            try:
                store.heartbeat(trial_id)
            except ResultsError as error:
                log.warning("heartbeat of trial %s: %s", trial_id, error)

    thread = threading.Thread(target=beat, name=f"heartbeat-{trial_id}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@functools.lru_cache(maxsize=8)  # a process that runs many jobs of one sweep watches once
def end_with(owner: Owner) -> None:
    """End this process at once when the owner is gone. An owner on another host, or this process itself, is not watched.

    The trial's row stays `running` with a dead process; the next run then marks it interrupted.
    """
    me = this_process()
    if owner.host == me.host and owner.pid != me.pid:
        threading.Thread(target=_watch, args=(owner,), name=f"orphan-{owner.pid}", daemon=True).start()


def _watch(owner: Owner) -> None:
    pause = threading.Event()
    while not pause.wait(OWNER_CHECK_S):
        now = datetime.now(UTC)
        if not is_alive(owner, now, now):
            log.error("process %s, which started this trial, is gone; the trial ends too", owner.pid)
            os._exit(ORPHANED)  # no thread of ours can stop the others in any other way


class Deadline:
    """Counts from its construction. timeout_s: trial.timeout_s; None: no deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._ends = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def check(self) -> None:
        """Raises TrialTimeout once the time is up."""
        if self.left_s == 0.0:
            raise TrialTimeout(
                f"The trial ran past trial.timeout_s={self._timeout_s:g}; raise it, or ask for less work a trial."
            )


def lock_files(device: Device) -> list[Path]:
    """One file for each device of this machine, in the temporary folder that all users share: their trials count too. Several
    are always taken in this order, so that nobody waits in a circle."""
    identities = sorted((device.identity, *device.others))
    return [Path(tempfile.gettempdir()) / f"pensieve-{re.sub(r'[^A-Za-z0-9-]', '-', one)}.lock" for one in identities]


@contextmanager
def device_lock(device: Device, exclusive: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the device while the block runs; `say` tells once that another trial has it. A simulated one needs no lock."""
    if device.simulated or not exclusive:
        yield
        return
    with ExitStack() as held:
        for path in lock_files(device):
            lock = FileLock(path, mode=0o666)
            try:
                with suppress(Timeout):
                    held.enter_context(lock.acquire(timeout=0))
                    continue
                say(
                    f"Waiting for {device.label}: another trial runs on it (trial.exclusive=false would run beside it)."
                )
                held.enter_context(lock.acquire())
            except OSError as error:
                raise HardwareMissing(
                    f"The lock {path} of {device.label} cannot be taken ({error.strerror}); delete it if nobody else uses "
                    "the device, or use trial.exclusive=false."
                ) from error
        yield


CRASH_FILE = "crash.log"  # in the job's folder: Python's stack, where a native crash left time to write it
LOG_FORM = "[%(asctime)s][%(name)s][%(levelname)s] %(message)s"  # as in conf/hydra/job_logging
GRACE_S = 30.0  # beyond trial.timeout_s, for the imports before it and for a trial that ends itself in time
WAKE_S = 0.25


def run_isolated(
    resolved: Mapping[str, Any], tracking: Tracking, job: Job, timeout_s: float | None, keeps: bool = False
) -> Outcome:
    """One attempt in another process. If that dies, the trial is recorded as failed; Ctrl-C is passed on to it.

    keeps: in the process that completed the trial before this one, if that kept it too, and leave it to the next one; the
    caller ends it by `end_kept`. Otherwise the process is new and ends with the trial, and one that was kept ends before.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    crash = job.folder / CRASH_FILE
    crash.unlink(missing_ok=True)
    if not keeps:
        end_kept()
    apart = _kept.pop() if _kept and _kept[0].process.is_alive() else _start(tracking)
    end_kept()  # one that is dead
    outcome: Outcome | None = None
    late = False
    try:
        apart.pipe.send(Asked(dict(resolved), job))
        outcome, late = _wait(apart.process, apart.pipe, timeout_s)
    except BrokenPipeError:
        apart.process.join()  # it died before it was asked
    except KeyboardInterrupt:
        _interrupt(apart.process)
        raise
    finally:
        if keeps and outcome is not None and outcome.completed:
            _kept.append(apart)
        else:
            _end(apart)
    if outcome is not None:
        return outcome
    return _record_death(apart.process, tracking, crash, timeout_s if late else None)


@dataclass(frozen=True, slots=True)
class _Apart:
    """A process that runs trials, and the pipe to it."""

    process: SpawnProcess
    pipe: Connection


_kept: list[_Apart] = []
"""The process that the next trial may run in, if there is one."""


def _start(tracking: Tracking) -> _Apart:
    spawn = multiprocessing.get_context("spawn")  # a fork would share the parent's CUDA context and threads
    ours, its = spawn.Pipe()
    process = spawn.Process(target=_perform, args=(tracking.outputs, this_process(), its))
    process.start()
    its.close()
    return _Apart(process, ours)


def end_kept() -> None:
    """End the process that was kept for the next trial, if there is one, and with it what it holds."""
    while _kept:
        _end(_kept.pop())


atexit.register(end_kept)  # before multiprocessing waits for it, which has registered itself earlier


def _end(apart: _Apart) -> None:
    if apart.process.is_alive():
        apart.process.kill()
    apart.process.join()
    apart.pipe.close()


def _wait(process: SpawnProcess, receiver: Connection, timeout_s: float | None) -> tuple[Outcome | None, bool]:
    """The outcome, None where the process ended without one; and whether it was killed for being late."""
    ends = None if timeout_s is None else time.monotonic() + timeout_s + GRACE_S
    while not receiver.poll(WAKE_S):
        raise_if_interrupted()
        if ends is not None and time.monotonic() > ends:
            process.kill()
            process.join()
            return None, True
    try:
        outcome: Outcome = receiver.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        return None, False
    return outcome, False


def _interrupt(process: SpawnProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(GRACE_S)
    if process.is_alive():
        log.warning("process %s did not end after Ctrl-C and is killed", process.pid)


def _record_death(process: SpawnProcess, tracking: Tracking, crash: Path, late_s: float | None) -> Outcome:
    """Record the trial of a process that died as failed, with what is known of the reason."""
    code, pid = process.exitcode, process.pid
    assert code is not None and pid is not None
    if late_s is not None:
        sentence = f"The trial ran past trial.timeout_s={late_s:g}, did not stop by itself, and was killed."
    elif code == -signal.SIGKILL:
        sentence = (
            "The trial's process was killed (signal 9), most likely because memory ran out. Use a smaller cache or "
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
    trial_id = tracking.store.close_trial_of(pid, error, stack or None)
    return Outcome(trial_id or 0, "failed", error=error)


@contextmanager
def logged_in(file: Path) -> Iterator[None]:
    """What is logged in this process goes to the file, too."""
    handler = logging.FileHandler(file, delay=True)
    handler.setFormatter(logging.Formatter(LOG_FORM))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


# -- in the process of its own ------------------------------------------------------------------------------------------


def _perform(outputs: Path, parent: Owner, pipe: Connection) -> None:
    """Trials one after another, as they are asked for through `pipe`, until nobody is there to ask for more. The outcome of
    each is sent back, and what it prints goes to stderr. An interrupted one has no outcome."""
    os.setsid()  # Ctrl-C on the terminal reaches it once, through the parent
    os.dup2(2, 1)
    end_with(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even where the shell told our parent to ignore it
    remember_interrupts()
    with open_shelf():
        while (asked := _next(pipe)) is not None:
            with _logs_in(asked.job.folder):
                try:
                    pipe.send(_attempt(asked.config, outputs, asked.job))
                except KeyboardInterrupt:
                    sys.exit(INTERRUPTED)


def _next(pipe: Connection) -> Asked | None:
    try:
        asked: Asked = pipe.recv()
    except (EOFError, ConnectionResetError):
        return None
    return asked


@contextmanager
def _logs_in(folder: Path) -> Iterator[None]:
    """Log as conf/hydra/job_logging does for a trial in the launcher's process. A native crash leaves its stack there."""
    file, console = logging.FileHandler(folder / "isolated.log", delay=True), logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    logging.basicConfig(level=logging.INFO, format=LOG_FORM, handlers=[file, console], force=True)
    with (folder / CRASH_FILE).open("w", encoding="utf-8") as crash:
        faulthandler.enable(crash)
        try:
            yield
        finally:
            faulthandler.disable()
    (folder / CRASH_FILE).unlink(missing_ok=True)


def _attempt(resolved: dict[str, Any], outputs: Path, job: Job) -> Outcome:
    from pensieve.lab.trial.run import Attempt  # which starts isolated trials, and so imports this module

    try:
        config = check(resolved)
        tracking, plan = open_tracking(config, outputs), plan_trial(config)
        identity = identity_of(plan, resolved, job.reproduces)
        return Attempt(plan, identity, resolved, tracking, job, say).run()
    except PensieveError as error:
        return Outcome(0, "failed", error=str(error))
