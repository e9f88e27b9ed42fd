"""Where history was found, against the size of the cache, and what changes with one choice at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from analysis import marks, style
from analysis.estimates import over_seeds, percent, percentile
from analysis.registry import Plot, Row, columns, figure
from analysis.sweep import Cell, Panel, Source
from pensieve.lab.results.findings import RECOMPUTED as HISTORY_RECOMPUTED
from pensieve.lab.results.findings import REFERENCE, Finding
from pensieve.lab.results.frame import PAPERS, by_conversation, found_more, values_of
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
A_ROW = 3  # baselines beside each other


@dataclass(frozen=True, slots=True)
class Shares:
    """gpu, hit (all tiers together) of all history tokens, in percent. disk: of these the part on disk; None: the sweep found
    nothing there."""

    gpu: Estimate
    hit: Estimate
    disk: float | None = None

    @property
    def parts(self) -> dict[str, float]:
        """They sum to 100."""
        cpu = self.hit.value - self.gpu.value - (self.disk or 0.0)
        values = {"GPU hit": self.gpu.value, "CPU hit": cpu}
        return {
            **values,
            **({} if self.disk is None else {"disk hit": self.disk}),
            "recomputed": 100.0 - self.hit.value,
        }


def _has_disk(source: Source) -> bool:
    return any((job.value("disk_hit_rate") or 0.0) > 0 for job in source.jobs)


def shares(source: Source, cell: Cell) -> Shares | None:
    """None where no turn had history, or the engine does not say what it found."""
    turns = source.turns(cell)
    turns = turns[(turns["history_tokens"] > 0) & turns["gpu_hit_tokens"].notna()]
    if turns.empty:
        return None
    gpu, history = turns["gpu_hit_tokens"], turns["history_tokens"]
    on_disk = turns["disk_hit_tokens"].fillna(0)
    disk = percent(on_disk, history).value if _has_disk(source) else None
    found = Shares(percent(gpu, history), percent(gpu + turns["cpu_hit_tokens"].fillna(0) + on_disk, history), disk)
    if cell.baseline != REFERENCE or found.hit.value > 0:
        return found
    certain = replace(found.hit, ci_low=None, ci_high=None)  # it keeps nothing: its 0 is no estimate
    return replace(found, gpu=certain, hit=certain)


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


def _hit_rates_apply(source: Source) -> bool:
    """A sweep over the size, or over nothing but baselines; what else is swept has figures of its own."""
    plain = not varying_axes(source.sweep.overrides, source.trials)
    return source.has_metric("gpu_hit_rate") and (plain or axis_of(source) is not None)


@figure(
    "hit_rates",
    "Where history was found",
    shows="GPU hits, CPU hits and recomputation against the size of the cache",
    command="python runners/run.py experiment=paper/ablation_cpu_size -m",
    applies=_hit_rates_apply,
)
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


# One choice at a time


@dataclass(frozen=True, slots=True)
class Measure:
    """A column. head: over it, with the unit. of: None where a cell's trials do not record it."""

    name: str
    head: str
    of: Callable[[Source, Cell], Estimate | Shares | None]


@dataclass(frozen=True, slots=True)
class Ablation:
    """axis: what is swept; None: the baselines themselves. value: how a swept value reads. only: the baselines compared."""

    name: str
    title: str
    axis: str | None
    measures: Sequence[Measure]
    value: Callable[[Cell, str], str] = lambda cell, text: text
    only: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One baseline with one value; found: as the ablation's measures. bound: of its hits, in percent."""

    cell: Cell
    name: str
    found: Sequence[Estimate | Shares]
    bound: float | None


def _percentile(column: str, p: float, source: Source, cell: Cell) -> Estimate | None:
    values = by_conversation(values_of(source.turns(cell), column))
    return percentile(values, p) if values else None


def _sum(names: Sequence[str], scale: float, source: Source, cell: Cell) -> Estimate | None:
    parts = [cell.metric(name) for name in names]
    keys = set(parts[0]).intersection(*parts[1:])
    return over_seeds({key: sum(part[key] for part in parts) / scale for key in keys}) if keys else None


