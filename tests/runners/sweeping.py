"""Sweeps in forked processes of a warm interpreter: a kill -9 test pays no imports, and dies like the real thing."""

import contextlib
import os
import signal
import sys
import time

from hydra.core.global_hydra import GlobalHydra

import runners.run as runner
from pensieve.lab.results import mlflow_store
from tests.typed import FORK, warm_up  # and what a trial imports late

SHORT = ("hardware=sim_h100", "workload.pressure=0", "workload.min_turns=2", "workload.max_turns=2")


def start(outputs, *arguments):
    """python runners/run.py ARGUMENTS, in a session of its own; what it prints goes to outputs/said.txt."""
    warm_up()
    process = FORK.Process(target=_sweep, args=(outputs, arguments))
    process.start()
    return process


def kill(process):
    """kill -9 to the sweep and all it started, as a reboot would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _sweep(outputs, arguments):
    with contextlib.suppress(OSError):
        os.setsid()
    outputs.mkdir(parents=True, exist_ok=True)
    said = os.open(outputs / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    os.environ["PENSIEVE_OUTPUTS"] = str(outputs)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    GlobalHydra.instance().clear()
    mlflow_store.say_not_logged.cache_clear()
    sys.argv = [str(runner.__file__), *arguments]
    status = 0
    try:
        runner.run()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait_until(found, timeout_s=60):
    ends = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.01)
