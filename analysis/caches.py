"""Where history was found, against the size of the cache and by eviction policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import marks, style
from analysis.quantities import Quantity, Shares, columns, over_seeds, shares
from analysis.registry import Plot, Row
from analysis.sweep import Cell, Panel, Source
from pensieve.lab.results.findings import RECOMPUTED as HISTORY_RECOMPUTED
from pensieve.lab.results.findings import REFERENCE, Finding
from pensieve.lab.results.frame import PAPERS, found_more
from pensieve.lab.results.trials import varying_axes
from pensieve.lab.statistics import FEWEST_GROUPS, Estimate
from pensieve.units import significant

PARTS = {
    "GPU hit": "gpu_hit_pct",
    "CPU hit": "cpu_hit_pct",
    "disk hit": "disk_hit_pct",
    "recomputed": "recomputed_pct",
}
"""What history is divided into, with the columns; disk is left out in sweeps that found nothing there."""
SIZES = {"cache": "cache", "cache.gpu": "GPU cache (tokens)", "cache.cpu": "CPU cache (tokens)"}
BOUND = "offline bound"
POLICIES = "eviction"
A_ROW = 3  # baselines beside each other


def _draw_shares(axes: Axes, place: float, found: Shares, name: str, *, across: bool) -> None:
    """A stacked bar, with the intervals of both boundaries."""
    marks.stacked(axes, place, found.parts, name, across=across)
    lines = axes.hlines if across else axes.vlines
    for boundary, aside in ((found.gpu, -0.12), (found.hit, 0.12)):
        if boundary is found.gpu and found.gpu.value == found.hit.value:
            continue  # no CPU hits: one boundary
        if boundary.ci_low is not None and boundary.ci_high is not None and boundary.ci_high > boundary.ci_low:
            lines(place + aside, boundary.ci_low, boundary.ci_high, color="black", linewidth=0.8)


def _share_columns(found: Shares | None, parts: Iterable[str]) -> dict[str, float | None]:
    return {PARTS[part]: found.parts[part] if found else None for part in parts}


# The size of the cache


def axis_of(source: Source) -> str | None:
    return next((axis for axis in SIZES if len(source.swept(axis)) > 1), None)


def shows_sizes(source: Source) -> bool:
    """A sweep over the size, or over nothing but baselines; what else is swept has figures of its own."""
    plain = not varying_axes(source.sweep.overrides, source.trials)
    return source.has_metric("gpu_hit_rate") and (plain or axis_of(source) is not None)


def hit_rates(source: Source) -> Iterator[Plot]:
    """A sweep over the size gets a part of the picture for each baseline, any other one bar a baseline."""
    axis = axis_of(source)
    for panel in source.panels(*([axis] if axis else [])):
        cells = [cell for name in panel.baselines for cell in panel.of(name)]
        if axis:
            order = panel.values(axis)
            cells.sort(key=lambda cell: (panel.baselines.index(cell.baseline), order.index(cell.at[axis])))
        found = [shares(source, cell) for cell in cells]
        parts = next((list(one.parts) for one in found if one is not None), None)
        if parts is None:
            raise source.lacks("turn with history whose engine says what it found")
        bounds = [_bound(cell) for cell in cells]
        known = list(zip(cells, found, bounds, strict=True))
        wide = 1 if not axis else min(A_ROW, len(panel.baselines)) if len(panel.baselines) != 4 else 2
        names = panel.baselines if axis else [""]
        picture, grid = style.new_grid(1.35 * -(-len(names) // wide) + 0.25, -(-len(names) // wide), wide, sharey=True)
        flat = [axes for row in grid for axes in row]
        for axes, name in zip(flat, names, strict=False):
            _draw_sizes(axes, name, axis, [one for one in known if name in ("", one[0].baseline)])
        for axes in flat[len(names) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel("history tokens (%)")
        if axis:
            grid[-1][(len(names) - 1) % wide // 2].set_xlabel(SIZES[axis])
        lead, handles = "Shares of history tokens, with the 95 % intervals of both boundaries", style.parts_key(parts)
        if any(bound is not None for bound in bounds):
            lead += f"; {BOUND}: what a policy that knows the future could find with the same room"
            handles.append(Line2D([], [], color="black", linewidth=1, label=BOUND))
        style.legend(picture, handles)
        yield Plot(panel, picture, lead, [_hit_rate_row(*one, axis, parts) for one in known])


def _draw_sizes(
    axes: Axes, name: str, axis: str | None, known: Sequence[tuple[Cell, Shares | None, float | None]]
) -> None:
    """name: of the baseline whose sizes these are; "": a bar a baseline."""
    for place, (cell, found, _) in enumerate(known):
        if found is None:
            axes.text(place, 4, "not reported", rotation=90, fontsize=6, ha="center", color=style.GREY)
        else:
            _draw_shares(axes, place, found, name or cell.baseline, across=False)
    bounds = [(place, bound) for place, (_, _, bound) in enumerate(known) if bound is not None]
    if bounds:  # there is nothing between two baselines, or two named sizes, that a line could pass through
        width = 1 if name and axis != "cache" else 0
        axes.plot(
            *zip(*bounds, strict=True), color="black", linewidth=width, marker="_", markersize=9, clip_on=False,
            gid=f"{name}/bound",
        )  # fmt: skip
    axes.set_ylim(0, 100)
    axes.tick_params(axis="x", length=0)
    labels = [_size(cell, axis) if name else cell.baseline for cell, _, _ in known]
    crowded = sum(map(len, labels)) > (18 if name else 45)
    slant: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(range(len(known)), labels, fontsize=6, **slant)
    if name:
        axes.set_title(name, fontweight="bold", color=style.colour(name))
    else:
        for label, (cell, _, _) in zip(axes.get_xticklabels(), known, strict=True):
            label.set(color=style.colour(cell.baseline), fontweight="bold")


def _size(cell: Cell, axis: str | None) -> str:
    """In tokens as the engine had them; an option by its name."""
    if axis is None or axis == "cache":
        return cell.at.get("cache", "")
    trial = cell.trials[0]
    tokens = trial.gpu_tokens if axis == "cache.gpu" else trial.cpu_tokens
    asked = cell.at[axis].removesuffix(" tokens")
    return asked if tokens is None or (axis == "cache.cpu" and not tokens) else short(tokens)


def short(tokens: int) -> str:
    """2560 as 2.6k, to fit under a bar."""
    for size, unit in ((1_000_000, "M"), (1000, "k")):
        if tokens >= size:
            scaled = tokens / size
            return f"{scaled:.0f}{unit}" if scaled >= 10 else f"{scaled:.1f}{unit}"
    return str(tokens)


def _bound(cell: Cell) -> float | None:
    """In percent; a server that stores nothing has none."""
    values = {} if cell.baseline == REFERENCE else cell.metric("bound_hit_rate")
    return 100.0 * over_seeds(values).value if values else None


def _hit_rate_row(cell: Cell, found: Shares | None, bound: float | None, axis: str | None, parts: Iterable[str]) -> Row:
    trial = cell.trials[0]
    return {
        "baseline": cell.baseline,
        **({axis: cell.at[axis]} if axis else {}),
        "gpu_tokens": trial.gpu_tokens,
        "cpu_tokens": trial.cpu_tokens,
        **_share_columns(found, parts),
        "gpu_ci_low": found.gpu.ci_low if found else None,
        "gpu_ci_high": found.gpu.ci_high if found else None,
        "hit_ci_low": found.hit.ci_low if found else None,
        "hit_ci_high": found.hit.ci_high if found else None,
        "n_conversations": found.hit.n if found else 0,
        "bound_hit_pct": bound,
        "trials": cell.ids,
    }


# Policy by policy


MEASURES = (
    Quantity(of="ttft_ms", how="p50", name="ttft_ms_p50", says="first token,\nmedian (ms)"),
    Quantity(
        of="recomputed_tokens", how="seeds", scale=1e3, name="recomputed_ktokens", says="recomputed\n(1000 tokens)"
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One baseline with one policy; found: as MEASURES. bound: of its hits, in percent."""

    cell: Cell
    name: str
    hits: Shares
    found: Sequence[Estimate]
    bound: float | None


