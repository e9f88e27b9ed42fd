"""Output and exit status: every error is one sentence on stderr and a non-zero status, Ctrl-C one line and 130; and how far a
trial is.

Python raises KeyboardInterrupt wherever the program happens to be, and inside a weak reference's callback (SQLAlchemy has
many) it is printed and dropped. So the handler also sets a flag, which the trial asks for at safe points.
"""

import logging
import os
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pensieve.lab.compose.conf import as_meant

INTERRUPTED = 130
LOG_WIDTH = 120
LINE_INTERVAL_S = 30.0
KILLED = (
    "A process of the sweep was killed, most likely because memory ran out; run the same command again: it runs what is "
    "missing."
)
_pressed = False  # Ctrl-C, since somebody asked
_ending = False

FULL_TRACE = os.environ.get("HYDRA_FULL_ERROR", "") == "1"  # as the user set it, before `guarded` does


def command_line() -> str:
    """The command as it was typed: `python runners/run.py ...`, or `pensieve run ...`."""
    program = sys.argv[0]
    typed = program.split() if program.startswith("pensieve ") else ["python", program]
    return shlex.join([*typed, *sys.argv[1:]])


def say(text: str) -> None:
    """A line for people; results go to stdout, everything else here."""
    print(text, file=sys.stderr, flush=True)


def console() -> Console:
    """stdout; a table in a file or a pipe is not folded at 80 columns."""
    return _Console() if sys.stdout.isatty() else _Console(width=LOG_WIDTH)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process with status 1, whatever the status of the sweep whose table it prints."""
        discard_output()


def guarded(app: Callable[[], object], config_name: str = "config") -> None:
    """Run a Hydra application of conf/`config_name`.yaml and end the process as described above; HYDRA_FULL_ERROR=1 lets the
    whole trace through.

    Hydra prints several lines and a hint of its own for its errors, unless it is asked to raise them.
    """
    arguments, notes = as_meant(sys.argv[1:], config_name)
    for note in notes:
        say(note)
    if not {"--help", "-h"}.isdisjoint(arguments):
        from pensieve.lab.compose.conf import page

        with in_a_sentence():
            print(page(config_name, [text for text in arguments if not text.startswith("-")]))
        return
    # Flags without a separate value go to the front: argparse wants all overrides in one piece.
    flags = [text for text in arguments if text in ("-m", "--multirun") or (text.startswith("--") and "=" in text)]
    sys.argv[1:] = [*flags, *(text for text in arguments if text not in flags)]
    remember_interrupts()
    if FULL_TRACE:
        app()
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"
    logging.raiseExceptions = False  # a log file on a full disk: its trace would bury the sentence
    with in_a_sentence():
        app()


@contextmanager
def in_a_sentence(hydra_goes_on: bool = False) -> Iterator[None]:
    """Turn every error of the block into SystemExit, except a bug's. It is used inside of Hydra's applications, too: Hydra
    adds lines of its own to an error that passes through it. hydra_goes_on: after an error with a warning alone, as in a
    callback; a bug then ends the process, too."""
    try:
        yield
    except KeyboardInterrupt:
        ends_interrupted()
        say("Interrupted.")
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of stdout has gone (`... | head`), which is no error
        discard_output()
        sys.exit(0)
    except BrokenExecutor:  # what joblib raises, too
        sys.exit(KILLED)
    except Exception as error:
        from pensieve.lab.compose.explain import explain_known

        sentence = None if FULL_TRACE else explain_known(error)
        if sentence is not None:
            say(sentence)
        elif hydra_goes_on:
            traceback.print_exc()
        else:
            raise
        sys.exit(1)


def discard_output() -> None:
    """Nobody reads stdout any more: discard what is still printed, so that Python does not complain, even at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def remember_interrupts() -> None:
    """Install the handler, unless the process was told to ignore Ctrl-C (as a shell's background job is)."""
    global _pressed, _ending
    _pressed = _ending = False  # those of a command before this one, in the same process
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle)


def ends_interrupted() -> None:
    """The command ends by a first Ctrl-C: a second one is raised at a safe point only, where it can be caught."""
    global _pressed, _ending
    _pressed, _ending = False, True


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt, once, for an interrupt that came since and was dropped on its way."""
    global _pressed
    if _pressed:
        _pressed = False
        raise KeyboardInterrupt


def _handle(_signal: int, _frame: FrameType | None) -> None:
    global _pressed
    _pressed = True
    if not _ending:
        raise KeyboardInterrupt


class TrialProgress:
    """A bar of finished turns, where stderr is a terminal; in a log a line now and then. `total` None where nobody knows how
    many there will be.

    tokens/s are those of this machine's wall clock, simulated or not: they say how long the user will wait.
    """

    def __init__(self, title: str, total: int | None, shown: bool = True) -> None:
        self._began = self._told = time.perf_counter()
        self._title, self._of, self._shown = title, f" of {total:,}" if total else "", shown
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("turns  {task.fields[rate]}"),
        )
        bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self._bar = bar if shown and sys.stderr.isatty() else None
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, rate="")

    def update(self, turns: int, tokens: int) -> None:
        """So many turns have finished, and so many output tokens have come, since the trial began."""
        now = time.perf_counter()
        rate = f"{tokens / max(now - self._began, 1e-9):,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=turns, rate=rate)
        elif self._shown and now - self._told >= LINE_INTERVAL_S:
            self._told = now
            say(f"{self._title}: {turns:,}{self._of} turns, {rate}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
