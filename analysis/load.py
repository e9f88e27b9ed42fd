"""Against a swept load: latency, goodput, first tokens of hot, warm and cold users, and requests a second at the latency at
which the paper compared its systems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from matplotlib.axes import Axes

from analysis import marks, style, tables
from analysis.conversations import CLASSES
from analysis.estimates import mean, over_seeds, percentile
from analysis.registry import Plot, columns, figure
from analysis.sweep import NO_VALUE, Cell, Panel, Source, number
from pensieve.errors import MissingSeries
from pensieve.lab.compose.folder import conf_folder
from pensieve.lab.results.claims import Claim, crossing, read_claims, unmet
from pensieve.lab.results.frame import TrialGroup, by_conversation, positive_ratio, values_of
from pensieve.lab.results.notes import load_changed, offered_rate, starting
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.slo import slo_of_sweep
from pensieve.lab.statistics import FEWEST_GROUPS, Estimate, PairedRatio

P = TypeVar("P")

BySeed = dict[tuple[int, int], float]
"""(seed, repeat) -> requests a second."""

LOADS = {
    "workload.relative_rate": "offered rate over what stateless serving could finish",
    "workload.request_rate": "offered rate (requests/s)",
    "workload.users": "users at once",
    "workload.agents": "agents at once",
    "workload.request_interval": "mean seconds between arrivals",
    "workload.time_scale": "recorded seconds stretched by",
}
"""Fields that make a load heavier or lighter, and the label of their axis."""
CLASS_LOADS = {
    "workload.relative_rate": "offered rate over what stateless serving could finish",
    "workload.request_interval": "seconds between a user's requests\n(hot × 0.3, cold × 2.5)",
    "workload.users": "users at once\n(a third of each class)",
}
STATISTICS = ("mean", "p90")
MEASURE = "throughput_at_latency_ratio"
EXPLAINED_PCT = 15  # a difference beyond this wants an experiment that explains it
COMMAND = (
    "python runners/run.py model=llama3_8b cache=small hardware=sim_a100_80g workload=sharegpt workload.arrivals_s=200 "
    "workload.think_time_s=10 workload.relative_rate=0.7,1,1.4,2,2.8,4 -m"
)
"""A load up to several times what stateless serving can finish: systems part where the first of them is saturated."""


def load_axis(source: Source) -> str | None:
    """The load that the sweep runs through; the first of LOADS where there are several."""
    return next((axis for axis in LOADS if len(source.swept(axis)) > 1), None)


def along_load(source: Source, what: str, point_of: Callable[[Cell], P | None]) -> Iterator[tuple[Panel, str, list[P]]]:
    """The axis and `point_of(cell)` of every cell, in the order of the load.

    Raises MissingSeries where it is None, saying that `what` is not there, and what Source.panels raises.
    """
    axis = load_axis(source)
    assert axis is not None, "asked only where it applies"
    for panel in source.panels(axis):
        points = []
        for cell in sorted(panel.cells, key=lambda cell: panel.values(axis).index(cell.at[axis])):
            point = point_of(cell)
            if point is None:
                raise source.lacks(f"{what} of {cell.baseline} with {axis}={cell.at[axis]}")
            points.append(point)
        yield panel, axis, points


def _place(panel: Panel, axis: str, value: str) -> float:
    """Where a load stands on its axis: a number there; values of which one is no number stand at equal distances."""
    values = panel.values(axis)
    numbers = [number(one) for one in values]
    at = values.index(value)
    return float(at) if None in numbers else numbers[at] or 0.0


def _load_ticks(axes: Axes, panel: Panel, axis: str, label: str) -> None:
    values = panel.values(axis)
    if any(number(value) is None for value in values):
        axes.set_xticks(range(len(values)), ["unlimited" if value == NO_VALUE else value for value in values])
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel(label)


NOT_REACHED = "the window of some trials began before the offered rate was reached, which is that of steady state"


@figure(
    "throughput_latency",
    "Latency against throughput",
    shows="normalized latency, mean and 90th percentile, against the achieved rate; that against the offered one",
    command=COMMAND,
    applies=lambda source: load_axis(source) is not None and source.has_metric("throughput_req_s"),
)
def throughput_latency(source: Source) -> Iterator[Plot]:
    """Mean and 90th percentile, since the paper gives both, over the rate that was achieved: under load that waits for
    replies a slow baseline is asked less. Points are joined in the order of the offered load. Below, where a rate was
    offered, how much of it was achieved: a system parts from the dotted line where it is saturated."""

    def point(cell: Cell) -> tuple[Cell, Estimate, dict[str, Estimate]] | None:
        rates = cell.metric("throughput_req_s")
        values = by_conversation(values_of(source.turns(cell), "normalized_latency_ms"))
        if not rates or not values:
            return None
        return cell, over_seeds(rates), {"mean": mean(values), "p90": percentile(values, 0.9)}

    for panel, axis, points in along_load(source, "throughput and latency", point):
        offered = [offered_rate(cell.trials) for cell, _, _ in points]
        rates = [rate for rate in offered if rate is not None]
        both = len(rates) == len(points)
        picture, grid = style.new_grid(4.5 if both else 3.1, len(STATISTICS) + both)
        for statistic, [axes] in zip(STATISTICS, grid[: len(STATISTICS)], strict=True):
            for order, name in enumerate(panel.baselines):
                own = [(rate.value, latency[statistic]) for cell, rate, latency in points if cell.baseline == name]
                marks.line(axes, name, own, order=order)
            if marks.wide([latency[statistic].value for _, _, latency in points]):
                marks.plain_log(axes, "y")
            else:
                axes.set_ylim(bottom=0)
            axes.set_ylabel(f"{statistic} latency\n(ms/token)")
            axes.sharex(grid[0][0])
            axes.set_xlim(left=0)
        grid[0][0].tick_params(labelbottom=False)
        grid[len(STATISTICS) - 1][0].set_xlabel("achieved rate (requests/s)")
        if both:
            [axes] = grid[-1]
            for order, name in enumerate(panel.baselines):
                at = [(x, rate) for x, (cell, rate, _) in zip(rates, points, strict=True) if cell.baseline == name]
                marks.line(axes, name, at, order=order)
            axes.plot([0, max(rates)], [0, max(rates)], color=style.GREY, linestyle=(0, (1, 1.5)), gid="all offered")
            axes.set(xlabel="offered rate (requests/s)", ylabel="achieved\n(requests/s)")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
        style.legend(picture)
        lead = (
            "Latency over output tokens, with the 95 % interval; rate: mean over seeds; "
            f"{LOADS[axis].split(' (')[0]}: {', '.join(panel.values(axis))}"
        )
        if both:
            lead += "; dotted: all that was offered"
            lead += f"; {NOT_REACHED}" if any(starting(cell.trials) for cell, _, _ in points) else ""
        rows = [
            {
                "baseline": cell.baseline,
                axis: cell.at[axis],
                "offered_req_s": there,
                "achieved_req_s": rate.value,
                **columns("normalized_latency_ms_mean", latency["mean"]),
                "normalized_latency_ms_p90": latency["p90"].value,
                "p90_ci_low": latency["p90"].ci_low,
                "p90_ci_high": latency["p90"].ci_high,
                "trials": cell.ids,
            }
            for there, (cell, rate, latency) in zip(offered, points, strict=True)
        ]
        yield Plot(panel, picture, lead, rows)


@figure(
    "goodput",
    "Goodput against load",
    shows="turns a second within slo.ttft_ms and slo.tpot_ms, against the load",
    command=COMMAND.replace(" -m", " slo.ttft_ms=200 slo.tpot_ms=50 -m"),
    applies=lambda source: load_axis(source) is not None and source.has_metric("goodput_req_s"),
)
def goodput(source: Source) -> Iterator[Plot]:
    def point(cell: Cell) -> tuple[Cell, Estimate, Estimate] | None:
        good, every = cell.metric("goodput_req_s"), cell.metric("throughput_req_s")
        return (cell, over_seeds(good), over_seeds(every)) if good and every else None

    for panel, axis, points in along_load(source, "goodput", point):
        picture, axes = style.new_axes(2.0)
        for order, name in enumerate(panel.baselines):
            own = [one for one in points if one[0].baseline == name]
            xs = [_place(panel, axis, cell.at[axis]) for cell, _, _ in own]
            marks.line(axes, name, [(x, good) for x, (_, good, _) in zip(xs, own, strict=True)], order=order)
            axes.plot(
                xs, [every.value for _, _, every in own], color=style.colour(name), linewidth=0.9,
                linestyle=(0, (1, 1.5)), gid=f"{name}/all",
            )  # fmt: skip
        _load_ticks(axes, panel, axis, LOADS[axis])
        axes.set_ylabel("goodput (requests/s)")
        axes.plot([], [], color=style.GREY, linestyle=(0, (1, 1.5)), label="all turns")
        lead = f"Solid: turns with {objective(panel)}; dotted: all turns; means over seeds"
        first = [
            (_place(panel, axis, cell.at[axis]), offered_rate(cell.trials)) for cell in panel.of(panel.baselines[0])
        ]
        known = sorted((x, rate) for x, rate in first if rate is not None)
        if len(known) == len(first):
            xs, offered = [x for x, _ in known], [rate for _, rate in known]
            axes.plot(xs, offered, color=style.GREY, linewidth=0.7, label="offered", gid="offered")
            lead += "; thin: the offered rate"
            lead += f"; {NOT_REACHED}" if any(starting(cell.trials) for cell, _, _ in points) else ""
        axes.set_ylim(bottom=0)
        style.legend(picture)
        fewest = min(good.groups for _, good, _ in points)
        if fewest < FEWEST_GROUPS:
            lead += f", n = {fewest}, no interval"
        rows = [
            {
                "baseline": cell.baseline,
                axis: _as_number(cell.at[axis]),
                "offered_req_s": offered_rate(cell.trials),
                **columns("goodput_req_s", good),
                "throughput_req_s": every.value,
                "trials": cell.ids,
            }
            for cell, good, every in points
        ]
        yield Plot(panel, picture, lead, rows)


def objective(panel: Panel) -> str:
    """What the sweep's slo asks of a turn."""
    slo = slo_of_sweep(panel.sweep.overrides)
    names = {"ttft_ms": "first token", "tpot_ms": "each further token"}
    kept = {text: getattr(slo, name) for name, text in names.items()}
    return " and ".join(f"{text} within {most:g} ms" for text, most in kept.items() if most is not None)