def ablation_eviction(source: Source) -> Iterator[Plot]:
    """Lines from the top down: by baseline, then by policy."""
    for panel in source.panels(POLICIES):
        lines = []
        for baseline in panel.baselines:
            cells = {cell.at[POLICIES]: cell for cell in panel.of(baseline)}
            lines += [_line(panel, source, cells[policy]) for policy in panel.values(POLICIES)]
        picture, [grid] = style.new_grid(0.55 + 0.21 * len(lines), 1, 1 + len(MEASURES), sharey=True)
        for axes, head in zip(grid, ("history\ntokens (%)", *(one.says for one in MEASURES)), strict=True):
            axes.set_title(head, fontsize=6.5, linespacing=1.1)
            axes.tick_params(axis="x", labelsize=6)
            axes.xaxis.set_major_locator(MaxNLocator(2))
        marks.rows(grid[0], [line.name for line in lines], [style.colour(line.cell.baseline) for line in lines])
        grid[0].tick_params(axis="y", labelsize=6.5)
        grid[0].set_xlim(0, 100)
        for place, line in enumerate(lines):
            _draw_shares(grid[0], place, line.hits, line.name, across=True)
            if line.bound is not None:
                look = {**marks.BOUND, "markersize": 9, "markeredgewidth": 1.4}
                grid[0].plot([line.bound], [place], **look, gid=f"{line.name}/bound")
        for index, (axes, measure) in enumerate(zip(grid[1:], MEASURES, strict=True)):
            axes.grid(visible=False)
            axes.tick_params(axis="y", length=0)
            for place, line in enumerate(lines):
                found, colour = line.found[index], style.colour(line.cell.baseline)
                text = significant(found.value)
                marks.draw_bar(axes, marks.Bar(found, colour, text, f"{line.name}/{measure.name}"), place)
            if not any(line.found[index].value for line in lines):
                axes.set_xlim(0, 1)  # nothing of it anywhere: no room for less than nothing
        lead = "Bars with their 95 % interval over seeds and conversations"
        every = [found for line in lines for found in line.found]
        fewest = min(found.groups for found in every)
        if any(found.ci_low is None for found in every) and fewest < FEWEST_GROUPS:
            lead += f"; counts and rates are means over seeds, n = {fewest}, no interval"
        handles = style.parts_key(list(lines[0].hits.parts))
        if any(line.bound is not None for line in lines):
            handles.append(Line2D([], [], **marks.BOUND, label=BOUND))
            lead += f"; {BOUND}: what a policy that knows the future could find with the same room"
        style.legend(picture, handles)
        lead = "; ".join(filter(None, [_papers_policy(panel, source), lead]))
        yield Plot(panel, picture, lead, [_ablation_row(line) for line in lines])


