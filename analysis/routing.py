"""What session affinity is worth: history found, and first tokens of turns that return, against the number of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from matplotlib.figure import Figure as Picture

from analysis import marks, style
from analysis.caches import shares
from analysis.estimates import percentile
from analysis.registry import Plot, Row, columns, figure
from analysis.results import by_conversation, values_of
from analysis.sweep import Cell, Panel, Source
from analysis.tables import estimated
from pensieve.results.fields import field_of
from pensieve.statistics import Estimate

ROUTER, REPLICAS = "hardware.router", "hardware.replicas"
Found = TypeVar("Found", bound="AtReplicas")


@dataclass(frozen=True, slots=True)
class AtReplicas:
    """What one router came to with so many replicas."""

    cell: Cell

    @property
    def router(self) -> str:
        return self.cell.at[ROUTER]

    @property
    def replicas(self) -> int:
        return int(self.cell.at[REPLICAS])


@dataclass(frozen=True, slots=True)
class Routed(AtReplicas):
    """hit: of all history tokens, in percent, in any tier of the replica that served the turn. median, tail: time to first
    token of turns that have history (ms; 50th and 90th percentile)."""

    hit: Estimate
    median: Estimate
    tail: Estimate


def in_order(found: Iterable[Found]) -> list[Found]:
    """By router, then by the number of replicas."""
    return sorted(found, key=lambda one: (one.router, one.replicas))


def failing(cells: Iterable[Cell]) -> str:
    """What a title adds where replicas fail: how often each of them does."""
    means = {field_of(trial, "hardware.failure_s") for cell in cells for trial in cell.trials} - {None}
    each = " or ".join(f"{mean:g}" for mean in sorted(map(float, means)))
    return f", each replica failing every {each} s or so" if means else ""


def draw_over_replicas(found: Sequence[Found], height_in: float, measures: Sequence[tuple[str, str]]) -> Picture:
    """Axes below each other, with a line a router against the number of replicas.

    found: in order. measures: the label of each axis, and the field of `found` that holds its estimates.
    """
    picture, grid = style.new_grid(height_in, len(measures))
    for [axes], (label, name) in zip(grid, measures, strict=True):
        axes.set_ymargin(0.12)  # the highest marker whole
        for order, router in enumerate(dict.fromkeys(one.router for one in found)):
            own = [(float(one.replicas), getattr(one, name)) for one in found if one.router == router]
            marks.line(axes, router, own, order=order)
        axes.set_ylabel(label)
        if marks.wide([getattr(one, name).value for one in found]):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        marks.mark_counts(axes, sorted({one.replicas for one in found}))
    for [axes] in grid[:-1]:
        axes.tick_params(labelbottom=False)
    grid[-1][0].set_xlabel("replicas")
    style.legend(picture)
    return picture


@figure(
    "replica_routing",
    "Session affinity against other routing",
    shows="history found and time to first token of returning turns, by router, against the number of replicas",
    command="python runners/run.py experiment=replica_routing -m",
    applies=lambda source: source.compares(ROUTER) and source.has_metric("gpu_hit_rate"),
)
def replica_routing(source: Source) -> Iterable[Plot]:
    for panel in source.panels(ROUTER, REPLICAS):
        for baseline in panel.baselines:
            yield _plot(panel, [_routed(source, cell) for cell in panel.of(baseline)], replica_routing.title)


def _routed(source: Source, cell: Cell) -> Routed:
    turns = source.turns(cell)
    found = shares(source, cell)
    waited = by_conversation(values_of(turns[turns["history_tokens"] > 0], "ttft_ms"))
    if found is None or not waited:
        raise source.lacks(f"turn with history of {cell.baseline} with {ROUTER}={cell.at[ROUTER]}")
    return Routed(cell, found.hit, percentile(waited, 0.5), percentile(waited, 0.9))


def _plot(panel: Panel, routed: Sequence[Routed], title: str) -> Plot:
    ordered = in_order(routed)
    measures = (
        ("history found (%)", "hit"),
        ("first token,\nmedian (ms)", "median"),
        ("first token,\np90 (ms)", "tail"),
    )
    picture = draw_over_replicas(ordered, 3.6, measures)
    lead = "Points with their 95 % interval over seeds and conversations; first tokens: of turns that have history"
    title += failing(one.cell for one in ordered)
    return Plot(panel, picture, lead, [_row(one) for one in ordered], [_line(one) for one in ordered], title)


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
