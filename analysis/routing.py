"""What session affinity is worth: history found, and first tokens of turns that return, against the number of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis import marks, style
from analysis.caches import shares
from analysis.estimates import percentile
from analysis.registry import Plot, Row, columns, figure
from analysis.results import by_conversation, values_of
from analysis.sweep import Cell, Panel, Source
from analysis.tables import estimated
from pensieve.statistics import Estimate

ROUTER, REPLICAS = "hardware.router", "hardware.replicas"


@dataclass(frozen=True, slots=True)
class Routed:
    """Of one router with so many replicas. hit: of all history tokens, in percent, in any tier of the replica that served the
    turn. median, tail: time to first token of turns that have history (ms; 50th and 90th percentile)."""

    cell: Cell
    hit: Estimate
    median: Estimate
    tail: Estimate

    @property
    def router(self) -> str:
        return self.cell.at[ROUTER]

    @property
    def replicas(self) -> int:
        return int(self.cell.at[REPLICAS])


@figure(
    "replica_routing",
    "Session affinity against other routing",
    shows="history found and time to first token of returning turns, by router, against the number of replicas",
    command="python runners/run.py experiment=replica_routing -m",
    applies=lambda source: len(source.swept(ROUTER)) > 1 and source.has_metric("gpu_hit_rate"),
)
def replica_routing(source: Source) -> Iterable[Plot]:
    for panel in source.panels(ROUTER, REPLICAS):
        for baseline in panel.baselines:
            yield _plot(panel, [_routed(source, cell) for cell in panel.of(baseline)])


def _routed(source: Source, cell: Cell) -> Routed:
    turns = source.turns(cell)
    found = shares(source, cell)
    waited = by_conversation(values_of(turns[turns["history_tokens"] > 0], "ttft_ms"))
    if found is None or not waited:
        raise source.lacks(f"turn with history of {cell.baseline} with {ROUTER}={cell.at[ROUTER]}")
    return Routed(cell, found.hit, percentile(waited, 0.5), percentile(waited, 0.9))


def _plot(panel: Panel, routed: Sequence[Routed]) -> Plot:
    ordered = sorted(routed, key=lambda one: (one.router, one.replicas))
    picture, grid = style.new_grid(3.6, 3)
    measures = (
        ("history found (%)", "hit"),
        ("first token,\nmedian (ms)", "median"),
        ("first token,\np90 (ms)", "tail"),
    )
    for [axes], (label, name) in zip(grid, measures, strict=True):
        for order, router in enumerate(dict.fromkeys(one.router for one in ordered)):
            own = [(float(one.replicas), getattr(one, name)) for one in ordered if one.router == router]
            marks.line(axes, router, own, order=order)
        axes.set_ylabel(label)
        axes.set_ylim(0, 105 if name == "hit" else None)
        marks.mark_counts(axes, sorted({one.replicas for one in ordered}))
    for [axes] in grid[:-1]:
        axes.tick_params(labelbottom=False)
    grid[-1][0].set_xlabel("replicas")
    style.legend(picture)
    lead = "Points with their 95 % interval over seeds and conversations; first tokens: of turns that have history"
    return Plot(panel, picture, lead, [_row(one) for one in ordered], [_line(one) for one in ordered])


def _row(one: Routed) -> Row:
    return {
        "baseline": one.cell.baseline,
        "router": one.router,
        "replicas": one.replicas,
        **columns("hit_pct", one.hit, prefix="hit_"),
        **columns("ttft_ms_p50", one.median, prefix="p50_"),
        **columns("ttft_ms_p90", one.tail, prefix="p90_"),
        "trials": one.cell.ids,
    }


def _line(one: Routed) -> Mapping[str, str]:
    return {
        "replicas": str(one.replicas),
        "router": one.router,
        "history found (%)": estimated(one.hit),
        "first token, median (ms)": estimated(one.median),
        "p90 (ms)": estimated(one.tail),
    }