HITS = Measure("history", "history\ntokens (%)", shares)
MEDIAN = Measure("ttft_ms_p50", "first token,\nmedian (ms)", partial(_percentile, "ttft_ms", 0.5))
TAIL = Measure("ttft_ms_p90", "first token,\np90 (ms)", partial(_percentile, "ttft_ms", 0.9))
PER_TOKEN = Measure(
    "normalized_latency_ms_p90", "latency, p90\n(ms/token)", partial(_percentile, "normalized_latency_ms", 0.9)
)
OUTPUT = Measure("throughput_output_tok_s", "output\n(tokens/s)", partial(_sum, ["throughput_output_tok_s"], 1.0))
RECOMPUTED = Measure("recomputed_ktokens", "recomputed\n(1000 tokens)", partial(_sum, ["recomputed_tokens"], 1e3))
COPIED = Measure(
    "copied_mb_per_token",
    "copied, both\nways (MB/token)",
    partial(_sum, ["h2d_bytes_per_token", "d2h_bytes_per_token"], 1e6),
)


def _percent(cell: Cell, text: str) -> str:
    return f"at {float(text) * 100:g} % free"


def _cpu_tokens(cell: Cell, text: str) -> str:
    tokens = cell.trials[0].cpu_tokens
    return text if tokens is None else f"{tokens:,} tokens"


ABLATIONS = (
    Ablation("ablation_eviction", "Eviction policy", "eviction", (HITS, MEDIAN, RECOMPUTED)),
    Ablation(
        "ablation_scheduler", "Prefill and decode: together or apart", "scheduler", (MEDIAN, PER_TOKEN, OUTPUT)
    ),
    Ablation(
        "ablation_chunk", "Chunk size", "cache.chunk_tokens", (HITS, MEDIAN, COPIED), lambda cell, text: f"{text} tokens"
    ),
    Ablation("ablation_swap_out", "When swap-out starts", "scheduler.swap_out_start", (HITS, TAIL, COPIED), _percent),
    Ablation("ablation_cpu_size", "Size of the CPU tier", "cache.cpu", (HITS, MEDIAN, RECOMPUTED), _cpu_tokens),
    Ablation(
        "ablation_gpu_cache", "The CPU tier taken away", None, (HITS, MEDIAN, OUTPUT),
        only=("pensieve", "gpu_only", "stateless"),
    ),
)  # fmt: skip


def _ablation_applies(one: Ablation, source: Source) -> bool:
    if one.axis is None:  # a sweep over something else shows it there, at each value
        plain = not varying_axes(source.sweep.overrides, source.trials)
        return plain and {"pensieve", "gpu_only"} <= set(source.baselines()) and source.has_metric("gpu_hit_rate")
    return len(source.swept(one.axis)) > 1


def _ablation_plots(one: Ablation, source: Source) -> Iterable[Plot]:
    """Lines from the top down: by baseline, then by value."""
    if one.only and not source.wanted:
        source = source.of_baselines([name for name in source.baselines() if name in one.only])
    for panel in source.panels(*([one.axis] if one.axis else [])):
        lines = []
        for baseline in panel.baselines:
            cells = {cell.at.get(one.axis or "", ""): cell for cell in panel.of(baseline)}
            values = panel.values(one.axis) if one.axis else [""]
            lines += [_line(one, panel, source, cells[value], value) for value in values]
        yield _ablation_plot(one, panel, lines, _papers_policy(panel, source) if one.axis == "eviction" else "")


def _papers_policy(panel: Panel, source: Source) -> str:
    """How much more or less of the history it recomputes than each other policy, of each baseline."""
    found = []
    for baseline in panel.baselines:
        cells = {cell.at["eviction"]: cell for cell in panel.of(baseline)}
        if (paper := cells.pop(PAPERS, None)) is not None:
            turns = source.turns(paper)
            beside = {name: more for name, cell in cells.items() if (more := found_more(source.turns(cell), turns))}
            if beside:
                each = [Finding(HISTORY_RECOMPUTED, {}, PAPERS, name, more).text for name, more in beside.items()]
                found.append(f"{HISTORY_RECOMPUTED}, {PAPERS}: {', '.join(each)}")
    return "; ".join(found)


