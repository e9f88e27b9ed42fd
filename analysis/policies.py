"""policy_gap, policy_table: how far each eviction policy goes from least recently used to the offline bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.lines import Line2D

from analysis import marks, style, tables
from analysis.caches import BOUND, MEDIAN, OUTPUT, TAIL, Measure, Shares, axis_of, shares, short
from analysis.estimates import as_estimate
from analysis.marks import Bar, Group
from analysis.registry import Plot, Row, columns, figure
from analysis.results import PAPERS, START, found_more, gap_closed
from analysis.sweep import Cell, Panel, Source
from pensieve.statistics import Estimate, PairedRatio

AXIS = "eviction"
COMMAND = "python runners/run.py experiment=policies -m"
TIMES = (MEDIAN, TAIL, OUTPUT)
LEAST = -150.0  # percent; what loses more would leave all others no width
_MORE = f"more_than_{PAPERS}_pct"
_MORE_COLUMNS = tuple(columns(_MORE, Estimate(0.0, None, None, 0, 0), prefix="more_"))


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy with one size of cache. hits, closed: in percent; bound: of START's trials. closed: None for START, and
    where there is no gap. more: percent of the history that it finds more than PAPERS; None for that one, and without it."""

    name: str
    size: str
    cell: Cell
    hits: Shares
    bound: float
    closed: Estimate | None
    more: Estimate | None


def _applies(source: Source) -> bool:
    swept = source.swept(AXIS)
    return len(swept) > 1 and START in swept and source.has_metric("bound_hit_rate")


def read(source: Source) -> Iterator[tuple[Panel, Mapping[str, list[Policy]]]]:
    """A panel a baseline and whatever else is swept: by size of the cache, the policies in the order of their share."""
    size = axis_of(source)
    for name in source.baselines():
        own = source.of_baselines([name])
        if not own.has_metric("bound_hit_rate"):
            continue
        for panel in own.panels(AXIS, *([size] if size else [])):
            groups: dict[str, list[Policy]] = {}
            for value in panel.values(size) if size else [""]:
                cells = {cell.at[AXIS]: cell for cell in panel.cells if not size or cell.at[size] == value}
                found = [_policy(own, cell, cells, _label(cell, size)) for cell in cells.values()]
                groups[found[0].size] = sorted(found, key=lambda one: -one.hits.hit.value)
            yield panel, groups


def _policy(source: Source, cell: Cell, cells: Mapping[str, Cell], size: str) -> Policy:
    """cells: by policy, of the same size."""
    name, hits, start = cell.at[AXIS], shares(source, cell), cells[START]
    if hits is None:
        raise source.lacks(f"turn with history under {name}")
    bounds = bounds_of(start)
    if not bounds:
        raise source.lacks(f"bound of {START}")
    closed = None if name == START else share_closed(source, cell, start)
    papers = cells.get(PAPERS)
    more = None if papers is None or name == PAPERS else found_more(source.turns(cell), source.turns(papers))
    percent = None if more is None else in_percent(more)
    return Policy(name, size, cell, hits, 100 * fmean(bounds.values()), closed, percent)


def bounds_of(cell: Cell) -> dict[int, float]:
    """Seed -> what its trials could have found at most, as a share of history."""
    bounds: dict[int, list[float]] = {}
    for (seed, _), bound in cell.metric("bound_hit_rate").items():
        bounds.setdefault(seed, []).append(bound)
    return {seed: fmean(values) for seed, values in bounds.items()}


def share_closed(source: Source, cell: Cell, start: Cell) -> Estimate | None:
    """See gap_closed: in percent, with the interval of the conversations or seeds that it is paired by."""
    ratio = gap_closed(source.turns(cell), source.turns(start), bounds_of(start))
    return None if ratio is None else in_percent(ratio)


def in_percent(ratio: PairedRatio) -> Estimate:
    whole = as_estimate(ratio)
    low, high = (None if end is None else 100 * end for end in (whole.ci_low, whole.ci_high))
    return Estimate(100 * whole.value, low, high, whole.n, whole.groups)


def _label(cell: Cell, size: str | None) -> str:
    """Both tiers together, which is what the bound is of."""
    trial = cell.trials[0]
    if size is None or trial.gpu_tokens is None:
        return "" if size is None else cell.at[size]
    return f"{short(trial.gpu_tokens + (trial.cpu_tokens or 0))} tokens"


