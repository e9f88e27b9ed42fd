"""Our own figures as a page, each with its question, command, data, machine and date: python analysis/gallery.py

Reads the results database and analysis/gallery.yaml, and writes docs/results/gallery.md with its pictures. A sweep is found
by its command.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from PIL import Image

import analysis.figures  # noqa: F401  registers them
from analysis import registry
from analysis.page.contents import environment
from analysis.provenance import ranges
from analysis.sweep import Source, open_source
from pensieve.errors import MissingSeries, PensieveError
from pensieve.lab.compose.conf import outputs_folder
from pensieve.lab.results.store import ResultsStore, open_store
from pensieve.lab.results.sweep_table import sweep_table

ENTRIES = Path(__file__).with_name("gallery.yaml")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "gallery.md"
HEAD = """# Gallery

`python analysis/gallery.py` draws this page from the sweeps of `outputs/results.db`. Each table has the command of its sweep.
Notes qualify the numbers; `python runners/results.py notes` explains those of the latest sweep.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """name: of its files. command: as the sweep recorded it. figures: names of the registry."""

    name: str
    question: str
    command: str
    figures: Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    page: Path = options.to
    entries = [Entry(**entry) for entry in yaml.safe_load(options.entries.read_text(encoding="utf-8"))]
    try:
        store = open_store(outputs_folder(), create=False)
        found = [(entry, recorded(store, entry.command)) for entry in entries]  # all, before any is drawn
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work) / page.stem
            lines = [line for entry, source in found for line in section(entry, source, folder)]
            shutil.rmtree(page.with_suffix(""), ignore_errors=True)
            shutil.copytree(folder, page.with_suffix(""))
        page.write_text("\n".join([HEAD, *lines]), encoding="utf-8")
        print(page)
    except PensieveError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def recorded(store: ResultsStore, command: str) -> Source:
    """The newest completed sweep of this command. Raises MissingSeries where there is none."""
    for sweep in store.answering_sweeps():
        asked = (sweep.command or "").removesuffix(" force=true")  # the same trials, run again
        if (asked, sweep.status) == (command, "completed"):
            return open_source(store, sweep.id)
    raise MissingSeries(f"No completed sweep is of this command; run it first: {command}")


def section(entry: Entry, source: Source, folder: Path) -> Iterator[str]:
    """Its lines; pictures, captions and data go to `folder`, which lies beside the page.

    Raises MissingSeries where the sweep does not support a figure.
    """
    yield from (f"## {entry.question}", "", *facts(entry, source), "")
    for name in entry.figures:
        for drawing in registry.FIGURES[name].draw(source, folder / entry.name):
            assert drawing.png is not None, "a figure of the gallery is a picture"
            for path in (drawing.png, drawing.text, drawing.csv):
                path.rename(folder / f"{entry.name}-{path.name}")
            stem = folder / f"{entry.name}-{drawing.csv.stem}"
            picture = f"{stem}.png"
            Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)  # a third of the bytes
            title, at = ", ".join(filter(None, [drawing.title, drawing.panel.text])), f"{folder.name}/{stem.name}"
            yield from (f"![{title}]({at}.png)", "", f"[What is drawn]({at}.txt), [data]({at}.csv).", "")
    shutil.rmtree(folder / entry.name)


def facts(entry: Entry, source: Source) -> Iterator[str]:
    """The table above the figures."""
    trials = source.trials
    ended = max(trial.finished_at for trial in trials if trial.finished_at is not None)
    seeds, machine = sorted({trial.seed for trial in trials}), environment(trials)
    real = () if all(trial.simulated for trial in trials) else ("GPUs", "processor")
    yield from (f"| command | `{entry.command}` |", "|---|---|")
    rows = {
        "data": f"{len(trials)} trials, seed{'s' * (len(seeds) > 1)} {ranges(seeds)}",
        "machine": next(machine[name] for name in (*real, "device") if name in machine),
        "date": f"{ended:%Y-%m-%d}",
        "notes": ", ".join(sweep_table(source.store, source.sweep.id).codes) or "none",
    }
    yield from (f"| {name} | {value} |" for name, value in rows.items())


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--to", type=Path, default=PAGE, help="page to write; its pictures go to a folder beside it")
    found.add_argument("--entries", type=Path, default=ENTRIES, help="file of questions")
    return found


if __name__ == "__main__":
    sys.exit(main())