def _line(one: Ablation, panel: Panel, source: Source, cell: Cell, value: str) -> Line:
    measured = []
    for measure in one.measures:
        found = measure.of(source, cell)
        if found is None:
            raise source.lacks(f"{measure.name} of {cell.baseline}{f' with {one.axis}={value}' if one.axis else ''}")
        measured.append(found)
    shown = one.value(cell, value) if one.axis else cell.baseline
    return Line(
        cell, f"{cell.baseline}, {shown}" if one.axis and len(panel.baselines) > 1 else shown, measured, _bound(cell)
    )


def _ablation_plot(one: Ablation, panel: Panel, lines: Sequence[Line], finding: str) -> Plot:
    """finding: goes into the caption."""
    picture, [grid] = style.new_grid(0.55 + 0.21 * len(lines), 1, len(one.measures), sharey=True)
    for index, (axes, measure) in enumerate(zip(grid, one.measures, strict=True)):
        axes.set_title(measure.head, fontsize=6.5, linespacing=1.1)
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=6)
        axes.xaxis.set_major_locator(MaxNLocator(2))
        for place, line in enumerate(lines):
            found = line.found[index]
            if isinstance(found, Shares):
                _draw_shares(axes, place, found, line.name, across=True)
            else:
                gid = f"{line.name}/{measure.name}"
                marks.draw_bar(
                    axes, marks.Bar(found, style.colour(line.cell.baseline), significant(found.value), gid), place
                )
            if measure is HITS and line.bound is not None:
                axes.plot(
                    [line.bound], [place], color="black", marker="|", markersize=9, markeredgewidth=1.4, linewidth=0,
                    clip_on=False, gid=f"{line.name}/bound",
                )  # fmt: skip
        if measure is HITS:
            axes.set_xlim(0, 100)
        elif not any(found.value for line in lines if isinstance(found := line.found[index], Estimate)):
            axes.set_xlim(0, 1)  # nothing of it anywhere: no room for less than nothing
    grid[0].set_ylim(len(lines) - 0.5, -0.5)
    grid[0].set_yticks(range(len(lines)), [line.name for line in lines], fontsize=6.5)
    for label, line in zip(grid[0].get_yticklabels(), lines, strict=True):
        label.set(color=style.colour(line.cell.baseline), fontweight="bold")
    lead = "; ".join(filter(None, [finding, _lead(lines)]))
    if HITS in one.measures:
        handles = style.parts_key(
            next(list(one.parts) for line in lines for one in line.found if isinstance(one, Shares))
        )
        if any(line.bound is not None for line in lines):
            handles.append(Line2D([], [], color="black", marker="|", linewidth=0, markersize=7, label=BOUND))
            lead += f"; {BOUND}: what a policy that knows the future could find with the same room"
        style.legend(picture, handles)
    return Plot(panel, picture, lead, [_ablation_row(one, line) for line in lines])


def _lead(lines: Sequence[Line]) -> str:
    estimates = [found for line in lines for found in line.found if isinstance(found, Estimate)]
    fewest = min(found.groups for found in estimates)
    lead = "Bars with their 95 % interval over seeds and conversations"
    if any(found.ci_low is None for found in estimates) and fewest < FEWEST_GROUPS:
        lead += f"; counts and rates are means over seeds, n = {fewest}, no interval"
    return lead


def _ablation_row(one: Ablation, line: Line) -> Mapping[str, Any]:
    row: dict[str, Any] = {"baseline": line.cell.baseline}
    if one.axis:
        row[one.axis] = line.cell.at[one.axis]
    for measure, found in zip(one.measures, line.found, strict=True):
        row |= (
            _share_columns(found, found.parts)
            if isinstance(found, Shares)
            else columns(measure.name, found, prefix=f"{measure.name}_")
        )
    if HITS in one.measures:
        row["bound_hit_pct"] = line.bound
    return {**row, "trials": line.cell.ids}


for _one in ABLATIONS:
    figure(
        _one.name,
        _one.title,
        shows=f"ablation: {_one.title[0].lower()}{_one.title[1:]}",
        command=f"python runners/run.py experiment=paper/{_one.name} -m",
        applies=partial(_ablation_applies, _one),
    )(partial(_ablation_plots, _one))
