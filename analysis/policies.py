"""How far each eviction policy goes from least recently used to the offline bound, and what a hint is worth to it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from matplotlib.lines import Line2D

from analysis import marks, style
from analysis.caches import BOUND, axis_of, short
from analysis.marks import Bar, Group
from analysis.quantities import Quantity, Shares, as_estimate, columns, found_pct, moved, over_seeds, seed_means, shares
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
    return moved(as_estimate(ratio), lambda share: 100 * share)


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


def has_hints(source: Source) -> bool:
    swept = source.swept(AXIS)
    told = [name for name in swept if name.startswith(NOISY) or name in ("stop_reason", "ttl", "hinted", "oracle_hint")]
    return START in swept and bool(told) and source.has_metric("gpu_hit_rate")


def value_of_hint(source: Source) -> Iterator[Plot]:
    """Of each policy the hits, beside the bound of its own requests, and the share that it closes of what lies between least
    recently used and the bound; below 0: it finds less than without a hint."""
    for panel in source.panels(AXIS):
        for baseline in panel.baselines:
            cells = {cell.at[AXIS]: cell for cell in panel.of(baseline)}
            if START not in cells:
                raise source.lacks(f"eviction={START} of {baseline}")
            yield _hint_plot(source, panel, {name: cells[name] for name in _in_order(cells)})


def _in_order(policies: Collection[str]) -> list[str]:
    """From no hint to what is always right, the noisy ones in between by how often they are wrong."""

    def wrong_pct(policy: str) -> float:
        digits = policy.removeprefix(NOISY)
        return float(digits) if digits.isdigit() else 0.0

    noisy = sorted((name for name in policies if name.startswith(NOISY)), key=wrong_pct, reverse=True)
    last = [name for name in ("oracle_hint", "belady") if name in policies]
    named = [*KNOWN, *sorted(set(policies) - set(KNOWN))]
    return [*(name for name in named if name in policies and name not in (*noisy, *last)), *noisy, *last]


def _hint_plot(source: Source, panel: Panel, cells: Mapping[str, Cell]) -> Plot:
    groups, gaps, rows, table, bounds = [], [], [], [], []
    for policy, cell in cells.items():
        name = (
            f"“soon”, wrong {policy.removeprefix(NOISY)} %" if policy.startswith(NOISY) else KNOWN.get(policy, policy)
        )
        hit, bound, gap = (
            found_pct(source, cell),
            cell.metric("bound_hit_rate"),
            share_closed(source, cell, cells[START]),
        )
        if hit is None:
            raise source.lacks(f"turn with history whose engine says what it found, of {policy}")
        bound_pct = 100 * over_seeds(bound).value if bound else None
        bounds += [] if bound_pct is None else [bound_pct]
        colour = style.colour(cell.baseline)
        groups.append(Group(name, "black", [Bar(hit, colour, f"{hit.value:.1f}", f"{name}/hit")]))
        bars = [] if gap is None else [Bar(gap, colour, f"{round(gap.value):+d}", f"{name}/gap")]
        gaps.append(Group(name, "black", bars, room=1))
        rows.append(
            {
                "baseline": cell.baseline,
                AXIS: policy,
                **columns("hit_pct", hit, prefix="hit_"),
                "bound_hit_pct": bound_pct,
                **columns("gap_closed_pct", gap, prefix="gap_"),
                "trials": cell.ids,
            }
        )
        table.append(
            {
                "told": name,
                "history found (%)": tables.estimated(hit),
                "bound (%)": tables.NONE if bound_pct is None else f"{bound_pct:.1f}",
                "gap closed (%)": tables.estimated(gap),
            }
        )
    picture, [[left, right]] = marks.bar_grid([groups], columns=2)
    marks.bars(left, groups)
    marks.bars(right, gaps, names=False)
    left.set_xlim(0, 100)
    left.set_xlabel("history found (%)")
    right.set_xlabel("gap closed (%)")
    right.margins(x=0.2)  # for the numbers beyond the intervals
    right.autoscale_view()
    right.set_xlim(left=max(right.get_xlim()[0], LEAST))
    lead = "Bars with their 95 % interval over seeds (and, of hits, conversations)"
    if bounds:
        left.axvline(bounds[0], color="black", linewidth=0.8, linestyle=":", gid="bound", zorder=0)
        for text in left.texts:  # the values stand beside the bars, where the line passes
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        lead += f"; dotted: the {BOUND} of the trials without a hint. The gap of each seed is taken against itself"
    return Plot(panel, picture, lead, rows, table)
