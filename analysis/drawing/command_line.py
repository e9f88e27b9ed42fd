"""The command line that every figure shares, and what makes a module of analysis/ a figure."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.drawing import style
from analysis.drawing.publish import Drawing
from analysis.drawing.source import Source, open_source
from pensieve.errors import MissingSeries, PensieveError, ResultsError
from pensieve.results.store import ResultsStore, open_store


@dataclass(frozen=True, slots=True)
class Figure:
    """name: of its files. shows: a clause. command: makes a sweep that it can be drawn from.

    applies: whether the sweep is one of those. draw(source, folder): writes a drawing a panel; raises MissingSeries and
    MixedPanel.
    """

    name: str
    shows: str
    command: str
    applies: Callable[[Source], bool]
    draw: Callable[[Source, Path], list[Drawing]]

    def missing(self, source: Source) -> str:
        return f"{self.name} needs other trials than sweep {source.sweep.id} has; run `{self.command}`."


def main(figure: Figure, argv: Sequence[str] | None = None) -> int:
    """Draw one figure as its script is asked to; returns the exit status."""
    options = parser(f"{figure.name}: {figure.shows}. Made by: {figure.command}").parse_args(argv)

    def draw(source: Source, folder: Path) -> None:
        if not figure.applies(source):
            raise MissingSeries(figure.missing(source))
        show(figure.draw(source, folder))

    return guarded(options, draw)


def parser(description: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--sweep", type=int, help="id of the sweep to draw (default: the latest)")
    found.add_argument("--baselines", help="draw only these, separated by commas (default: all of the sweep)")
    found.add_argument("--url-env", help="environment variable that holds the URL of another results database")
    found.add_argument("--to", type=Path, help="folder to write to (default: figures/ in the outputs folder)")
    found.add_argument(
        "--allow-mixed", action="store_true",
        help="draw simulated and real, contended, differently weighted or differently coded trials in one panel; it says so",
    )  # fmt: skip
    return found


def guarded(options: argparse.Namespace, draw: Callable[[Source, Path], None]) -> int:
    """Run `draw` on the sweep and folder that the options name; an error is one sentence and status 1."""
    folder = options.to or style.outputs_folder() / "figures"
    try:
        draw(chosen_source(chosen_store(options), options, options.sweep), folder)
    except PensieveError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the paths has seen enough; nothing more may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"{folder} cannot be written: {error.strerror or error}; set PENSIEVE_OUTPUTS.", file=sys.stderr)
        return 1
    return 0


def chosen_store(options: argparse.Namespace) -> ResultsStore:
    return open_store(style.outputs_folder(), _url(options.url_env), create=False)


def chosen_source(store: ResultsStore, options: argparse.Namespace, sweep_id: int | None) -> Source:
    wanted = [name.strip() for name in options.baselines.split(",")] if options.baselines else []
    return open_source(store, sweep_id, wanted, options.allow_mixed)


def show(drawings: Sequence[Drawing]) -> None:
    for drawing in drawings:
        for path in drawing.paths:
            print(path)


def _url(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ResultsError(f"The environment variable {variable} is not set; put the database's URL into it.")
    return os.environ[variable]