@figure(
    "hotness_load",
    "First token by how often users return",
    shows="first tokens of hot, warm and cold users against their number or interval",
    command="python runners/run.py experiment=users/hotness workload.request_interval=0.1,0.3,0.5,1.0 -m",
    applies=lambda source: (
        load_axis(source) in CLASS_LOADS and any(source.has_metric("ttft_ms_p50", one) for one in CLASSES)
    ),
)
def hotness_load(source: Source) -> Iterator[Plot]:
    """A row a class of users."""

    def point(cell: Cell) -> tuple[Cell, dict[str, Estimate]] | None:
        turns = source.turns(cell)
        values = {label: by_conversation(turns.loc[turns["label"] == label, "ttft_ms"]) for label in CLASSES}
        return (
            (cell, {label: percentile(one, 0.5) for label, one in values.items() if one})
            if any(values.values())
            else None
        )

    for panel, axis, points in along_load(source, "hot, warm or cold turn", point):
        labels = [label for label in CLASSES if any(label in found for _, found in points)]
        picture, grid = style.new_grid(0.3 + 1.0 * len(labels), len(labels), sharex=True)
        for label, [axes] in zip(labels, grid, strict=True):
            for order, name in enumerate(panel.baselines):
                own = [
                    (_place(panel, axis, cell.at[axis]), found[label])
                    for cell, found in points
                    if cell.baseline == name and label in found
                ]
                marks.line(axes, name, own, order=order)
            axes.set_ylim(bottom=0)
            axes.set_ylabel(f"{label} users")
        _load_ticks(grid[-1][0], panel, axis, CLASS_LOADS[axis])
        style.legend(picture)
        rows = [
            {
                "baseline": cell.baseline,
                axis: _as_number(cell.at[axis]),
                "class": label,
                **columns("ttft_ms_median", one),
                "trials": cell.ids,
            }
            for cell, found in points
            for label, one in found.items()
        ]
        lead = "Time to first token in ms. Median over completed turns, with the 95 % interval"
        yield Plot(panel, picture, lead, rows)


