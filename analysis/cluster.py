"""Replicas: what session affinity is worth, latency and skew against their number, and what it is worth that KV moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from matplotlib.figure import Figure as Picture

from analysis import marks, style
from analysis.caches import shares
from analysis.estimates import mean, over_seeds, percentile
from analysis.registry import Plot, Row, columns, figure
from analysis.sweep import Cell, Panel, Source
from analysis.tables import estimated
from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import by_conversation, values_of
from pensieve.lab.results.trials import field_of
from pensieve.lab.statistics import Estimate

ROUTER, REPLICAS = "hardware.router", "hardware.replicas"
MIGRATION, NETWORK = "hardware.migration", "hardware.network_gbps"
COUNTED = ("moved_turns", "restarted_requests", "replica_failures")
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
    command="python runners/run.py experiment=cluster/replica_routing -m",
    applies=lambda source: source.compares(ROUTER) and source.has_metric("gpu_hit_rate"),
)
def replica_routing(source: Source) -> Iterable[Plot]:
    for panel in source.panels(ROUTER, REPLICAS):
        for baseline in panel.baselines:
            yield _routed_plot(panel, [_routed(source, cell) for cell in panel.of(baseline)], replica_routing.title)


def _routed(source: Source, cell: Cell) -> Routed:
    turns = source.turns(cell)
    found = shares(source, cell)
    waited = by_conversation(values_of(turns[turns["history_tokens"] > 0], "ttft_ms"))
    if found is None or not waited:
        raise source.lacks(f"turn with history of {cell.baseline} with {ROUTER}={cell.at[ROUTER]}")
    return Routed(cell, found.hit, percentile(waited, 0.5), percentile(waited, 0.9))


def _routed_plot(panel: Panel, routed: Sequence[Routed], title: str) -> Plot:
    ordered = in_order(routed)
    measures = (
        ("history found (%)", "hit"),
        ("first token,\nmedian (ms)", "median"),
        ("first token,\np90 (ms)", "tail"),
    )
    picture = draw_over_replicas(ordered, 3.6, measures)
    lead = "Points with their 95 % interval over seeds and conversations; first tokens: of turns that have history"
    title += failing(one.cell for one in ordered)
    return Plot(
        panel, picture, lead, [_routed_row(one) for one in ordered], [_routed_line(one) for one in ordered], title
    )


def _routed_row(one: Routed) -> Row:
    return {
        "baseline": one.cell.baseline,
        "router": one.router,
        "replicas": one.replicas,
        **columns("hit_pct", one.hit, prefix="hit_"),
        **columns("ttft_ms_p50", one.median, prefix="p50_"),
        **columns("ttft_ms_p90", one.tail, prefix="p90_"),
        "trials": one.cell.ids,
    }


def _routed_line(one: Routed) -> Mapping[str, str]:
    return {
        "replicas": str(one.replicas),
        "router": one.router,
        "history found (%)": estimated(one.hit),
        "first token, median (ms)": estimated(one.median),
        "p90 (ms)": estimated(one.tail),
    }


@dataclass(frozen=True, slots=True)
class Spread(AtReplicas):
    """median, tail: time to first token of all turns (ms; 50th and 99th percentile). lost: of all history tokens, in percent,
    those that were computed again. skew: requests under way on the fullest replica over those on all of them but as many,
    means over the readings of a trial. counted: each of COUNTED, over its trials."""

    median: Estimate
    tail: Estimate
    lost: Estimate
    skew: Estimate
    counted: dict[str, float]


@figure(
    "cluster",
    "A cluster, simulated",
    shows="time to first token, history computed again and skew, by router, against the number of replicas",
    command="python runners/run.py experiment=cluster/scale -m",
    applies=lambda source: source.compares(REPLICAS) and source.has_metric("moved_turns"),
)
def cluster(source: Source) -> Iterable[Plot]:
    for panel in source.panels(ROUTER, REPLICAS):
        for baseline in panel.baselines:
            yield _spread_plot(panel, [_spread(source, cell) for cell in panel.of(baseline)], cluster.title)


def _spread(source: Source, cell: Cell) -> Spread:
    turns = source.turns(cell)
    waited = by_conversation(values_of(turns, "ttft_ms"))
    found = shares(source, cell)
    if found is None or not waited:
        raise source.lacks(f"turn with history of {cell.baseline} with {REPLICAS}={cell.at[REPLICAS]}")
    lost = Estimate(
        100 - found.hit.value,
        None if found.hit.ci_high is None else 100 - found.hit.ci_high,
        None if found.hit.ci_low is None else 100 - found.hit.ci_low,
        found.hit.n,
        found.hit.groups,
    )
    skews = {(trial.seed, trial.repeat): _skew(source, trial.id, int(cell.at[REPLICAS])) for trial in cell.trials}
    counted = {name: sum(cell.metric(name).values()) for name in COUNTED}
    return Spread(cell, percentile(waited, 0.5), percentile(waited, 0.99), lost, over_seeds(skews), counted)


def _skew(source: Source, trial_id: int, replicas: int) -> float:
    readings = source.store.samples_of(trial_id)
    fullest, under_way = (
        [one.value for one in readings if one.name == name and one.value is not None]
        for name in ("fullest_replica", "requests_under_way")
    )
    if not any(under_way):
        raise MissingSeries(f"Trial {trial_id} has no readings of its replicas; run it again.")
    return fmean(fullest) / (fmean(under_way) / replicas)


def _spread_plot(panel: Panel, spreads: Sequence[Spread], title: str) -> Plot:
    ordered = in_order(spreads)
    measures = (
        ("first token,\nmedian (ms)", "median"),
        ("first token,\np99 (ms)", "tail"),
        ("history computed\nagain (%)", "lost"),
        ("fullest replica\nover the mean", "skew"),
    )
    picture = draw_over_replicas(ordered, 4.6, measures)
    lead = (
        "Points with their 95 % interval over seeds and conversations. TTFT of all turns, percentiles by nearest rank. "
        "Fullest replica: requests under way on it over the mean of all replicas"
    )
    title += failing(one.cell for one in ordered)
    rows, table = [_spread_row(one) for one in ordered], [_spread_line(one) for one in ordered]
    return Plot(panel, picture, lead, rows, table, title)


def _spread_row(one: Spread) -> Row:
    return {
        "baseline": one.cell.baseline,
        "router": one.router,
        "replicas": one.replicas,
        **columns("ttft_ms_p50", one.median, prefix="p50_"),
        **columns("ttft_ms_p99", one.tail, prefix="p99_"),
        **columns("recomputed_pct", one.lost, prefix="recomputed_"),
        **columns("skew", one.skew, prefix="skew_"),
        **one.counted,
        "trials": one.cell.ids,
    }


def _spread_line(one: Spread) -> dict[str, str]:
    return {
        "replicas": f"{one.replicas:,}",
        "router": one.router,
        "first token, median (ms)": estimated(one.median),
        "p99 (ms)": estimated(one.tail),
        "computed again (%)": estimated(one.lost),
        "fullest over mean": estimated(one.skew),
        "moved turns": f"{one.counted['moved_turns']:,.0f}",
        "failures": f"{one.counted['replica_failures']:,.0f}",
        "begun anew": f"{one.counted['restarted_requests']:,.0f}",
    }


@dataclass(frozen=True, slots=True)
class Moved:
    """Of one network and one way to decide. waited: mean time to first token of turns that have history (ms). sent: bytes
    of KV a turn with history."""

    cell: Cell
    waited: Estimate
    sent: float

    @property
    def when(self) -> str:
        return self.cell.at[MIGRATION]

    @property
    def gbps(self) -> float:
        return float(self.cell.at[NETWORK])


@figure(
    "migration",
    "KV that moves, or is computed again",
    shows="time to first token of turns that return, by what becomes of their KV, against the network between replicas",
    command="python runners/run.py experiment=cluster/migration -m",
    applies=lambda source: source.compares(MIGRATION) and source.compares(NETWORK),
)
def migration(source: Source) -> Iterable[Plot]:
    for panel in source.panels(MIGRATION, NETWORK):
        for baseline in panel.baselines:
            yield _moved_plot(panel, [_moved(source, cell) for cell in panel.of(baseline)])


def _moved(source: Source, cell: Cell) -> Moved:
    turns = source.turns(cell)
    turns = turns[turns["history_tokens"] > 0]
    if turns.empty:
        raise source.lacks(f"turn with history with {MIGRATION}={cell.at[MIGRATION]}")
    waited = mean(by_conversation(values_of(turns, "ttft_ms")))
    return Moved(cell, waited, float(turns["received_bytes"].fillna(0).sum()) / len(turns))


def _moved_plot(panel: Panel, moved: Sequence[Moved]) -> Plot:
    ordered = sorted(moved, key=lambda one: (one.when, one.gbps))
    picture, [[axes]] = style.new_grid(2.0, 1)
    for order, when in enumerate(dict.fromkeys(one.when for one in ordered)):
        marks.line(axes, when, [(one.gbps, one.waited) for one in ordered if one.when == when], order=order)
    marks.mark_counts(axes, sorted({one.gbps for one in ordered}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("network of a replica (Gbit/s)")
    axes.set_ylabel("first token,\nmean (ms)")
    style.legend(picture)
    lead = "Mean over turns that have history, with its 95 % interval over seeds and conversations"
    rows = [
        {
            "baseline": one.cell.baseline,
            "migration": one.when,
            "network_gbps": one.gbps,
            **columns("ttft_ms_mean", one.waited),
            "received_bytes_per_turn": one.sent,
            "trials": one.cell.ids,
        }
        for one in ordered
    ]
    table = [
        {
            "network (Gbit/s)": f"{one.gbps:g}",
            "KV moves": one.when,
            "first token, mean (ms)": estimated(one.waited),
            "MB a turn": f"{one.sent / 1e6:,.1f}",
        }
        for one in ordered
    ]
    return Plot(panel, picture, lead, rows, table)
