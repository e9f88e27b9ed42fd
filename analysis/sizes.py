"""size_map: what is found, and the time to first token, over the sizes of the GPU tier and the CPU tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from analysis import style
from analysis.provenance import trace
from analysis.registry import Plot, figure
from analysis.sweep import Panel, Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import conversations_of
from pensieve.lab.results.size_map import Place, SizeMap, is_map, read_map, spaced
from pensieve.lab.results.trials import mixtures
from pensieve.lab.statistics import FEWEST_GROUPS

KNEE, BORDER = "#D55E00", "#E7298A"  # both are seen on either map, and on a dark ground
DISK = "cache.disk"
COLOURS = {"found": "YlGnBu", "late": "YlOrBr"}
MOST_WRITTEN = 13  # sizes along a side up to which a cell has its number written into it


@figure(
    "size_map",
    "How much KV cache this load needs",
    shows="what is found and the time to first token over the sizes of both tiers, with the knee and the objective's border",
    command="python runners/size.py",
    applies=lambda source: is_map(source.sweep),
    alone=True,
)
def size_map(source: Source) -> Iterator[Plot]:
    found = read_map(source.store, source.sweep)
    if found.question.corner not in found.cells:
        raise MissingSeries(f"Sweep {source.sweep.id} has no trial of its largest sizes yet; run `{source.command}`.")
    trials = source.trials
    at_most = found.cells[found.question.corner].trials.values()
    # Every cell is asked the same: the conversations of one cell stand for all.
    conversations = {
        key for job in at_most if job.trial for key in conversations_of(source.frame(job.trial, measured=True))
    }
    origin = trace(
        source.sweep, trials, mixtures(trials), len(conversations), len(found.failed), allow_mixed=source.allow_mixed
    )
    q, rows = found.question, list(found.rows())
    for beside in q.planes:
        disk = (q.disk[beside[0]] or "0") if beside else None
        drawn = [{k: v for k, v in row.items() if k != DISK} for row in rows if disk in (None, row[DISK])]
        group = {} if disk is None else {DISK: disk}
        yield Plot(Panel(source.sweep, group, (), origin), _drawn(found, beside), _lead(found, beside), drawn)


def _drawn(found: SizeMap, beside: Place) -> Any:
    """beside: how the places of this picture's cells end: with the index of their disk, where there are several."""
    q = found.question
    height = max(0.17 * len(q.gpu) + 0.35, 1.2)  # of few sizes too their axis has a name
    picture, grid = style.new_grid(2 * height + 0.3, 2, 1, sharex=True)
    above, below = grid[0][0], grid[1][0]
    kind = "history" if q.of == "history" else "prompt"
    _heat(above, found, beside, "found", f"{kind} tokens found (%)", 100.0, COLOURS["found"], Normalize(0, 100))
    late = [value for place in found.cells if (value := found.mean(place, found.objective)) is not None]
    norm = LogNorm(min(late), max(max(late), min(late) * 1.01)) if late else Normalize(0, 1)
    _heat(below, found, beside, found.objective, f"TTFT {q.percentile} (ms)", 1.0, COLOURS["late"], norm)
    for axes in (above, below):
        _border(axes, found, beside, found.reaches, KNEE, "knee")
        if q.slo_ttft_ms is not None:
            _border(axes, found, beside, found.meets, BORDER, "objective")
        axes.set_ylabel("GPU KV a device" if q.devices > 1 else "GPU KV")
    below.set_xlabel("CPU KV a device" if q.devices > 1 else "CPU KV")
    style.legend(picture, _key(found, beside))
    return picture


def _heat(
    axes: Axes, found: SizeMap, beside: Place, name: str, title: str, scale: float, colours: str, norm: Normalize
) -> None:
    """Every cell coloured; those that did not run paler, with a dot in the place of their number."""
    q = found.question
    shape = len(q.gpu), len(q.cpu)
    values = np.full(shape, np.nan)
    known = found.interpolated(name) | {place: found.mean(place, name) for place in found.cells}
    for place, value in known.items():
        if place[2:] == beside and value is not None:
            values[place[:2]] = value * scale
    image = axes.imshow(values, origin="lower", aspect="auto", cmap=colours, norm=norm)
    image.set_gid(f"{name}/cells")
    axes.set_title(title)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.set_xticks(
        range(shape[1]), [spaced(size) for size in q.cpu], rotation=40, ha="right", rotation_mode="anchor", fontsize=5.5
    )
    axes.set_yticks(range(shape[0]), [spaced(size) for size in q.gpu], fontsize=5.5)
    for gpu in range(shape[0]):
        for cpu in range(shape[1]):
            run = (gpu, cpu, *beside) in found.cells
            if not run:
                axes.add_patch(
                    Rectangle(
                        (cpu - 0.5, gpu - 0.5),
                        1,
                        1,
                        facecolor="white",
                        alpha=0.45,
                        linewidth=0,
                        gid=f"{name}/interpolated",
                    )
                )
            if max(shape) > MOST_WRITTEN or np.isnan(values[gpu, cpu]):
                continue
            dark = run and _is_dark(image.cmap(norm(values[gpu, cpu])))
            text = _short(values[gpu, cpu]) if run else "·"
            axes.text(cpu, gpu, text, ha="center", va="center", fontsize=4.6, color="white" if dark else "black")


