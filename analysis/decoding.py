"""What a decoded token costs in time and in bytes moved, a bar a baseline.

Bytes have bars where some were moved: an engine without pressure copies nothing, and one in this process has no network
whose bytes it could count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from analysis import estimates, marks, style
from analysis.marks import Bar, Group
from analysis.registry import Plot, Row, columns, figure
from analysis.sweep import Cell, Source
from pensieve.errors import MissingSeries
from pensieve.lab.results.frame import by_conversation, values_of
from pensieve.lab.statistics import Estimate
from pensieve.units import significant

COMMAND = "python runners/run.py experiment=machine/disaggregated_decode -m"
WAYS = {"network": ("sent_bytes", "received_bytes"), "GPU-CPU": ("h2d_bytes", "d2h_bytes")}


@dataclass(frozen=True, slots=True)
class Cost:
    """One baseline. per_token_ms: p50 and p99 by name. bytes_per_token: by way; None: this engine does not count them."""

    cell: Cell
    per_token_ms: Mapping[str, Estimate]
    bytes_per_token: Mapping[str, Estimate | None]


@figure(
    "decode_cost",
    "A decoded token: time, and bytes moved",
    shows="latency and bytes of a decoded token, a bar a baseline",
    command=COMMAND,
    applies=lambda source: source.has_workload("decode"),
)
def decode_cost(source: Source) -> Iterator[Plot]:
    for panel in source.panels():
        costs = [_cost(source, cell) for cell in panel.cells]
        moved = [found for cost in costs for found in cost.bytes_per_token.values()]
        some = any(found is None or found.value for found in moved)
        sides = [[_times(cost) for cost in costs], *([[_bytes(cost) for cost in costs]] if some else [])]
        picture, [grid] = marks.bar_grid(sides[:1], columns=len(sides))
        for axes, groups in zip(grid, sides, strict=True):
            marks.bars(axes, groups, names=axes is grid[0])
        grid[0].set_xlabel("ms a token")
        if some:
            _scale(grid[1], [found.value for found in moved if found])
        counted = "bytes: counted, sum over a trial by its output tokens, mean over trials"
        lead = (
            "Latency: median and 99th percentile over requests of arrival to last token over output tokens, with the 95 % "
            f"interval; {counted if some else 'no baseline moved a byte over a network or between GPU and CPU'}"
        )
        yield Plot(panel, picture, lead, [row for cost in costs for row in _rows(cost)])


def _cost(source: Source, cell: Cell) -> Cost:
    turns = source.turns(cell)
    each = by_conversation(values_of(turns[turns["phase"] == "throughput"], "normalized_latency_ms"))
    if not each:
        raise MissingSeries(
            f"Sweep {source.sweep.id} has no completed request of baseline {cell.baseline} that decodes by itself; run "
            f"`{COMMAND}`."
        )
    times = {name: estimates.percentile(each, p) for name, p in (("p50", 0.5), ("p99", 0.99))}
    return Cost(cell, times, {way: _moved(cell, names) for way, names in WAYS.items()})


def _moved(cell: Cell, names: Sequence[str]) -> Estimate | None:
    parts = [cell.metric(f"{name}_per_token") for name in names]
    trials = {(trial.seed, trial.repeat) for trial in cell.trials}
    if any(part.keys() != trials for part in parts):
        return None
    return estimates.over_seeds({key: sum(part[key] for part in parts) for key in trials})


def _times(cost: Cost) -> Group:
    name, colour = cost.cell.baseline, style.colour(cost.cell.baseline)
    return Group(
        name,
        colour,
        [
            Bar(found, colour, f"{which} {found.value:,.1f}", f"{name}/{which}", which != "p50")
            for which, found in cost.per_token_ms.items()
        ],
    )


def _bytes(cost: Cost) -> Group:
    """Bars of what was moved; a text where it was not counted, or nothing was moved at all."""
    name, colour = cost.cell.baseline, style.colour(cost.cell.baseline)
    nothing = Estimate(0.0, None, None, 0, 0)
    bars = []
    for way, found in cost.bytes_per_token.items():
        if found is None or found.value:
            text = f"{way} {'not counted' if found is None else _size(found.value)}"
            bars.append(Bar(found or nothing, colour, text, f"{name}/{way}", way != "network"))
    return Group(name, colour, bars or [Bar(nothing, colour, "nothing moved", f"{name}/nothing")], room=2)


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Linear, unless only a logarithm shows both the smallest and the largest; no ticks where there is nothing to read."""
    moved = [value for value in values if value]
    axes.set_xlabel(f"bytes a token{' (log)' if marks.wide(moved) else ''}")
    if not moved:
        axes.set_xticks([0])
    elif marks.wide(moved):
        _logarithmic(axes, moved)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """From 0 on. The bars have their values beside them: one tick is enough to read the scale by, and more run into each
    other where an axis is half a column wide."""
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xticks([0, 10 ** floor(log10(max(values)))])
    axes.xaxis.set_minor_locator(NullLocator())


