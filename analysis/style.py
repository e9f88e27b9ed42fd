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

WIDTH_IN = 3.3  # one column of a paper
GREY = "#595959"

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
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_OTHERS = ("#B15928", "#6A3D9A", "#1B7837", "#A50026")


def colour(baseline: str) -> str:
    """The same in every figure; a baseline of the user's own gets one by its name."""
    return COLOURS.get(baseline) or _OTHERS[zlib.crc32(baseline.encode()) % len(_OTHERS)]


def marker(baseline: str) -> str:
    """A second cue beside colour."""
    names = list(COLOURS)
    place = names.index(baseline) if baseline in COLOURS else zlib.crc32(baseline.encode())
    return MARKERS[place % len(MARKERS)]


def outputs_folder() -> Path:
    """PENSIEVE_OUTPUTS, else outputs/ of the checkout: the same folder that the runners write to."""
    chosen = os.environ.get("PENSIEVE_OUTPUTS")
    return Path(chosen).expanduser().absolute() if chosen else Path(__file__).resolve().parents[1] / "outputs"


def new_figure(height_in: float) -> tuple[Figure, Axes]:
    plt.rcParams.update(
        {
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
            "pdf.fonttype": 42,  # letters stay letters in the PDF
        }
    )
    figure, axes = plt.subplots(figsize=(WIDTH_IN, height_in))
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def title(figure: Figure, text: str, subtitle: str = "") -> None:
    """At the top left: what is drawn, and below it of what."""
    figure.text(0.02, 0.985, text, fontsize=8.5, fontweight="bold", va="top")
    if subtitle:
        figure.text(0.02, 0.925, subtitle, fontsize=6.5, color=GREY, va="top")


def footer(figure: Figure, text: str, fontsize: float = 5.2) -> float:
    """What the numbers stand on, wrapped under the axes; returns the share of the height that it takes."""
    columns = int(figure.get_figwidth() * 72 * 0.96 / (fontsize * 0.53))
    lines = textwrap.wrap(text, columns)
    figure.text(0.02, 0.015, "\n".join(lines), fontsize=fontsize, color=GREY, va="bottom", linespacing=1.25)
    return 0.03 + len(lines) * fontsize * 1.3 / 72 / figure.get_figheight()


def label_ends(axes: Axes, ends: Sequence[tuple[str, float, float]], fontsize: float = 7) -> None:
    """Names beside the last points (name, x, y), moved apart where they would touch; call it when the limits are final."""
    to_points = 72 / axes.figure.dpi
    apart = fontsize * 1.2
    ordered = sorted(ends, key=lambda end: end[2])
    wanted = [axes.transData.transform((x, y))[1] * to_points for _, x, y in ordered]
    for (name, x, y), at, placed in zip(ordered, wanted, spread(wanted, apart), strict=True):
        axes.annotate(
            name, (x, y), xytext=(5, placed - at), textcoords="offset points", va="center", fontsize=fontsize,
            color=colour(name), fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def spread(wanted: Sequence[float], apart: float) -> list[float]:
    """Ascending positions moved as little as it takes to be `apart`: touching ones settle around their common middle."""
    runs: list[tuple[float, int]] = []  # middle and size of each run of touching positions
    for position in wanted:
        middle, size = position, 1
        while runs and middle - (size - 1) * apart / 2 < runs[-1][0] + (runs[-1][1] - 1) * apart / 2 + apart:
            before, count = runs.pop()
            middle, size = (before * count + middle * size) / (count + size), count + size
        runs.append((middle, size))
    return [middle + (index - (size - 1) / 2) * apart for middle, size in runs for index in range(size)]


def save(figure: Figure, stem: Path) -> list[Path]:
    """PNG and PDF beside each other; returns their paths."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".pdf")]
    figure.savefig(paths[0], dpi=300)
    figure.savefig(paths[1], metadata={"CreationDate": None})
    plt.close(figure)
    return paths
