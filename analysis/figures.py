"""Draw the figures that a sweep supports, or those that are named: python analysis/figures.py [NAME ...] [--sweep ID]"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from analysis import registry
from analysis.registry import Drawing, Figure
from analysis.sweep import Source, open_source
from pensieve.errors import PensieveError
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.results.store import LATEST, figures_folder, recorded_store
from pensieve.units import grid

_WIDTH = 120  # of a terminal that does not say


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    unknown = [name for name in options.names if name not in registry.FIGURES]
    if unknown:
        print(f"There is no figure {', '.join(unknown)}; there are {', '.join(registry.FIGURES)}.", file=sys.stderr)
        return 2
    problems: list[str] = []
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH

    def draw() -> None:
        source = chosen_source(options)
        named = [registry.FIGURES[name] for name in options.names]
        drawings, failed = draw_all(source, _folder_of(options, source.sweep.id), named)
        problems.extend(failed)
        for one in drawings:
            if named and one.table is not None:
                console.print(grid(one.table, " · ".join(filter(None, [one.title, one.panel.text])), fold=True))
                console.print(one.caption, markup=False)
            print(*one.files.values(), sep="\n")
        others = sum(not (figure.asked or figure.holds(source)) for figure in registry.FIGURES.values())
        if others and not named:
            print(f"{others} figures need other experiments (--help names them).", file=sys.stderr)
        if not drawings and not failed:
            print(f"Sweep {source.sweep.id} supports no figure; `{source.command}` completes it.", file=sys.stderr)

    status = guarded(draw)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else status


def draw_all(source: Source, folder: Path, named: Sequence[Figure] = ()) -> tuple[list[Drawing], list[str]]:
    """The drawings of the figures that apply to the sweep, or of those named, and a sentence for each that could not be drawn
    (a series is missing, trials must not be mixed, or the figure has a fault)."""
    drawings: list[Drawing] = []
    problems = []
    applying = [figure for figure in registry.FIGURES.values() if not figure.asked and figure.holds(source)]
    for figure in named or [figure for figure in applying if figure.alone] or applying:
        try:
            drawings += figure.draw(source, folder)
        except PensieveError as error:
            problems.append(f"{figure.name}: {error}")
        except OSError:
            raise
        except Exception as error:  # a fault of one figure must not cost the others
            where = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            problems.append(f"{figure.name}: the figure has a fault, please report it: {fault}")
    return drawings, problems


def _folder_of(options: argparse.Namespace, sweep_id: int) -> Path:
    """A folder a sweep, to which `latest` then points; --to names another."""
    if options.to is not None:
        return Path(options.to)
    folder = figures_folder(outputs_folder(), sweep_id)
    folder.mkdir(parents=True, exist_ok=True)
    link, new = folder.with_name(LATEST), folder.with_name(f".{LATEST}-{os.getpid()}")
    with suppress(OSError):  # a disk without links has the folders all the same
        new.symlink_to(folder.name, target_is_directory=True)
        new.replace(link)
    return folder


# The part of the command line that figures and reports share


def source_options(description: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--sweep", type=int, help="id of the sweep (default: the latest)")
    found.add_argument("--url-env", help="environment variable that holds the URL of another results database")
    found.add_argument(
        "--allow-mixed", action="store_true",
        help="draw trials of several kinds (simulated and real, contended, other weights or code) in one panel; it says so",
    )  # fmt: skip
    found.set_defaults(baselines=None, also=[])
    return found


def guarded(draw: Callable[[], None]) -> int:
    """Run `draw`; an error is one sentence and status 1."""
    try:
        draw()
    except PensieveError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the paths has seen enough; nothing more may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"It cannot be written: {error}; set PENSIEVE_OUTPUTS, or --to.", file=sys.stderr)
        return 1
    return 0


def chosen_source(options: argparse.Namespace) -> Source:
    wanted = [name.strip() for name in options.baselines.split(",")] if options.baselines else []
    store = recorded_store(outputs_folder(), options.url_env)
    return open_source(store, options.sweep, wanted, options.allow_mixed, options.also)


def _parser() -> argparse.ArgumentParser:
    shown = "\n".join(
        f"  {figure.name:20} {figure.shows}\n{'':23}{figure.command}" for figure in registry.FIGURES.values()
    )
    found = source_options(f"Draw the figures of a sweep: all that it supports, or those that are named.\n\n{shown}")
    found.add_argument(
        "names", nargs="*", metavar="NAME", help="figures to draw (default: all that the sweep supports)"
    )
    found.add_argument("--baselines", help="draw only these, separated by commas (default: all of the sweep)")
    found.add_argument(
        "--also", type=int, action="append", metavar="ID",
        help="further sweeps of the same overlay, read as one with it: each system at loads of its own",
    )  # fmt: skip
    found.add_argument("--to", type=Path, help="folder to write to (default: figures/sweep-ID in the outputs folder)")
    return found


if __name__ == "__main__":
    sys.exit(main())
