"""A command as a user types it, in a fork of this warm interpreter: it pays no imports, which take most of a short command.

What only a new process shows (what it imports, where it finds its packages) has tests that start one: test_start_up.py,
runners/test_bare.py and runners/test_command.py.
"""

import atexit
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from contextlib import nullcontext
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TextIO

import pandas  # noqa: F401  from here on: what a short sweep imports late is imported here once
import pyarrow.parquet  # noqa: F401
import scipy.stats  # noqa: F401
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton

import pensieve.core.cache.two_tier
import pensieve.core.policies.retention_value
import pensieve.lab.trial.command
import pensieve.lab.workload.chat
import pensieve.plugins.caches.stateless
import pensieve.serve.systems.profiling
import pensieve.serve.systems.threaded_system
import pensieve.sim.worker  # noqa: F401
from pensieve.lab.results import mlflow_runs
from pensieve.lab.results.environment import environment
from pensieve.lab.results.identity import code_hash
from pensieve.lab.trial import sweep
from tests.composed import composed

CHECKOUT = Path(__file__).resolve().parents[1]
FORK = multiprocessing.get_context("fork")


def typed(script: str, *arguments: str, timeout_s: float = 120.0, **how: Any) -> subprocess.CompletedProcess[str]:
    """`python SCRIPT ARGUMENTS`, to its end; how: as of `typed_process`. Raises AssertionError after `timeout_s`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = typed_process(script, *arguments, to=(out, err), **how)
        process.join(timeout_s)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
        said = [_all_of(file) for file in (out, err)]
        assert process.exitcode is not None and process.exitcode >= 0, (script, arguments, process.exitcode, *said)
        return subprocess.CompletedProcess([script, *arguments], process.exitcode, *said)


def typed_process(
    script: str,
    *arguments: str,
    outputs: Path,
    to: tuple[TextIO, TextIO],
    cwd: Path | None = None,
    figures: bool = False,
    without: tuple[str, ...] = (),
    **variables: str,
) -> ForkProcess:
    """`python SCRIPT ARGUMENTS` in `cwd`, by default the parent of `outputs`; it runs.

    script: relative to the checkout. figures: a sweep draws its figures, which takes it seconds. to: files for stdout and
    stderr. without: packages that this package does not find; it is imported anew for that. variables: of the environment.
    """
    warm_up()
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTEST_CURRENT_TEST", "HYDRA_FULL_ERROR")}
    given = {**kept, "PENSIEVE_OUTPUTS": str(outputs), "HF_HUB_OFFLINE": "1", **variables}
    words, added = [str(CHECKOUT / script), *arguments], variables.get("PYTHONPATH")
    process = FORK.Process(target=_run, args=(words, given, cwd or outputs.parent, added, figures, without, *to))
    process.start()
    return process


@functools.cache
def warm_up() -> None:
    """Read here, once, what every process reads anew: the package's hash, this machine, and the files of conf/."""
    code_hash()
    environment()
    composed()


def _all_of(file: TextIO) -> str:
    file.seek(0)
    return file.read()


def _run(
    words: list[str],
    given: dict[str, str],
    cwd: Path,
    added: str | None,
    figures: bool,
    without: tuple[str, ...],
    out: TextIO,
    err: TextIO,
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new interpreter
    atexit._clear()  # the parent's
    for number, file in ((1, out), (2, err)):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    warnings.resetwarnings()
    for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):  # as by default
        warnings.simplefilter("ignore", hidden)
    warnings.showwarning = _show
    if not figures:
        sweep.drawing = lambda *_: nullcontext(list)
    GlobalHydra.instance().clear()
    mlflow_runs.say_not_logged.cache_clear()
    os.environ.clear()
    os.environ.update(given)
    os.chdir(cwd)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    if added is not None:
        sys.path[1:1] = added.split(os.pathsep)
        Singleton._instances.pop(Plugins, None)  # Hydra looks for its plugins again
    if without:
        for name in [name for name in sys.modules if name.split(".")[0] in ("pensieve", "runners", *without)]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(without))  # None there: not found, whoever asks in which way
    status = _status_of(words[0])
    threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends: threads, what was left for the end, files
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status_of(script: str) -> int:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _show(message, category, filename, lineno, file=None, line=None):  # type: ignore[no-untyped-def]
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))
