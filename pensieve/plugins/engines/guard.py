"""Runs a command and ends it, with everything it started, as soon as its own parent is gone, also after kill -9.

    python guard.py FD COMMAND [ARGUMENT ...]

FD is the reading end of a pipe whose writing end the parent alone holds: the kernel closes it when the parent ends, in
whatever way. Should the guard itself be killed, Linux kills the command (PR_SET_PDEATHSIG). The exit status is the
command's; of one that a signal ended, SIGNALS and its number, as a shell has it.
This file runs by its path, without the package.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial

WAKE_S = 0.1
GRACE_S = 5.0  # between asking the command to end and killing it
SIGNALS = 128
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _kill_descendants() -> None:
    """Those that the command left behind have become children of this process, a subreaper."""
    import psutil

    for descendant in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            descendant.kill()


def main(life: int, command: list[str]) -> int:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(life, False)
    try:
        child = subprocess.Popen(command, preexec_fn=partial(_prctl, PR_SET_PDEATHSIG, signal.SIGKILL))
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127
    while child.poll() is None:
        readable, _, _ = select.select([life], [], [], WAKE_S)
        if readable:  # its end: nobody ever writes
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
            break
    _kill_descendants()
    code = child.wait()
    return code if code >= 0 else SIGNALS - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