def _as_number(value: str) -> float | str:
    found = number(value)
    return value if found is None else found


# Beside the paper


@lru_cache(maxsize=1)
def _claims() -> Sequence[Claim]:
    return [claim for claim in read_claims(conf_folder() / "claims.yaml") if claim.measure == MEASURE]


def compared(trials: Sequence[Trial]) -> Claim | None:
    """The paper's result that these trials repeat: same model, data, devices and cache."""
    return next((claim for claim in _claims() if trials and not unmet(claim.conditions, trials)), None)


def rates_at(panel: Panel, axis: str, limit_ms: float, statistic: str) -> dict[str, BySeed]:
    """By baseline, each seed's requests a second at which this normalized latency passes the limit; a seed whose latency
    never does, or was never within it, is left out."""
    found: dict[str, BySeed] = {}
    for name in panel.baselines:
        cells = sorted(panel.of(name), key=lambda cell: number(cell.at[axis]) or 0.0)
        latencies = [cell.metric(f"normalized_latency_ms_{statistic}") for cell in cells]
        rates = [cell.metric("throughput_req_s") for cell in cells]
        seeds = {key for latency in latencies for key in latency}
        found[name] = {}
        for key in sorted(seeds):
            pairs = zip(rates, latencies, strict=True)
            curve = [(rate[key], latency[key]) for rate, latency in pairs if key in rate and key in latency]
            reached = crossing(curve, limit_ms)
            if reached is not None:
                found[name][key] = reached
    return found


