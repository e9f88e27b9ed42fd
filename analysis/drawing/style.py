"""How every figure looks: one colour a baseline, type that can be read at 3.3 inches, and where files go."""

from __future__ import annotations

import os
import textwrap
import zlib
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pensieve.statistics import Estimate

WIDTH_IN = 3.3  # one column of a paper
GREY = "#595959"
WARNING = "#B00020"
IDEAL = "ideal"  # the name of a line that no baseline drew

# What a prompt's tokens met. Lightness alone tells them apart, and none is the colour of a baseline.
PARTS = {"GPU hit": "#01665E", "CPU hit": "#5AB4AC", "recomputed": "#D9D9D9", "new": "#F6E8C3"}

# Okabe and Ito's palette, which colour-blind readers can tell apart, then Tol's muted one. The three of the default sweep
# also differ in lightness.
COLOURS = {
    "pensieve": "#0072B2",
    "gpu_only": "#E69F00",
    "stateless": "#4D4D4D",
    "prefix_cache": "#009E73",
    "llama_slots": "#CC79A7",
    "vllm": "#D55E00",
    "vllm_http": "#882255",
    "llama_cpp": "#56B4E9",
    "llama_cpp_http": "#332288",
    "transformers_cb": "#117733",
    "native_pytorch": "#999933",
    "openai_http": "#AA4499",
    "ray_keepalive": "#44AA99",
    "ray_serverless": "#CC6677",
    "semantic_blind": "#DDCC77",
    "partially_aware": "#88CCEE",
    "fully_aware": "#661100",
}
RC = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,  # letters stay letters in the PDF
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_OTHERS = ("#B15928", "#6A3D9A", "#1B7837", "#A50026")


def colour(baseline: str) -> str:
    """The same in every figure; a baseline of the user's own gets one by its name."""
    if baseline == IDEAL:
        return GREY
    return COLOURS.get(baseline) or _OTHERS[zlib.crc32(baseline.encode()) % len(_OTHERS)]


def marker(baseline: str) -> str:
    """A second cue beside colour."""
    names = list(COLOURS)
    place = names.index(baseline) if baseline in COLOURS else zlib.crc32(baseline.encode())
    return MARKERS[place % len(MARKERS)]


def outputs_folder() -> Path:
    """PENSIEVE_OUTPUTS, else outputs/ of the checkout: the same folder that the runners write to."""
    chosen = os.environ.get("PENSIEVE_OUTPUTS")
    return Path(chosen).expanduser().absolute() if chosen else Path(__file__).resolve().parents[2] / "outputs"


def new_figure(height_in: float) -> tuple[Figure, Axes]:
    """One column wide, one pair of axes, a horizontal grid."""
    figure, [axes] = new_row(height_in, 1)
    return figure, axes


def new_row(height_in: float, columns: int, width_in: float = WIDTH_IN) -> tuple[Figure, list[Axes]]:
    """Axes side by side."""
    figure, grid = new_grid(height_in, 1, columns, width_in)
    return figure, grid[0]


def new_grid(
    height_in: float, rows: int, columns: int, width_in: float = WIDTH_IN, **shared: bool
) -> tuple[Figure, list[list[Axes]]]:
    """Rows of axes. shared: sharex, sharey as pyplot takes them."""
    plt.rcParams.update(RC)
    figure, grid = plt.subplots(rows, columns, figsize=(width_in, height_in), squeeze=False, **shared)
    for axes in grid.flat:
        axes.grid(axis="y", color="#E3E3E3", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, [list(row) for row in grid]


def arrange(
    figure: Figure,
    heading: str,
    subtitle: str,
    note: str,
    warning: str = "",
    *,
    left: float,
    right: float,
    gap: float = 0.36,
    head: float = 0.0,
) -> float:
    """Heading, subtitle and warning above the axes, the small print below; margins in inches, the rest is theirs.

    left: what the y labels take. right: what the names beside the lines take. gap: what the x label and ticks take. head:
    what stands over the axes (names of panels, a key). Returns where the heading ends, in inches from the top.
    """
    width, height = figure.get_size_inches()
    top = 0.05
    for text, size, weight, ink in (
        (heading, 8.5, "bold", "black"),
        (subtitle, 6.5, "normal", GREY),
        (warning, 6.5, "bold", WARNING),
    ):
        lines = textwrap.wrap(text, int((width - 0.12) * 72 / (size * (0.54 if ink != WARNING else 0.6))))
        if lines:
            figure.text(
                0.06 / width, 1 - top / height, "\n".join(lines), fontsize=size, fontweight=weight, color=ink,
                va="top", linespacing=1.15,
            )  # fmt: skip
            top += len(lines) * size * 1.22 / 72 + 0.02
    size = 5.2
    lines = textwrap.wrap(note, int((width - 0.12) * 72 / (size * 0.53)))
    figure.text(
        0.06 / width, 0.045 / height, "\n".join(lines), fontsize=size, color=GREY, va="bottom", linespacing=1.25
    )
    bottom = 0.045 + len(lines) * size * 1.3 / 72 + gap
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - (top + 0.07 + head) / height, bottom=bottom / height
    )
    return top


