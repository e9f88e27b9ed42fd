"""While a trial runs: its heartbeat, its deadline, its end when the process that started it is gone, its device's lock."""

from __future__ import annotations

import functools
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from pensieve.errors import HardwareMissing, ResultsError, TrialTimeout
from pensieve.lab.compose.machine import Device
from pensieve.lab.results.environment import Owner, is_alive, this_process
from pensieve.lab.results.store import ResultsStore

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