def _over(ours: BySeed, theirs: BySeed) -> PairedRatio | None:
    """Paired by seed; None where no seed has both."""
    both: list[Mapping[tuple[int, str], float]] = [
        {(seed, str(repeat)): value for (seed, repeat), value in side.items()} for side in (ours, theirs)
    ]
    return positive_ratio(*both)


@figure(
    "paper_throughput",
    "Requests a second at the paper's latency",
    shows="each system at the latency at which the paper compared them, and the paper's ratio",
    command="python runners/run.py experiment=paper/opt13b_sharegpt -m",
    applies=lambda source: load_axis(source) is not None and compared(source.trials) is not None,
)
def paper_throughput(source: Source) -> Iterator[Plot]:
    """A line a system and statistic, since the paper says 90th percentile in one place and mean in another. Where a system
    saturates is where it has to be measured, so not all have run at all loads."""
    axis = load_axis(source)
    assert axis is not None, "asked only where it applies"
    for panel in source.panels(axis, partial=True):
        trials = [trial for cell in panel.cells for trial in cell.trials]
        claim = compared(trials)
        assert claim is not None, "asked only where it applies"
        limit, bounds = float(claim.arguments["limit"]), claim.claimed.bounds()
        reference = next((name for name in claim.against if name in panel.baselines), None)
        if reference is None:
            raise MissingSeries(
                f"Sweep {source.sweep.id} has none of {', '.join(claim.against)} to compare with; add baseline=stateless."
            )
        table, rows = [], []
        beyond = missing = False
        for statistic in STATISTICS:
            reached = rates_at(panel, axis, limit, statistic)
            for name, values in reached.items():
                rate = over_seeds(values) if values else None
                ratio = _over(values, reached[reference]) if name != reference else None
                paper = bounds.claimed if name in claim.of else None
                difference = 100 * (ratio.ratio / paper - 1) if ratio and paper else None
                ran = {(trial.seed, trial.repeat) for cell in panel.of(name) for trial in cell.trials}
                missing = missing or 0 < len(values) < len(ran)
                beyond = beyond or (difference is not None and abs(difference) > EXPLAINED_PCT)
                table.append(
                    {
                        "system": name,
                        "latency": statistic,
                        f"requests/s at\n{limit:g} ms/token": tables.estimated(rate),
                        "seeds that\nreached it": f"{len(values)} of {len(ran)}",
                        f"over\n{reference}": "1" if name == reference else tables.estimated(ratio),
                        "the paper\nover vLLM": tables.NONE if paper is None else f"{paper:.2f}",
                        "difference": tables.NONE
                        if difference is None
                        else f"{round(difference):+d} %".replace("-", "−"),
                    }
                )
                rows.append(
                    {
                        "baseline": name,
                        "statistic": statistic,
                        "limit_ms_per_token": limit,
                        **columns("requests_per_s", rate),
                        f"over_{reference}": ratio and ratio.ratio,
                        "ratio_ci_low": ratio and ratio.ci_low,
                        "ratio_ci_high": ratio and ratio.ci_high,
                        "paper": paper,
                        "difference_pct": difference,
                        "trials": " ".join(cell.ids for cell in panel.of(name)),
                    }
                )
        simulated = all(trial.simulated for trial in trials)
        cut = "".join(f"{note.text} " for note in load_changed(_groups(panel)))
        lead = (
            f"{cut}{'Simulated. ' if simulated else ''}Normalized latency, mean and p90. Requests/s: where it "
            "passes the limit for good, between two loads in a straight line, mean over seeds. The ratio is "
            f"paired by seed. Paper: {claim.source}, {claim.text}. A dash: not within the limit at any load, or at all of "
            "them"
        )
        if missing:
            lead += (
                ". Seeds whose loads do not reach the limit are left out, so requests/s of two systems may be of different "
                "seeds. The ratio is of those that both reached"
            )
        if beyond:
            lead += f"; a difference over {EXPLAINED_PCT} % wants an explanation (docs/paper.md)"
        yield Plot(panel, None, lead, rows, table)


def _groups(panel: Panel) -> list[TrialGroup]:
    return [TrialGroup(cell.at, {cell.baseline: cell.trials}) for cell in panel.cells]
