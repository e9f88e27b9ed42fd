"""Real trials do not disturb each other: one at a time on a device, whatever the launcher or the outputs folder."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pensieve.compose.machine import Device
from pensieve.errors import HardwareMissing


def lock_file(device: Device) -> Path:
    """One file a device and machine; another user's trial counts too, so it lies in the shared temporary folder."""
    return Path(tempfile.gettempdir()) / f"pensieve-{re.sub(r'[^A-Za-z0-9-]', '-', device.identity)}.lock"


@contextmanager
def device_lock(device: Device, exclusive: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the device while the engine lives; says so once where another trial has it. A simulated one needs no lock."""
    if device.simulated or not exclusive:
        yield
        return
    path = lock_file(device)
    lock = FileLock(path, mode=0o666)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"Waiting for {device.label}: another trial runs on it (trial.exclusive=false would run beside it).")
            lock.acquire()
    except OSError as error:
        raise HardwareMissing(
            f"The lock {path} of {device.label} cannot be taken ({error.strerror}); delete it if nobody else uses the "
            "device, or use trial.exclusive=false."
        ) from error
    try:
        yield
    finally:
        lock.release()
