"""The files of a figure: PNG and PDF, the CSV behind them, and a JSON sidecar that says what they stand on."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.drawing.provenance import footnote
from analysis.drawing.source import Panel
from pensieve.statistics import Estimate

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure on disk. title and panel: for a page that shows several."""

    name: str
    title: str
    panel: Panel
    png: Path
    pdf: Path
    csv: Path
    sidecar: Path

    @property
    def paths(self) -> list[Path]:
        return [self.png, self.pdf, self.csv, self.sidecar]


def arrange(
    figure: Figure,
    panel: Panel,
    title: str,
    lead: str,
    *,
    left: float,
    right: float = 0.08,
    gap: float = 0.36,
    head: float = 0.0,
) -> float:
    """Title, group and small print; lead: what a point and its interval are. Margins and result: see style.arrange."""
    warning = f"MIXED: {'; '.join(panel.provenance.mixed)}" if panel.provenance.mixed else ""
    note = footnote(panel.provenance, lead)
    return style.arrange(figure, title, panel.text, note, warning, left=left, right=right, gap=gap, head=head)


def publish(
    figure: Figure, panel: Panel, name: str, title: str, lead: str, rows: Sequence[Row], folder: Path
) -> Drawing:
    """Write the four files. rows: what is drawn, a mapping a point with the same keys; the panel's group goes before."""
    stem = folder / (name + "".join(f"-{_slug(axis)}-{_slug(value)}" for axis, value in panel.group.items()))
    png, pdf = style.save(figure, stem)
    table = _write_csv(stem.with_name(stem.name + ".csv"), panel.group, rows)
    sidecar = stem.with_name(stem.name + ".json")
    said = {
        "figure": name,
        "title": title,
        "what": lead,
        "group": dict(panel.group),
        "files": [path.name for path in (png, pdf, table)],
        "allow_mixed": bool(panel.provenance.mixed),
        **asdict(panel.provenance),
        "series": [
            {"baseline": cell.baseline, **cell.at, "trials": sorted(trial.id for trial in cell.trials)}
            for cell in panel.cells
        ],
    }
    sidecar.write_text(json.dumps(said, indent=2, default=str) + "\n", encoding="utf-8")
    return Drawing(name, title, panel, png, pdf, table, sidecar)


def columns(name: str, estimate: Estimate) -> dict[str, Any]:
    """The columns of an estimate in a CSV."""
    return {
        name: estimate.value,
        "ci_low": estimate.ci_low,
        "ci_high": estimate.ci_high,
        "n": estimate.n,
        "n_seeds": estimate.groups,
    }


def _write_csv(path: Path, group: Mapping[str, str], rows: Sequence[Row]) -> Path:
    assert rows, "a figure without data"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*group, *rows[0]])
        writer.writeheader()
        writer.writerows({**group, **row} for row in rows)
    return path


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", text).strip("_")
