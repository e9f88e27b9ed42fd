"""How every figure looks: one colour a baseline, type for 3.3 inches, and the files of a picture."""

import textwrap
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from fontTools.subset import Options  # type: ignore[import-untyped]
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

# Of a PDF's fonts: reading them takes longest, and letters are placed.
Options._drop_tables_default += ["GSUB", "GPOS", "GDEF"]

WIDTH_IN = 3.3  # one column of a paper
MARGIN_IN = 0.06
ABOVE = "outside upper left"  # the axes
TITLE_LETTERS = 46  # of a line of the title
EDGE = "#7F7F7F"  # around parts that are too light to end by themselves
GREY = "#595959"
WARNING = "#B00020"
IDEAL = "ideal"  # the name of a line that no baseline drew

# What a prompt's tokens met, and why they had no KV. Lightness alone tells them apart, and none is the colour of a baseline.
PARTS = {
    "GPU hit": "#01665E",
    "CPU hit": "#5AB4AC",
    "disk hit": "#C7EAE5",
    "cached": "#01665E",
    "recomputed": "#D9D9D9",
    "new": "#F6E8C3",
    "edited": "#DFC27D",
    "evicted": "#A6611A",
    "expired": "#80CDC1",
    "restarted": "#018571",
    "never_stored": "#BABABA",
}

# Okabe and Ito's palette, which colour-blind readers can tell apart, then Tol's muted one. The three of the default sweep
# also differ in lightness.
COLOURS = {
    "pensieve": "#0072B2",
    "pensieve_shared": "#003B6F",
    "gpu_only": "#E69F00",
    "stateless": "#4D4D4D",
    "prefix_cache": "#009E73",
    "vllm_offload": "#6699CC",
    "llama_slots": "#CC79A7",
    "vllm": "#D55E00",
    "vllm_http": "#882255",
    "vllm_offloading": "#EE7733",
    "vllm_offloading_arc": "#EE9988",
    "vllm_offloading_own": "#0077BB",
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
ROUTERS = {
    "affinity": "#0072B2",
    "random": "#D55E00",
    "least_loaded": "#E69F00",
    "prefix_aware": "#009E73",
}
"""Lines of one baseline behind several routers."""
RC = {
    "figure.dpi": 300,  # as it is saved: letters have other widths at other resolutions
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
    "axes.titlesize": 7,
    "axes.titlelocation": "left",
    "axes.titlepad": 3,
    "legend.frameon": False,
    "legend.fontsize": 6.5,
    "legend.handlelength": 1.5,
    "legend.columnspacing": 1.1,
    "legend.handletextpad": 0.4,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.6,
    "figure.constrained_layout.w_pad": 0.03,
    "figure.constrained_layout.h_pad": 0.03,
    "pdf.fonttype": 42,  # letters stay letters in the PDF
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_OTHERS = ("#B15928", "#6A3D9A", "#1B7837", "#A50026")


_KNOWN = {**COLOURS, **ROUTERS}


def colour(baseline: str) -> str:
    """The same in every figure, also of a router; one's own baseline gets one by its name."""
    if baseline == IDEAL:
        return GREY
    return _KNOWN.get(baseline) or _OTHERS[zlib.crc32(baseline.encode()) % len(_OTHERS)]


def marker(baseline: str) -> str:
    """A second cue beside colour."""
    names = list(_KNOWN)
    place = names.index(baseline) if baseline in names else zlib.crc32(baseline.encode())
    return MARKERS[place % len(MARKERS)]


def looks(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each line: its own where any has one everywhere, else those of its place: no two are alike."""
    every = list(dict.fromkeys(names))
    if any(name in _KNOWN for name in every):
        return {name: (colour(name), marker(name)) for name in every}
    return {name: (_OTHERS[at % len(_OTHERS)], MARKERS[at % len(MARKERS)]) for at, name in enumerate(every)}


def new_grid(height_in: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, list[list[Axes]]]:
    """Rows of axes, one column of a paper wide, `height_in` high without what `compose` adds; options: of Figure.subplots."""
    matplotlib.rcParams.update(RC)
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        axes.grid(axis="y", color="#E3E3E3", linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, [list(row) for row in grid]


def legend(figure: Figure) -> None:
    """One of all labelled marks above the axes, a label once, in as many columns as fit."""
    labelled: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labelled.setdefault(label, handle)
    for columns in range(len(labelled), 0, -1):
        found = figure.legend(labelled.values(), labelled, loc=ABOVE, ncols=columns)
        if columns == 1 or found.get_window_extent().width <= figure.bbox.width - 2 * MARGIN_IN * figure.dpi:
            return
        found.remove()


def compose(figure: Figure, title: str, note: str, warning: bool) -> None:
    """The title over the legend, and the small print below, red for a warning; the figure grows by what they take."""
    if not figure.legends:
        figure.legend([], [], loc=ABOVE)
    [above] = figure.legends
    bold = FontProperties(size=8.5, weight="bold")
    above.set_title("\n".join(textwrap.fill(line, TITLE_LETTERS) for line in title.splitlines()), prop=bold)
    above.set_alignment("left")
    left = MARGIN_IN / figure.get_figwidth()
    below = figure.supxlabel(note, x=left, ha="left", fontsize=5.2, color=WARNING if warning else GREY, wrap=True)
    taken = above.get_window_extent().height + below.get_window_extent().height
    figure.set_figheight(figure.get_figheight() + taken / figure.dpi + 2 * MARGIN_IN)
    figure.align_ylabels()


def save(figure: Figure, stem: Path, title: str, caption: str) -> list[Path]:
    """PNG, PDF and the caption as text beside each other; returns their paths. The PDF's metadata hold the caption too."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(stem.name + suffix) for suffix in (".png", ".pdf", ".txt")]
    figure.savefig(paths[0])
    figure.set_layout_engine(None)  # all is in its place now: finding it again takes as long as drawing
    figure.savefig(paths[1], metadata={"Title": title, "Subject": caption, "CreationDate": None})
    paths[2].write_text(f"{caption}\n", encoding="utf-8")
    return paths