def _border(
    axes: Axes, found: SizeMap, beside: Place, suffices: Callable[[Place], bool], colour: str, gid: str
) -> None:
    """The staircase below and left of all cells that are as large as one of the smallest that suffice; a square around the
    one that the answer names."""
    q = found.question
    front = found.smallest(suffices, beside)
    if not front:
        return
    xs: list[float] = []
    ys: list[float] = []
    top = len(q.gpu) - 0.5
    for index, (gpu, cpu, *_) in enumerate(reversed(front)):  # from the least CPU memory on
        upper = top if index == 0 else ys[-1]
        xs += [cpu - 0.5, cpu - 0.5]
        ys += [upper, gpu - 0.5]
    xs.append(len(q.cpu) - 0.5)
    ys.append(ys[-1])
    axes.plot(
        xs, ys, color=colour, linewidth=1.4, linestyle="-" if gid == "knee" else (0, (3, 1.4)), gid=gid, clip_on=False
    )
    chosen = found.pick(found.smallest(suffices))
    if chosen is not None and chosen[2:] == beside:
        axes.plot(
            [chosen[1]], [chosen[0]], marker="s", markersize=9, markerfacecolor="none", markeredgecolor=colour,
            markeredgewidth=1.1, linewidth=0, gid=f"{gid}/chosen",
        )  # fmt: skip


def _key(found: SizeMap, beside: Place) -> list[Any]:
    q = found.question
    handles: list[Any] = []
    knee = found.smallest(found.reaches, beside)
    meeting = found.smallest(found.meets, beside) if q.slo_ttft_ms is not None else []
    if knee:
        handles.append(Line2D([], [], color=KNEE, linewidth=1.4, label=f"{100 * q.knee:g} % of what the largest find"))
    if meeting:
        label = f"{q.slo_ttft_ms:g} ms at {q.percentile}"
        handles.append(Line2D([], [], color=BORDER, linewidth=1.4, linestyle=(0, (3, 1.4)), label=label))
    if {found.pick(found.knee), found.pick(found.meeting)} & {*knee, *meeting}:
        handles.append(
            Line2D(
                [],
                [],
                color=style.GREY,
                marker="s",
                markersize=6,
                markerfacecolor="none",
                linewidth=0,
                label="named in the answer",
            )
        )
    if _ran(found, beside) < len(q.gpu) * len(q.cpu):
        handles.append(Patch(facecolor="#E8EFEF", edgecolor=style.EDGE, linewidth=0.4, label="· interpolated"))
    return handles


def _ran(found: SizeMap, beside: Place) -> int:
    return sum(place[2:] == beside for place in found.cells)


def _lead(found: SizeMap, beside: Place) -> str:
    q = found.question
    seeds = sorted({len(cell.trials) for cell in found.cells.values()})
    lead = found.sentence()
    lead += f" {_ran(found, beside)} of {len(q.gpu) * len(q.cpu)} cells {'of this disk ' if beside else ''}have run, "
    lead += f"with {_range(seeds)} each"
    lead += (
        "; the CSV has 95 % intervals"
        if seeds[-1] >= FEWEST_GROUPS
        else f"; no interval is due below {FEWEST_GROUPS} seeds"
    )
    if q.slo_ttft_ms is not None and not found.meeting:
        lead += f"; no cell meets {q.slo_ttft_ms:g} ms"
    return lead


def _range(counts: Sequence[int]) -> str:
    if len(counts) == 1:
        return f"{counts[0]} seed{'s' * (counts[0] > 1)}"
    return f"{counts[0]} to {counts[-1]} seeds"


def _short(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    if value >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 99.95 or value < 0.05 else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _is_dark(colour: Sequence[float]) -> bool:
    red, green, blue = colour[:3]
    return 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