@figure(
    "policy_gap",
    "From least recently used to the bound",
    shows="the share of the gap between least recently used and the offline bound that each eviction policy closes",
    command=COMMAND,
    applies=_applies,
)
def policy_gap(source: Source) -> Iterator[Plot]:
    """Bars begin at what START finds, 0 %, and a line at 100 % is the bound; beside each bar its hit rate."""
    for panel, by_size in read(source):
        sections = [
            [_bars(one) for one in policies if one.name == START or one.closed is not None]
            for policies in by_size.values()
        ]
        picture, grid = marks.bar_grid(sections)
        for [axes], groups, (size, policies) in zip(grid, sections, by_size.items(), strict=True):
            marks.bars(axes, groups)
            axes.axvline(100, color="black", linewidth=1.0, linestyle="--", gid=f"{size}/bound")
            start = next(one for one in policies if one.name == START)
            where = f"{size}: " if size else ""
            said = f"{where}{START} {start.hits.hit.value:.1f} % of history, bound {start.bound:.1f} %"
            axes.set_title(said, loc="right", fontsize=6.5)  # towards the names, which leave the axes little width
            axes.margins(x=0.12)
        left = grid[-1][0].get_xlim()[0]
        grid[-1][0].set_xlim(left=max(left, LEAST))
        grid[-1][0].set_xlabel(f"gap from {START} to the bound closed (%)")
        style.legend(picture, [Line2D([], [], color="black", linewidth=1, linestyle="--", label=BOUND)])
        lead = (
            f"Bars: (hits - {START}'s) / (bound - {START}'s) in history tokens, paired by seed and conversation, with the "
            "95 % interval; beside each the share of history found"
        )
        lead += f". What is below {LEAST:g} % is cut off there" if left < LEAST else ""
        yield Plot(panel, picture, lead, [_row(one) for policies in by_size.values() for one in policies])


def _bars(one: Policy) -> Group:
    found = one.closed or Estimate(0.0, None, None, one.hits.hit.n, one.hits.hit.groups)
    colour = style.colour(one.cell.baseline) if one.name != START else style.GREY
    gid = f"{one.size}/{one.name}" if one.size else one.name
    return Group(one.name, colour, [Bar(found, colour, f"{one.hits.hit.value:.1f} %", gid)])


def _row(one: Policy) -> Row:
    return {
        "eviction": one.name,
        "size": one.size,
        "hit_pct": one.hits.hit.value,
        "bound_pct": one.bound,
        **columns("gap_closed_pct", one.closed or Estimate(0.0, None, None, one.hits.hit.n, one.hits.hit.groups)),
        **(columns(_MORE, one.more, prefix="more_") if one.more else dict.fromkeys(_MORE_COLUMNS)),
        "trials": one.cell.ids,
    }


@figure(
    "policy_table",
    "Eviction policies",
    shows="hits, the gap closed, times to first token and throughput of each eviction policy",
    command=COMMAND,
    applies=_applies,
)
def policy_table(source: Source) -> Iterator[Plot]:
    for panel, by_size in read(source):
        lines, rows = [], []
        for policies in by_size.values():
            for one in policies:
                times = {measure.name: measure.of(source, one.cell) for measure in TIMES}
                lines.append(_line(one, times))
                rows.append({**_row(one), **_times_row(TIMES, times)})
        lead = f"Hits: % of history tokens. Closed: % of the gap from {START} to the bound. "
        lead += f"More: % of history found more than by {PAPERS}. Below a value its 95 % interval"
        yield Plot(panel, None, lead, rows, lines)


def _line(one: Policy, times: Mapping[str, Estimate | Shares | None]) -> dict[str, str]:
    heads = {"ttft_ms_p50": "TTFT p50\n(ms)", "ttft_ms_p90": "p90", "throughput_output_tok_s": "out\ntok/s"}
    return {
        "policy": one.name,
        **({"cache": one.size.removesuffix(" tokens")} if one.size else {}),
        "hits": tables.estimated(one.hits.hit),
        "bound": f"{one.bound:.1f}",
        "closed": tables.estimated(one.closed),
        "more": tables.estimated(one.more),
        **{
            heads[name]: tables.estimated(found if isinstance(found, Estimate) else None)
            for name, found in times.items()
        },
    }


def _times_row(measures: Sequence[Measure], times: Mapping[str, Estimate | Shares | None]) -> Row:
    row: dict[str, object] = {}
    for measure in measures:
        found = times[measure.name]
        if isinstance(found, Estimate):
            row |= columns(measure.name, found, prefix=f"{measure.name}_")
    return row
