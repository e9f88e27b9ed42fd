"""What a hint is worth to eviction: hit rates, and the share of the way from least recently used to the bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis import marks, style
from analysis.caches import BOUND, shares
from analysis.estimates import over_seeds
from analysis.policies import LEAST, share_closed
from analysis.registry import Plot, Row, columns, figure
from analysis.sweep import Cell, Panel, Source
from analysis.tables import estimated
from pensieve.statistics import Estimate

AXIS = "eviction"
NONE = "lru"
KNOWN = {
    NONE: "no hint: least recently used",
    "stop_reason": "stop reason, a priority",
    "ttl": "stop reason, a time to live",
    "hinted": "seconds the client expects",
    "learned_return": "learned times of return",
    "oracle_hint": "“soon”, always right",
    "belady": "time of return (belady)",
}
NOISY = "noisy_hint_"


@dataclass(frozen=True, slots=True)
class Worth:
    """Of one policy, in percent. bound: of the hits that its own requests allowed. gap: of what lies between least recently
    used and the bound of its trials, the share that this policy closes; below 0: it finds less than without a hint. None
    where a trial lacks a rate, or there is no gap."""

    cell: Cell
    name: str
    hit: Estimate
    bound: float | None
    gap: Estimate | None


def _name(policy: str) -> str:
    return f"“soon”, wrong {policy.removeprefix(NOISY)} %" if policy.startswith(NOISY) else KNOWN.get(policy, policy)


def _applies(source: Source) -> bool:
    swept = source.swept(AXIS)
    told = [name for name in swept if name.startswith(NOISY) or name in ("stop_reason", "ttl", "hinted", "oracle_hint")]
    return NONE in swept and bool(told) and source.has_metric("gpu_hit_rate")


@figure(
    "value_of_hint",
    "What a hint is worth to eviction",
    shows="hit rate and the share of the gap to the bound, by what a policy is told",
    command="python runners/run.py experiment=value_of_hint workload.path=FOLDER -m",
    applies=_applies,
)
def value_of_hint(source: Source) -> Iterable[Plot]:
    for panel in source.panels(AXIS):
        for baseline in panel.baselines:
            cells = {cell.at[AXIS]: cell for cell in panel.of(baseline)}
            if NONE not in cells:
                raise source.lacks(f"eviction={NONE} of {baseline}")
            named = [*KNOWN, *sorted(set(cells) - set(KNOWN))]
            noisy = sorted((name for name in cells if name.startswith(NOISY)), key=_error, reverse=True)
            last = [name for name in ("oracle_hint", "belady") if name in cells]
            order = [*(name for name in named if name in cells and name not in (*noisy, *last)), *noisy, *last]
            yield _plot(panel, [_worth(source, cells[name], cells[NONE], name) for name in order])


def _error(policy: str) -> float:
    digits = policy.removeprefix(NOISY)
    return float(digits) if digits.isdigit() else 0.0


def _worth(source: Source, cell: Cell, without: Cell, policy: str) -> Worth:
    found = shares(source, cell)
    if found is None:
        raise source.lacks(f"turn with history whose engine says what it found, of {policy}")
    bound = cell.metric("bound_hit_rate")
    gap = share_closed(source, cell, without)
    return Worth(cell, _name(policy), found.hit, 100 * over_seeds(bound).value if bound else None, gap)


def _plot(panel: Panel, worth: Sequence[Worth]) -> Plot:
    groups, gaps = [], []
    for one in worth:
        colour = style.colour(one.cell.baseline)
        groups.append(
            marks.Group(one.name, "black", [marks.Bar(one.hit, colour, f"{one.hit.value:.1f}", f"{one.name}/hit")])
        )
        bars = [] if one.gap is None else [marks.Bar(one.gap, colour, f"{round(one.gap.value):+d}", f"{one.name}/gap")]
        gaps.append(marks.Group(one.name, "black", bars, room=1))
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
    known = [one.bound for one in worth if one.bound is not None]
    lead = "Bars with their 95 % interval over seeds (and, of hits, conversations)"
    if known:
        left.axvline(known[0], color="black", linewidth=0.8, linestyle=":", gid="bound", zorder=0)
        for text in left.texts:  # the values stand beside the bars, where the line passes
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        lead += f"; dotted: the {BOUND} of the trials without a hint. The gap of each seed is taken against itself"
    return Plot(panel, picture, lead, [_row(one) for one in worth], [_line(one) for one in worth])


def _row(one: Worth) -> Row:
    gap = columns("gap_closed_pct", one.gap, prefix="gap_") if one.gap else dict.fromkeys(_GAP)
    return {
        "baseline": one.cell.baseline,
        AXIS: one.cell.at[AXIS],
        **columns("hit_pct", one.hit, prefix="hit_"),
        "bound_hit_pct": one.bound,
        **gap,
        "trials": one.cell.ids,
    }


_GAP = tuple(columns("gap_closed_pct", Estimate(0.0, None, None, 0, 0), prefix="gap_"))


def _line(one: Worth) -> Mapping[str, str]:
    return {
        "told": one.name,
        "history found (%)": estimated(one.hit),
        "bound (%)": "–" if one.bound is None else f"{one.bound:.1f}",
        "gap closed (%)": estimated(one.gap),
    }
