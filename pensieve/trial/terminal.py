"""The edge to the user: every error one sentence on stderr and a non-zero exit, Ctrl-C one line and 130."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from pensieve.compose.explain import explain
from pensieve.errors import PensieveError
from pensieve.trial.ending import settle
from pensieve.trial.interrupt import remember_interrupts

INTERRUPTED = 130
LOG_WIDTH = 120
FULL_TRACE = os.environ.get("HYDRA_FULL_ERROR", "") == "1"  # as the user set it, before `guarded` does


def say(text: str) -> None:
    """A line for people; results go to stdout, everything else here."""
    print(text, file=sys.stderr, flush=True)


def console() -> Console:
    """stdout; a table in a file or a pipe is not folded at 80 columns."""
    return _Console() if sys.stdout.isatty() else _Console(width=LOG_WIDTH)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process with status 1, whatever the sweep that it shows came to."""
        unheard()


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
        _run(app)
    except SystemExit as left:
        settle("interrupted" if left.code == INTERRUPTED else "failed")
        raise


def _run(app: Callable[[], object]) -> None:
    """Every way in which it ends becomes SystemExit, but for a bug's."""
    try:
        app()
    except KeyboardInterrupt:
        say("Interrupted.")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        leave_quietly()
    except BrokenExecutor:  # what joblib raises, too
        say(
            "A process of the launcher was killed, most likely because memory ran out; run the same command again: it "
            "runs what is missing."
        )
        sys.exit(1)
    except (PensieveError, HydraException, OmegaConfBaseException, OSError) as error:
        say(explain(error, sys.argv[1:]))
        sys.exit(1)
    except Exception:
        settle("failed")
        raise


def unheard() -> None:
    """Nobody reads stdout any more (`... | head`): what follows goes nowhere, without a complaint even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave_quietly() -> NoReturn:
    """Somebody read enough; nothing is wrong."""
    unheard()
    sys.exit(0)


def _stands_alone(argument: str) -> bool:
    """A flag that takes no next argument. They go to the front, since argparse wants all overrides in one piece."""
    return argument in ("-m", "--multirun") or (argument.startswith("--") and "=" in argument)
