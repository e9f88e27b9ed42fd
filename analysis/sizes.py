"""size_map: what is found, and the time to first token, over the sizes of the GPU tier and the CPU tier."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize

from analysis import style
from analysis.registry import Plot
from analysis.sweep import Source
from pensieve.lab.results.frame import Panel
from pensieve.lab.results.size_map import ONE_PASS, Place, SizeMap, read_map, spaced

BORDERS: dict[str, dict[str, Any]] = {  # both are seen on either map, and on a dark ground
    "knee": {"color": "#D55E00", "linewidth": 1.4},
    "objective": {"color": "#E7298A", "linewidth": 1.4, "linestyle": (0, (3, 1.4))},
}
NAMED: dict[str, Any] = {
    "color": style.GREY, "marker": "s", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 1.1, "linewidth": 0,
}  # fmt: skip
MOST_WRITTEN = 13  # sizes along a side up to which a cell has its number written into it


def size_map(source: Source) -> Iterator[Plot]:
    found = read_map(source.store, source.sweep)
    lead = f"{found.sentence()} {_ran(found)}"
    yield Plot(Panel({}, ()), list(found.rows()), lead, picture=_drawn(found), trials=source.trials)


def _drawn(found: SizeMap) -> Any:
    """What is found above, the time to first token below."""
    q = found.question
    height = max(0.17 * len(q.gpu) + 0.35, 1.2)  # of few sizes too their axis has a name
    rows = 1 if q.reuse else 2
    picture, grid = style.new_grid(rows * height + 0.3, rows, 1, sharex=True)
    above, below = grid[0][0], grid[-1][0]
    how = " by LRU, open loop" if q.reuse else ""
    _heat(above, found, "found", f"history tokens found{how} (%)", 100.0, Normalize(0, 100))
    late = [value for place in found.cells if (value := found.mean(place, found.objective)) is not None]
    norm = LogNorm(min(late), max(max(late), min(late) * 1.01)) if late else Normalize(0, 1)
    if not q.reuse:
        _heat(below, found, found.objective, f"TTFT {q.percentile} (ms)", 1.0, norm)
    each = " a device" if q.devices > 1 else ""
    fronts = {
        "knee": (found.reaches, f"{100 * q.knee:g} % of what the largest find"),
        "objective": (found.meets, f"{q.slo_ttft_ms or 0:g} ms at {q.percentile}"),
    }
    for gid, (suffices, says) in fronts.items():
        smallest = found.smallest(suffices)
        for axes in picture.axes if smallest else ():
            _border(axes, found, smallest, gid, says)
        if chosen := found.pick(smallest):
            named = {**NAMED, "markeredgecolor": BORDERS[gid]["color"], "label": "named in the answer"}
            for axes in picture.axes:
                axes.plot([chosen[1]], [chosen[0]], gid=f"{gid}/chosen", **named)
    for axes in picture.axes:
        axes.set_ylabel(f"GPU KV{each}")
    below.set_xlabel(f"CPU KV{each}")
    style.legend(picture)
    return picture


def _heat(axes: Axes, found: SizeMap, name: str, title: str, scale: float, norm: Normalize) -> None:
    """Every cell that has run is coloured, and has its number where there is room."""
    q = found.question
    values = np.full((len(q.gpu), len(q.cpu)), np.nan)
    for place in found.cells:
        if (value := found.mean(place, name)) is not None:
            values[place] = value * scale
    image = axes.imshow(
        values, origin="lower", aspect="auto", cmap="YlGnBu" if name == "found" else "YlOrBr", norm=norm
    )
    image.set_gid(f"{name}/cells")
    axes.set_title(title)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    slanted: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor", "fontsize": 5.5}
    axes.set_xticks(range(len(q.cpu)), [spaced(size) for size in q.cpu], **slanted)
    axes.set_yticks(range(len(q.gpu)), [spaced(size) for size in q.gpu], fontsize=5.5)
    for (gpu, cpu), value in np.ndenumerate(values):
        if max(values.shape) <= MOST_WRITTEN and not np.isnan(value):
            dark = np.dot(image.cmap(norm(value))[:3], (0.3, 0.59, 0.11)) < 0.5
            axes.text(
                cpu, gpu, _short(value), ha="center", va="center", fontsize=4.6, color="white" if dark else "black"
            )


def _border(axes: Axes, found: SizeMap, smallest: Sequence[Place], gid: str, says: str) -> None:
    """The staircase below and left of all cells that are as large as one of the smallest that suffice."""
    q = found.question
    corners = [(-0.5 + cpu, -0.5 + gpu) for gpu, cpu in reversed(smallest)]  # from the least CPU memory on
    ends = (corners[0][0], len(q.gpu) - 0.5), (len(q.cpu) - 0.5, corners[-1][1])
    corners = [ends[0], *corners, ends[1]]
    axes.step(*zip(*corners, strict=True), where="post", gid=gid, label=says, clip_on=False, **BORDERS[gid])


def _ran(found: SizeMap) -> str:
    q = found.question
    if q.reuse:
        return ONE_PASS
    counts = sorted({len(found.seeds(place)) for place in found.cells})
    seeds = "1 seed" if counts == [1] else f"{'-'.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"
    whole = len(q.gpu) * len(q.cpu)
    return f"{len(found.cells)} of {whole} cells have run, with {seeds} each; the CSV has the intervals"


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    if value >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 99.95 or value < 0.05 else f"{value:.2g}" if value < 10 else f"{value:.0f}"
