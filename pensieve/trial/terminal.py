"""The edge to the user: every error one sentence on stderr and a non-zero exit, Ctrl-C one line and 130."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from pensieve.compose.explain import explain
from pensieve.errors import PensieveError
from pensieve.trial.interrupt import remember_interrupts

INTERRUPTED = 130
LOG_WIDTH = 120
FULL_TRACE = os.environ.get("HYDRA_FULL_ERROR", "") == "1"  # as the user set it, before `guarded` does


def say(text: str) -> None:
    """A line for people; results go to stdout, everything else here."""
    print(text, file=sys.stderr, flush=True)


def console() -> Console:
    """stdout; a table in a file or a pipe is not folded at 80 columns."""
    return Console() if sys.stdout.isatty() else Console(width=LOG_WIDTH)


def guarded(app: Callable[[], object]) -> None:
    """Run a Hydra application and end the process as described above; HYDRA_FULL_ERROR=1 lets the whole trace through.

    Hydra prints several lines and a hint of its own for its errors, unless it is asked to raise them.
    """
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda text: not _stands_alone(text))
    remember_interrupts()
    if FULL_TRACE:
        app()
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        app()
    except KeyboardInterrupt:
        say("Interrupted.")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # somebody read enough: `... --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (PensieveError, HydraException, OmegaConfBaseException, OSError) as error:
        say(explain(error, sys.argv[1:]))
        sys.exit(1)


def _stands_alone(argument: str) -> bool:
    """A flag that takes no next argument. They go to the front, since argparse wants all overrides in one piece."""
    return argument in ("-m", "--multirun") or (argument.startswith("--") and "=" in argument)
