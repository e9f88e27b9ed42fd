"""The figures by name, and the files of each: PNG, PDF and caption, or a table as Markdown; the CSV behind them, and a JSON
that says what they stand on."""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml
from matplotlib.figure import Figure as Picture
from pydantic import BaseModel, ValidationError

from analysis import style
from analysis.sweep import Source, brief, footnote
from pensieve.errors import ConfigError, MissingSeries
from pensieve.lab.compose.conf import conf_folder
from pensieve.lab.results.frame import Panel
from pensieve.lab.results.schema import Trial
from pensieve.lab.statistics import FEWEST_GROUPS
from pensieve.units import Table

Row = Mapping[str, Any]
LAST = 1000  # the place of a figure that names none
_FORMS = {"lines": "analysis.forms.Lines", "bars": "analysis.forms.Bars", "table": "analysis.forms.Form"}


@dataclass(frozen=True, slots=True)
class Plot:
    """One panel. rows: a mapping a point with the same keys, its columns in the CSV; an Estimate becomes several of them.
    What begins with _ is for the drawing alone: _line, _section, _name, _colour, _text of the line or bar; _X in place of X.

    lead: what a point and its interval are; said: goes behind it, words: for {} in it. table: its numbers as cells.
    picture: None where the figure is a table, which is text. title: in place of the figure's. trials: that it stands on,
    where those are not the panel's.
    """

    panel: Panel
    rows: Sequence[Row]
    lead: str = ""
    said: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    table: Table | None = None
    picture: Picture | None = None
    title: str = ""
    trials: Sequence[Trial] | None = None


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure on disk. files: by their suffixes: png and pdf with the caption as txt, or the table as md; csv, json.
    table: its numbers as cells."""

    name: str
    title: str
    panel: Panel
    caption: str
    files: Mapping[str, Path]
    table: Table | None


class Figure(BaseModel, frozen=True, extra="allow"):
    """A file of conf/figure. name: of its files. shows: a clause. command: makes a sweep that it can be drawn from. place: in
    the order in which a report shows them.

    form: lines, bars, table, or a class of your own by its dotted name, whose fields are what else the file says; or a
    function of a Source that yields plots. applies: what holds of a sweep that it can be drawn from: methods of Source with
    their argument (of several, each), or functions of a Source by their dotted name. Modules are imported when asked for.
    alone: where it applies it shows all there is, and others would draw a picture for each of its cells. asked: drawn only
    where it is named.
    """

    name: str
    title: str
    shows: str
    command: str
    form: str
    applies: dict[str, Any]
    place: int = LAST
    alone: bool = False
    asked: bool = False

    def holds(self, source: Source) -> bool:
        """Whether the sweep is one of those that it can be drawn from."""
        for name, asked in self.applies.items():
            holds = partial(resolve_name(name), source) if "." in name else getattr(source, name)
            each = asked if isinstance(asked, list) else [asked]
            if not all(holds() if one is True else holds(one) for one in each):
                return False
        return True

    def plots(self, source: Source) -> Iterable[Plot]:
        """A plot a panel. Raises MissingSeries, and ConfigError for what its form does not take."""
        drawing = resolve_name(_FORMS.get(self.form, self.form))
        try:
            form = drawing(**(self.model_extra or {})) if isinstance(drawing, type) else None
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise ConfigError(f"conf/figure/{self.name}.yaml: {where}: {error.errors()[0]['msg']}.") from None
        found: Iterable[Plot] = drawing(source) if form is None else form.plots(source)
        return found

    def draw(self, source: Source, folder: Path) -> list[Drawing]:
        """Write the files of each panel. Raises MissingSeries where it cannot be drawn from this sweep, and MixedPanel."""
        if not self.holds(source):
            raise MissingSeries(f"It needs other trials than sweep {source.sweep.id} has; run `{self.command}`.")
        return [_publish(self, source, plot, folder) for plot in self.plots(source)]


def read_figures(folder: Path) -> dict[str, Figure]:
    """The files of a folder, by name, in the order in which a report shows them: by their `place`, then by name."""
    files = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yaml"))}
    figures = [Figure(name=name, **file) for name, file in files.items()]
    return {figure.name: figure for figure in sorted(figures, key=lambda figure: figure.place)}


def _publish(of: Figure, source: Source, plot: Plot, folder: Path) -> Drawing:
    """Title and a line of small print around the picture, and its files; the panel's group goes before the columns of the
    CSV. What does not fit the line is the caption, for whoever sets the figure."""
    panel, title = plot.panel, plot.title or of.title
    trials = [trial for cell in panel.cells for trial in cell] if plot.trials is None else plot.trials
    origin = source.trace(trials)
    warning = f"MIXED: {'; '.join(origin.mixed)}" if origin.mixed else ""
    drawn = _interval_drawn(plot)
    lead = plot.lead if drawn else f"{plot.lead}; no interval is due below {FEWEST_GROUPS} seeds"
    gone = f"Left out, without a completed trial: {'; '.join(panel.left_out)}" if panel.left_out else ""
    caption = ". ".join(filter(None, [title, panel.text, warning, gone, footnote(origin, lead)]))
    stem = folder / (of.name + "".join(f"-{_slug(axis)}-{_slug(value)}" for axis, value in panel.group.items()))
    if plot.picture is not None:
        small = "\n".join(filter(None, [warning, brief(origin, drawn)]))
        style.compose(plot.picture, "\n".join(filter(None, [title, panel.text])), small, bool(warning))
        paths = style.save(plot.picture, stem, title, caption)
    else:
        assert plot.table is not None, "neither a picture nor a table"
        paths = [stem.with_name(stem.name + ".md")]
        folder.mkdir(parents=True, exist_ok=True)
        heading = " · ".join(filter(None, [title, panel.text]))
        paths[0].write_text(markdown(plot.table, heading, caption), encoding="utf-8")
    paths.append(stem.with_name(stem.name + ".csv"))
    assert plot.rows, "a figure without data"
    with paths[-1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*panel.group, *plot.rows[0]])
        writer.writeheader()
        writer.writerows({**panel.group, **row} for row in plot.rows)
    said = {
        "figure": of.name,
        "title": title,
        "what": lead,
        "group": dict(panel.group),
        "files": [path.name for path in paths],
        "allow_mixed": bool(origin.mixed),
        **asdict(origin),
        "series": [
            {"baseline": cell.baseline, **cell.at, "trials": sorted(trial.id for trial in cell.trials)}
            for cell in panel.cells
        ],
    }
    paths.append(stem.with_name(stem.name + ".json"))
    paths[-1].write_text(json.dumps(said, indent=2, default=str) + "\n", encoding="utf-8")
    return Drawing(of.name, title, panel, caption, {path.suffix[1:]: path for path in paths}, plot.table)


def _interval_drawn(plot: Plot) -> bool:
    """Also where the small print speaks of none."""
    ends = [end for row in plot.rows for key, end in row.items() if key.endswith("ci_low")]
    return "95 % interval" not in plot.lead or any(end is not None for end in ends)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_")


FIGURES = read_figures(conf_folder() / "figure")
"""By name, in the order in which a report shows them."""


def markdown(table: Table, title: str, note: str) -> str:
    """The table as a page of Markdown: title, cells in one line each, note."""
    heads = list(table[0])
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *([line[head] for head in heads] for line in table)]
    rows = ["| " + " | ".join(_one_line(cell) for cell in line) + " |" for line in lines]
    return "\n".join([f"# {title}", "", *rows, "", note, ""])


def _one_line(cell: str) -> str:
    """Of a cell or a head; "degra-\\ndation" is one word again."""
    return cell.replace("-\n", "").replace("\n", " ").replace("|", "\\|")