def key(figure: Figure, parts: Sequence[str], top: float, dash: str = "") -> None:
    """Small squares with the names of PARTS, in a row that ends at the right edge, `top` inches below the top; before them
    what a black dash stands for."""
    width, height = figure.get_size_inches()
    x, top = width - 0.05, top + 0.07
    for part in (*reversed(parts), *([dash] if dash else [])):
        x -= len(part) * 6.5 * 0.62 / 72
        figure.text(x / width, 1 - top / height, part, fontsize=6.5, va="center")
        x -= 0.11
        high, look = (0.012, "black") if part == dash else (0.075, PARTS[part])
        mark = Rectangle(
            (x / width, 1 - (top + high / 2) / height), 0.075 / width, high / height, transform=figure.transFigure,
            facecolor=look, edgecolor=look if part == dash else "#7F7F7F", linewidth=0.4,
        )  # fmt: skip
        figure.add_artist(mark)
        x -= 0.12


def name_room(names: Sequence[str], fontsize: float = 7) -> float:
    """Inches that bold names to the right of the axes take."""
    return 0.10 + max((len(name) for name in names), default=0) * fontsize * 0.63 / 72


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float]], fontsize: float = 7) -> None:
    """Names beside the last points (name, x, y), moved apart where they would touch; call it when the limits are final.

    Points that end almost together share the place of the rightmost, so that no name lies on another's line.
    """
    left, right = axes.get_xlim()
    furthest = max(x for _, x, _ in ends)
    ends = [(name, furthest if furthest - x < 0.15 * (right - left) else x, y) for name, x, y in ends]
    to_points = 72 / axes.figure.dpi
    apart = fontsize * 1.2
    ordered = sorted(ends, key=lambda end: end[2])
    wanted = [axes.transData.transform((x, y))[1] * to_points for _, x, y in ordered]
    lowest = axes.transAxes.transform((0, 0))[1] * to_points + fontsize / 2  # a name does not lie on the axis
    for (name, x, y), at, placed in zip(ordered, wanted, spread(wanted, apart, lowest), strict=True):
        axes.annotate(
            name, (x, y), xytext=(5, placed - at), textcoords="offset points", va="center", fontsize=fontsize,
            color=colour(name), fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def interval_ends(estimates: Sequence[Estimate]) -> tuple[list[float], list[float]]:
    """Low and high ends; where an estimate has no interval, the value itself."""
    low = [one.value if one.ci_low is None else one.ci_low for one in estimates]
    high = [one.value if one.ci_high is None else one.ci_high for one in estimates]
    return low, high


def spread(wanted: Sequence[float], apart: float, lowest: float = float("-inf")) -> list[float]:
    """Ascending positions moved as little as it takes to be `apart`: touching ones settle around their common middle, and
    none lies below `lowest`."""
    runs: list[tuple[float, int]] = []  # middle and size of each run of touching positions
    for position in wanted:
        middle, size = position, 1
        while runs and middle - (size - 1) * apart / 2 < runs[-1][0] + (runs[-1][1] - 1) * apart / 2 + apart:
            before, count = runs.pop()
            middle, size = (before * count + middle * size) / (count + size), count + size
        runs.append((middle, size))
    placed = [middle + (index - (size - 1) / 2) * apart for middle, size in runs for index in range(size)]
    for index, position in enumerate(placed):
        least = lowest if index == 0 else placed[index - 1] + apart
        placed[index] = max(position, least)
    return placed


def save(figure: Figure, stem: Path) -> list[Path]:
    """PNG and PDF beside each other; returns their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".pdf")]
    figure.savefig(paths[0], dpi=300)
    figure.savefig(paths[1], metadata={"CreationDate": None})
    plt.close(figure)
    return paths
