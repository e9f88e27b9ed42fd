"""Clusters on one virtual clock: latency and skew against the number of replicas, and what it is worth that KV moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from analysis import marks, style
from analysis.caches import shares
from analysis.estimates import mean, over_seeds, percentile
from analysis.registry import Plot, Row, columns, figure
from analysis.results import by_conversation, values_of
from analysis.routing import REPLICAS, ROUTER, AtReplicas, draw_over_replicas, failing, in_order
from analysis.sweep import Cell, Panel, Source
from analysis.tables import estimated
from pensieve.errors import MissingSeries
from pensieve.statistics import Estimate

MIGRATION, NETWORK = "hardware.migration", "hardware.network_gbps"
COUNTED = ("moved_turns", "restarted_requests", "replica_failures")


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
    command="python runners/run.py experiment=cluster_scale -m",
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
        "Points with their 95 % interval over seeds and conversations; first tokens of all turns, percentiles by nearest "
        "rank; fullest replica: requests under way on it over the mean of all replicas"
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
    command="python runners/run.py experiment=cluster_migration -m",
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