def _line(panel: Panel, source: Source, cell: Cell) -> Line:
    hits, policy = shares(source, cell), cell.at[POLICIES]
    measured = {"history": hits, **{one.name: one.found(source, cell) for one in MEASURES}}
    for name, found in measured.items():
        if found is None:
            raise source.lacks(f"{name} of {cell.baseline} with {POLICIES}={policy}")
    assert hits is not None
    name = f"{cell.baseline}, {policy}" if len(panel.baselines) > 1 else policy
    return Line(cell, name, hits, [one for one in measured.values() if isinstance(one, Estimate)], _bound(cell))


def _ablation_row(line: Line) -> Row:
    row: dict[str, Any] = {"baseline": line.cell.baseline, POLICIES: line.cell.at[POLICIES]}
    row |= _share_columns(line.hits, line.hits.parts)
    for measure, found in zip(MEASURES, line.found, strict=True):
        row |= columns(measure.name, found, prefix=f"{measure.name}_")
    return {**row, "bound_hit_pct": line.bound, "trials": line.cell.ids}


def _papers_policy(panel: Panel, source: Source) -> str:
    """How much more or less of the history it recomputes than each other policy, of each baseline."""
    found = []
    for baseline in panel.baselines:
        cells = {cell.at[POLICIES]: cell for cell in panel.of(baseline)}
        if (paper := cells.pop(PAPERS, None)) is not None:
            turns = source.turns(paper)
            beside = {name: more for name, cell in cells.items() if (more := found_more(source.turns(cell), turns))}
            if beside:
                each = [Finding(HISTORY_RECOMPUTED, {}, PAPERS, name, more).text for name, more in beside.items()]
                found.append(f"{HISTORY_RECOMPUTED}, {PAPERS}: {', '.join(each)}")
    return "; ".join(found)
