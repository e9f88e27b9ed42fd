"""A report as one HTML file that needs nothing else: the parts it is made of, and their rendering."""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pensieve.lab import tables
from pensieve.lab.results.claims import VERDICTS, Bounds, Measured, Verdict

HERE = Path(__file__).resolve().parent
LEADING = 3
"""Figures beside the answer; the first of those that apply, in the order of the registry."""
SYMBOLS: Mapping[Verdict, str] = {"holds": "✓", "fails": "✗", "inconclusive": "≈", "not comparable": "–"}
"""Beside the word, so that colour says nothing by itself."""


@dataclass(frozen=True, slots=True)
class Table:
    """lines: as the table writer has them; the second line of a head, such as the unit, is smaller.

    words: how many columns, from the first on, hold words; the others hold numbers. None: all hold words.
    """

    lines: tables.Table
    caption: str = ""
    words: int | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """A measurement beside its claim, as shares (0 to 100) of a bar's width. scale: "" or "log"."""

    band: tuple[float, float]
    line: tuple[float, float] | None
    point: float
    scale: str


@dataclass(frozen=True, slots=True)
class Verdicted:
    """A claim as the page shows it. claimed, measured: with unit. stands_on: n, seeds, baselines, trials."""

    name: str
    verdict: Verdict
    why: Sequence[str]
    text: str
    source: str
    claimed: str
    measured: str
    interval: Interval | None
    stands_on: str
    simulated: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """dark: the same on a dark ground. table: its cells, where it is one; the page then has these, and there is no image."""

    title: str
    group: str
    png: Path | None
    files: Sequence[str]
    caption: str = ""
    table: Table | None = None
    dark: Path | None = None


def leading_first(pictures: Sequence[Picture]) -> list[Picture]:
    """The LEADING pictures in front, all others in their order. What shows all settings leads before what shows one of them,
    and each figure leads once: of a sweep over load, throughput against latency comes before the turns of one rate."""
    seen: Counter[str] = Counter()
    ranks = []
    for place, one in enumerate(pictures):
        ranks.append((bool(one.group), seen[one.title], place))
        seen[one.title] += 1
    places = [place for *_, place in sorted(ranks)[:LEADING]]
    return [pictures[place] for place in places] + [one for place, one in enumerate(pictures) if place not in places]


@dataclass(frozen=True, slots=True)
class Page:
    """facts: label, value. warnings: what a reader has to know first. answers: what was found, before any table; the first
    LEADING pictures stand under it (see leading_first). not_drawn: figure, why, the command that makes its trials or "".
    commands: what it does, the line to type."""

    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    warnings: Sequence[str]
    answers: Sequence[str]
    results: Sequence[Table]
    notes: Sequence[str]
    verdicts: Sequence[Verdicted]
    pictures: Sequence[Picture]
    not_drawn: Sequence[tuple[str, str, str]]
    failures: Table | None
    flags: Table | None
    configuration: Sequence[Table]
    environment: Table
    engines: Sequence[Table]
    trials: Table
    commands: Sequence[tuple[str, str]]
    written: str

    @property
    def decided(self) -> Sequence[Verdicted]:
        """Without the claims whose conditions the sweep does not meet: another experiment decides those."""
        return [one for one in self.verdicts if one.verdict != "not comparable"]

    @property
    def tally(self) -> Mapping[Verdict, int]:
        """How many claims each verdict is given to here, in the order of VERDICTS."""
        return {verdict: sum(one.verdict == verdict for one in self.decided) for verdict in VERDICTS[:-1]}


def render(page: Page) -> str:
    """The whole file as text: style and pictures are inside, and every value is escaped."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["picture"] = _picture
    style = Markup((HERE / "page.css").read_text(encoding="utf-8"))  # ours, and nothing of a database in it
    return environment.get_template("page.html.j2").render(page=page, style=style, symbols=SYMBOLS, leading=LEADING)


def interval(bounds: Bounds, measured: Measured) -> Interval | None:
    """Where the claim and the measurement lie beside each other; None where a number has no place on a line."""
    known = [measured.value, measured.ci_low, measured.ci_high, bounds.low, bounds.high]
    values = [value for value in known if value is not None]
    if not all(math.isfinite(value) for value in values):
        return None
    low, high = min(values), max(values)
    log = low > 0 and high / low > 20
    place = math.log if log else float
    start, end = place(low), place(high)
    room = (end - start or abs(end) or 1.0) * 0.15
    start, end = start - room, end + room

    def at(value: float) -> float:
        return round(100 * (place(value) - start) / (end - start), 2)

    band = (0.0 if bounds.low is None else at(bounds.low), 100.0 if bounds.high is None else at(bounds.high))
    line = None if measured.ci_low is None or measured.ci_high is None else (at(measured.ci_low), at(measured.ci_high))
    return Interval(band, line, at(measured.value), "log" if log else "")


def _picture(path: Path) -> Mapping[str, object]:
    """A PNG as a data URL, with its size in pixels, so that the page does not move while it is drawn."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG"), path
    width, height = struct.unpack(">II", content[16:24])
    data = base64.b64encode(content).decode("ascii")
    return {"source": f"data:image/png;base64,{data}", "width": width, "height": height, "wide": width > 1400}