def _size(value: float) -> str:
    """Three digits and a decimal unit."""
    if not value:
        return "0"
    for unit in ("B", "kB", "MB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def _rows(cost: Cost) -> list[Row]:
    found = {
        **{f"per_token_ms_{name}": one for name, one in cost.per_token_ms.items()},
        **{f"bytes_per_token {way}": one for way, one in cost.bytes_per_token.items()},
    }
    return _quantities(cost.cell, found)


@dataclass(frozen=True, slots=True)
class Share:
    """One baseline, a token: mean over requests of what each took, by part, and of the bytes that crossed each way; None: not
    counted there."""

    cell: Cell
    ms: Mapping[str, Estimate | None]
    crossed: Mapping[str, Estimate | None]


@figure(
    "disaggregation",
    "A token decoded in another process",
    shows="latency of a decoded token by part, and bytes each way, by what the model's process keeps",
    command=COMMAND,
    applies=lambda source: source.has_workload("decode") and source.has_metric("sent_bytes"),
)
def disaggregation(source: Source) -> Iterator[Plot]:
    for panel in source.panels():
        shares = [_share(source, cell) for cell in panel.cells]
        sides = [[_parts(share) for share in shares], [_ways(share) for share in shares]]
        picture, [grid] = marks.bar_grid(sides[:1], columns=2)
        for axes, groups in zip(grid, sides, strict=True):
            marks.bars(axes, groups, names=axes is grid[0])
        times = [found.value for share in shares for found in share.ms.values() if found and found.value]
        crossed = [found.value for share in shares for found in share.crossed.values() if found]
        for axes, values, what in zip(grid, (times, crossed), ("ms", "bytes"), strict=True):
            axes.set_xlabel(f"{what} a token{' (log)' if marks.wide(values) else ''}")
            if marks.wide(values):
                _logarithmic(axes, values)
        grid[0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        grid[1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))
        simulated = any(trial.simulated for share in shares for trial in share.cell.trials)
        counted = "computed from the model's shapes, simulated" if simulated else "counted as they were serialised"
        lead = (
            "Time: mean over requests of latency over output tokens, with the 95 % interval, and its parts: computing, and "
            f"waiting for the network. Bytes: {counted}, over output tokens"
        )
        yield Plot(panel, picture, lead, [row for share in shares for row in _quantities(share.cell, _named(share))])


def _share(source: Source, cell: Cell) -> Share:
    turns = source.turns(cell)
    turns = turns[turns["phase"] == "throughput"]
    tokens = turns["output_tokens"].where(turns["output_tokens"] > 0)

    def each(column: str) -> Estimate | None:
        values = by_conversation((turns[column] / tokens).dropna())
        return estimates.mean(values) if values else None

    ms = {part: each(f"{part}_ms") for part in ("latency", "queue", "compute", "transfer")}
    if ms["latency"] is None:
        raise MissingSeries(
            f"Sweep {source.sweep.id} has no completed request of baseline {cell.baseline} that decodes by itself; run "
            f"`{COMMAND}`."
        )
    return Share(cell, ms, {way: each(f"{way}_bytes") for way in ("sent", "received")})


def _parts(share: Share) -> Group:
    name, colour = share.cell.baseline, style.colour(share.cell.baseline)
    shown = {part: found for part, found in share.ms.items() if found is not None and part != "queue"}
    bars = [
        Bar(
            found,
            colour,
            f"{'all' if part == 'latency' else part} {significant(found.value)}",
            f"{name}/{part}",
            part != "latency",
        )
        for part, found in shown.items()
    ]
    return Group(name, colour, bars, room=3)


def _ways(share: Share) -> Group:
    name, colour = share.cell.baseline, style.colour(share.cell.baseline)
    bars = [
        Bar(found, colour, f"{way} {_size(found.value)}", f"{name}/{way}", way == "received")
        for way, found in share.crossed.items()
        if found is not None
    ]
    nothing = Bar(Estimate(0.0, None, None, 0, 0), colour, "no network", f"{name}/none")
    return Group(name, colour, bars or [nothing], room=3)


def _named(share: Share) -> dict[str, Estimate | None]:
    times = {f"{part}_ms_per_token": found for part, found in share.ms.items()}
    return {**times, **{f"{way}_bytes_per_token": found for way, found in share.crossed.items()}}


def _quantities(cell: Cell, found: Mapping[str, Estimate | None]) -> list[Row]:
    empty = {"value": None, "ci_low": None, "ci_high": None, "n": 0, "n_seeds": 0}
    return [
        {
            "baseline": cell.baseline,
            "quantity": quantity,
            **(columns("value", one) if one else empty),
            "trials": cell.ids,
        }
        for quantity, one in found.items()
    ]
