"""How far each eviction policy goes from least recently used to the offline bound, and what a hint is worth to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from matplotlib.lines import Line2D

from analysis import marks, style
from analysis.caches import BOUND, axis_of, short
from analysis.marks import Bar, Group
from analysis.quantities import Quantity, Shares, as_estimate, columns, over_seeds, seed_means, shares
from analysis.registry import Plot, Row
from analysis.sweep import Cell, Panel, Source
from pensieve.lab import tables
from pensieve.lab.results.findings import REFERENCE
from pensieve.lab.results.frame import PAPERS, START, found_more, gap_closed
from pensieve.lab.statistics import Estimate, PairedRatio

AXIS = "eviction"
TIMES = (
    Quantity(of="ttft_ms", how="p50", name="ttft_ms_p50", prefix="ttft_ms_p50_", says="TTFT p50\n(ms)"),
    Quantity(of="ttft_ms", how="p90", name="ttft_ms_p90", prefix="ttft_ms_p90_", says="p90"),
    Quantity(
        of="throughput_output_tok_s", how="seeds", name="throughput_output_tok_s", prefix="throughput_output_tok_s_",
        says="out\ntok/s",
    ),
)  # fmt: skip
LEAST = -150.0  # percent; what loses more would leave all others no width
KNOWN = {
    START: "no hint: least recently used",
    "stop_reason": "stop reason, a priority",
    "ttl": "stop reason, a time to live",
    "hinted": "seconds the client expects",
    "learned_return": "learned times of return",
    "oracle_hint": "“soon”, always right",
    "belady": "time of return (belady)",
}
NOISY = "noisy_hint_"


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


def has_gap(source: Source) -> bool:
    swept = source.swept(AXIS)
    return len(swept) > 1 and START in swept and source.has_metric("bound_hit_rate")


def read(source: Source) -> Iterator[tuple[Panel, Mapping[str, list[Policy]]]]:
    """A panel a baseline and whatever else is swept: by size of the cache, the policies in the order of their share."""
    size = axis_of(source)
    owns = {name: source.of_baselines([name]) for name in source.baselines()}
    bounded = {name: own for name, own in owns.items() if name != REFERENCE and own.has_metric("bound_hit_rate")}
    for name, own in bounded.items():
        for panel in own.panels(AXIS, *([size] if size else [])):
            groups: dict[str, list[Policy]] = {}
            for value in panel.values(size) if size else [""]:
                cells = {cell.at[AXIS]: cell for cell in panel.cells if not size or cell.at[size] == value}
                found = [_policy(own, cell, cells, _label(cell, size)) for cell in cells.values()]
                groups[found[0].size] = sorted(found, key=lambda one: -one.hits.hit.value)
            group = {"baseline": name, **panel.group} if len(bounded) > 1 else panel.group
            yield replace(panel, group=group), groups


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
    return seed_means(cell.metric("bound_hit_rate"))


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
            "95 % interval. Beside each: the hit rate of the history"
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
        **columns(f"more_than_{PAPERS}_pct", one.more, prefix="more_"),
        "trials": one.cell.ids,
    }


def policy_table(source: Source) -> Iterator[Plot]:
    for panel, by_size in read(source):
        lines, rows = [], []
        for one in (one for policies in by_size.values() for one in policies):
            times = {time: time.found(source, one.cell) for time in TIMES}
            lines.append(
                {
                    "policy": one.name,
                    **({"cache": one.size.removesuffix(" tokens")} if one.size else {}),
                    "hits": tables.estimated(one.hits.hit),
                    "bound": f"{one.bound:.1f}",
                    "closed": tables.estimated(one.closed),
                    "more": tables.estimated(one.more),
                    **{time.says: tables.estimated(own) for time, own in times.items() if not isinstance(own, float)},
                }
            )
            known = [time.columns(own) for time, own in times.items() if own is not None]
            rows.append({**_row(one), **{name: value for own in known for name, value in own.items()}})
        lead = f"Hits: % of history tokens. Closed: % of the gap from {START} to the bound. "
        lead += f"More: % of history found more than by {PAPERS}. Below a value its 95 % interval"
        yield Plot(panel, None, lead, rows, lines)


# Hints


@dataclass(frozen=True, slots=True)
class Hinted:
    """Of one policy, in percent. bound: of the hits that its own requests allowed. gap: of what lies between least recently
    used and the bound of its trials, the share that this policy closes; below 0: it finds less than without a hint. None
    where a trial lacks a rate, or there is no gap."""

    cell: Cell
    name: str
    hit: Estimate
    bound: float | None
    gap: Estimate | None


def _hint_name(policy: str) -> str:
    return f"“soon”, wrong {policy.removeprefix(NOISY)} %" if policy.startswith(NOISY) else KNOWN.get(policy, policy)


def has_hints(source: Source) -> bool:
    swept = source.swept(AXIS)
    told = [name for name in swept if name.startswith(NOISY) or name in ("stop_reason", "ttl", "hinted", "oracle_hint")]
    return START in swept and bool(told) and source.has_metric("gpu_hit_rate")


def value_of_hint(source: Source) -> Iterable[Plot]:
    for panel in source.panels(AXIS):
        for baseline in panel.baselines:
            cells = {cell.at[AXIS]: cell for cell in panel.of(baseline)}
            if START not in cells:
                raise source.lacks(f"eviction={START} of {baseline}")
            named = [*KNOWN, *sorted(set(cells) - set(KNOWN))]
            noisy = sorted((name for name in cells if name.startswith(NOISY)), key=_wrong_pct, reverse=True)
            last = [name for name in ("oracle_hint", "belady") if name in cells]
            order = [*(name for name in named if name in cells and name not in (*noisy, *last)), *noisy, *last]
            yield _hint_plot(panel, [_hinted(source, cells[name], cells[START], name) for name in order])


def _wrong_pct(policy: str) -> float:
    digits = policy.removeprefix(NOISY)
    return float(digits) if digits.isdigit() else 0.0


def _hinted(source: Source, cell: Cell, without: Cell, policy: str) -> Hinted:
    found = shares(source, cell)
    if found is None:
        raise source.lacks(f"turn with history whose engine says what it found, of {policy}")
    bound = cell.metric("bound_hit_rate")
    gap = share_closed(source, cell, without)
    return Hinted(cell, _hint_name(policy), found.hit, 100 * over_seeds(bound).value if bound else None, gap)


def _hint_plot(panel: Panel, hinted: Sequence[Hinted]) -> Plot:
    groups, gaps = [], []
    for one in hinted:
        colour = style.colour(one.cell.baseline)
        groups.append(Group(one.name, "black", [Bar(one.hit, colour, f"{one.hit.value:.1f}", f"{one.name}/hit")]))
        bars = [] if one.gap is None else [Bar(one.gap, colour, f"{round(one.gap.value):+d}", f"{one.name}/gap")]
        gaps.append(Group(one.name, "black", bars, room=1))
    picture, grid = marks.bar_grid([groups], columns=2)
    left, right = grid[0]
    marks.bars(left, groups)
    marks.bars(right, gaps, names=False)
    left.set_xlim(0, 100)
    left.set_xlabel("history found (%)")
    right.set_xlabel("gap closed (%)")
    right.margins(x=0.2)  # for the numbers beyond the intervals
    right.autoscale_view()
    right.set_xlim(left=max(right.get_xlim()[0], LEAST))
    known = [one.bound for one in hinted if one.bound is not None]
    lead = "Bars with their 95 % interval over seeds (and, of hits, conversations)"
    if known:
        left.axvline(known[0], color="black", linewidth=0.8, linestyle=":", gid="bound", zorder=0)
        for text in left.texts:  # the values stand beside the bars, where the line passes
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        lead += f"; dotted: the {BOUND} of the trials without a hint. The gap of each seed is taken against itself"
    return Plot(panel, picture, lead, [_hint_row(one) for one in hinted], [_hint_line(one) for one in hinted])


def _hint_row(one: Hinted) -> Row:
    return {
        "baseline": one.cell.baseline,
        AXIS: one.cell.at[AXIS],
        **columns("hit_pct", one.hit, prefix="hit_"),
        "bound_hit_pct": one.bound,
        **columns("gap_closed_pct", one.gap, prefix="gap_"),
        "trials": one.cell.ids,
    }


def _hint_line(one: Hinted) -> Mapping[str, str]:
    return {
        "told": one.name,
        "history found (%)": tables.estimated(one.hit),
        "bound (%)": tables.NONE if one.bound is None else f"{one.bound:.1f}",
        "gap closed (%)": tables.estimated(one.gap),
    }
