"""Sweeps in forked processes of a warm interpreter: a kill -9 test pays no imports, and dies like the real thing."""

import contextlib
import os
import signal
import time

from tests import composed
from tests.typed import typed_process

SHORT = ("hardware=sim_h100", *composed.SHORT)


def start(outputs, *arguments):
    """python runners/run.py ARGUMENTS, in a session of its own; what it prints goes to outputs/said.txt."""
    outputs.mkdir(parents=True, exist_ok=True)
    with (outputs / "said.txt").open("w") as said:
        return typed_process("runners/run.py", *arguments, outputs=outputs, to=(said, said))


def kill(process):
    """kill -9 to the sweep and all it started, as a reboot would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def wait_until(found, timeout_s=60):
    ends = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.01)
