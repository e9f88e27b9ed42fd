"""The process that runs a trial, and whether it is still alive."""

from __future__ import annotations

import functools
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psutil

HEARTBEAT_LIMIT = timedelta(seconds=60)
START_TOLERANCE = timedelta(seconds=2)  # the start time is derived from the boot time, which is known to a tick only


@dataclass(frozen=True, slots=True)
class Owner:
    """A process by host, pid and start time: the system gives a pid to another process later."""

    host: str
    pid: int
    process_started_at: datetime


def this_process() -> Owner:
    return _owner(os.getpid())


@functools.lru_cache(maxsize=2)  # by pid, so that a forked child does not pass for its parent
def _owner(pid: int) -> Owner:
    return Owner(socket.gethostname(), pid, datetime.fromtimestamp(psutil.Process(pid).create_time(), UTC))


def is_alive(owner: Owner, heartbeat_at: datetime, now: datetime) -> bool:
    """Whether the process runs: checked by pid and start time on this host, elsewhere by a heartbeat of the last 60 s."""
    if owner.host != socket.gethostname():
        return now - heartbeat_at <= HEARTBEAT_LIMIT
    try:
        process = psutil.Process(owner.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        started_at = datetime.fromtimestamp(process.create_time(), UTC)
    except psutil.NoSuchProcess:
        return False
    return abs(started_at - owner.process_started_at) <= START_TOLERANCE
