"""Against a swept load: latency, goodput, and requests a second at the latency at which the paper compared its systems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from analysis import forms, marks, style
from analysis.quantities import Quantity, columns, over_seeds
from analysis.registry import Plot
from analysis.sweep import Cell, Panel, Source, number
from pensieve.errors import MissingSeries
from pensieve.lab import tables
from pensieve.lab.compose.folder import conf_folder
from pensieve.lab.results.claims import Claim, crossing, read_claims, unmet
from pensieve.lab.results.frame import TrialGroup, positive_ratio
from pensieve.lab.results.notes import load_changed, offered_rate, starting
from pensieve.lab.results.schema import Trial
from pensieve.lab.results.slo import slo_of_sweep
from pensieve.lab.statistics import FEWEST_GROUPS, Estimate, PairedRatio

BySeed = dict[tuple[int, int], float]
"""(seed, repeat) -> requests a second."""
Point = tuple[Cell, float | None, dict[str, Estimate]]
"""A cell, its offered rate, and its quantities by name."""

LOADS = {
    "workload.relative_rate": "offered rate over what stateless serving could finish",
    "workload.request_rate": "offered rate (requests/s)",
    "workload.users": "users at once",
    "workload.agents": "agents at once",
    "workload.request_interval": "mean seconds between arrivals",
    "workload.time_scale": "recorded seconds stretched by",
}
"""Fields that make a load heavier or lighter, and the label of their axis."""
NOT_REACHED = "; the window of some trials began before the offered rate was reached, which is that of steady state"
DOTTED = (0, (1, 1.5))
STATISTICS = ("mean", "p90")
MEASURE = "throughput_at_latency_ratio"
EXPLAINED_PCT = 15  # a difference beyond this wants an experiment that explains it


def load_axis(source: Source) -> str | None:
    """The load that the sweep runs through; the first of LOADS where there are several."""
    return next((axis for axis in LOADS if len(source.swept(axis)) > 1), None)


def has_load(source: Source) -> bool:
    return load_axis(source) is not None


def _along_load(source: Source, what: str, **quantities: Quantity) -> Iterator[tuple[Panel, str, list[Point]]]:
    """The axis, and every cell with these quantities, in the order of the load.

    Raises MissingSeries where one is None, saying that `what` is not there, and what Source.panels raises.
    """
    axis = load_axis(source)
    assert axis is not None, "asked only where it applies"
    for panel in source.panels(axis):
        points = []
        for cell in sorted(panel.cells, key=lambda cell: panel.values(axis).index(cell.at[axis])):
            found = {name: one.found(source, cell) for name, one in quantities.items()}
            known = {name: one for name, one in found.items() if isinstance(one, Estimate)}
            if len(known) < len(found):
                raise source.lacks(f"{what} of {cell.baseline} with {axis}={cell.at[axis]}")
            points.append((cell, offered_rate(cell.trials), known))
        yield panel, axis, points


def throughput_latency(source: Source) -> Iterator[Plot]:
    """Mean and 90th percentile, since the paper gives both, over the rate that was achieved: under load that waits for
    replies a slow baseline is asked less. Points are joined in the order of the offered load. Below, where a rate was
    offered, how much of it was achieved: a system parts from the dotted line where it is saturated."""
    latency = {name: Quantity(of="normalized_latency_ms", how=name) for name in STATISTICS}
    rate = Quantity(of="throughput_req_s", how="seeds")
    for panel, axis, points in _along_load(source, "throughput and latency", rate=rate, **latency):
        rates = [offered for _, offered, _ in points if offered is not None]
        both = len(rates) == len(points)
        picture, grid = style.new_grid(4.5 if both else 3.1, len(STATISTICS) + both)
        for statistic, [axes] in zip(STATISTICS, grid[: len(STATISTICS)], strict=True):
            for order, name in enumerate(panel.baselines):
                own = [(one["rate"].value, one[statistic]) for cell, _, one in points if cell.baseline == name]
                marks.line(axes, name, own, order=order)
            marks.from_zero(axes, [one[statistic].value for *_, one in points])
            axes.set_ylabel(f"{statistic} latency\n(ms/token)")
            axes.sharex(grid[0][0])
            axes.set_xlim(left=0)
        grid[0][0].tick_params(labelbottom=False)
        grid[len(STATISTICS) - 1][0].set_xlabel("achieved rate (requests/s)")
        if both:
            [axes] = grid[-1]
            for order, name in enumerate(panel.baselines):
                at = [
                    (x, one["rate"]) for x, (cell, _, one) in zip(rates, points, strict=True) if cell.baseline == name
                ]
                marks.line(axes, name, at, order=order)
            axes.plot([0, max(rates)], [0, max(rates)], color=style.GREY, linestyle=DOTTED, gid="all offered")
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
            lead += NOT_REACHED if any(starting(cell.trials) for cell, *_ in points) else ""
        rows = [
            {
                "baseline": cell.baseline,
                axis: cell.at[axis],
                "offered_req_s": offered,
                "achieved_req_s": one["rate"].value,
                **columns("normalized_latency_ms_mean", one["mean"]),
                "normalized_latency_ms_p90": one["p90"].value,
                "p90_ci_low": one["p90"].ci_low,
                "p90_ci_high": one["p90"].ci_high,
                "trials": cell.ids,
            }
            for cell, offered, one in points
        ]
        yield Plot(panel, picture, lead, rows)


def goodput(source: Source) -> Iterator[Plot]:
    quantities = {name: Quantity(of=name, how="seeds") for name in ("goodput_req_s", "throughput_req_s")}
    for panel, axis, points in _along_load(source, "goodput", **quantities):
        picture, axes = style.new_axes(2.0)
        places = forms.places(panel.values(axis))
        for order, name in enumerate(panel.baselines):
            own = [(places[cell.at[axis]], one) for cell, _, one in points if cell.baseline == name]
            marks.line(axes, name, [(x, one["goodput_req_s"]) for x, one in own], order=order)
            axes.plot(
                [x for x, _ in own], [one["throughput_req_s"].value for _, one in own], color=style.colour(name),
                linewidth=0.9, linestyle=DOTTED, gid=f"{name}/all",
            )  # fmt: skip
        forms.ticks([axes], panel.values(axis), forms.Axis(axis=axis))
        axes.set(xlabel=LOADS[axis], ylabel="goodput (requests/s)")
        axes.plot([], [], color=style.GREY, linestyle=DOTTED, label="all turns")
        lead = f"Solid: turns with {objective(panel)}; dotted: all turns; means over seeds"
        first = [(places[cell.at[axis]], rate) for cell, rate, _ in points if cell.baseline == panel.baselines[0]]
        if all(rate is not None for _, rate in first):
            line = zip(*sorted(first), strict=True)
            axes.plot(*line, color=style.GREY, linewidth=0.7, label="offered", gid="offered")
            lead += "; thin: the offered rate"
            lead += NOT_REACHED if any(starting(cell.trials) for cell, *_ in points) else ""
        axes.set_ylim(bottom=0)
        style.legend(picture)
        fewest = min(one["goodput_req_s"].groups for *_, one in points)
        if fewest < FEWEST_GROUPS:
            lead += f", n = {fewest}, no interval"
        rows = [
            {
                "baseline": cell.baseline,
                axis: forms.Axis(axis=axis).value(cell),
                "offered_req_s": rate,
                **columns("goodput_req_s", one["goodput_req_s"]),
                "throughput_req_s": one["throughput_req_s"].value,
                "trials": cell.ids,
            }
            for cell, rate, one in points
        ]
        yield Plot(panel, picture, lead, rows)


def objective(panel: Panel) -> str:
    """What the sweep's slo asks of a turn."""
    slo = slo_of_sweep(panel.sweep.overrides)
    names = {"ttft_ms": "first token", "tpot_ms": "each further token"}
    kept = {text: getattr(slo, name) for name, text in names.items()}
    return " and ".join(f"{text} within {most:g} ms" for text, most in kept.items() if most is not None)


# Beside the paper


@lru_cache(maxsize=1)
def _claims() -> Sequence[Claim]:
    return [claim for claim in read_claims(conf_folder() / "claims.yaml") if claim.measure == MEASURE]


def compared(trials: Sequence[Trial]) -> Claim | None:
    """The paper's result that these trials repeat: same model, data, devices and cache."""
    return next((claim for claim in _claims() if trials and not unmet(claim.conditions, trials)), None)


def repeats_the_paper(source: Source) -> bool:
    return compared(source.trials) is not None


def rates_at(panel: Panel, axis: str, limit_ms: float, statistic: str) -> dict[str, BySeed]:
    """By baseline, each seed's requests a second at which this normalized latency passes the limit; a seed whose latency
    never does, or was never within it, is left out."""
    found: dict[str, BySeed] = {}
    for name in panel.baselines:
        cells = sorted(panel.of(name), key=lambda cell: number(cell.at[axis]) or 0.0)
        both = [(cell.metric("throughput_req_s"), cell.metric(f"normalized_latency_ms_{statistic}")) for cell in cells]
        found[name] = {}
        for key in sorted({key for _, latency in both for key in latency}):
            curve = [(rate[key], latency[key]) for rate, latency in both if key in rate and key in latency]
            reached = crossing(curve, limit_ms)
            if reached is not None:
                found[name][key] = reached
    return found


def _over(ours: BySeed, theirs: BySeed) -> PairedRatio | None:
    """Paired by seed; None where no seed has both."""
    sides = ({(seed, str(repeat)): value for (seed, repeat), value in side.items()} for side in (ours, theirs))
    return positive_ratio(*sides)


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
        for statistic in STATISTICS:
            reached = rates_at(panel, axis, limit, statistic)
            for name, values in reached.items():
                rate = over_seeds(values) if values else None
                ratio = _over(values, reached[reference]) if name != reference else None
                paper = bounds.claimed if name in claim.of else None
                difference = 100 * (ratio.ratio / paper - 1) if ratio and paper else None
                ran = {(trial.seed, trial.repeat) for cell in panel.of(name) for trial in cell.trials}
                percent = tables.NONE if difference is None else f"{round(difference):+d} %".replace("-", "−")
                table.append(
                    {
                        "system": name,
                        "latency": statistic,
                        f"requests/s at\n{limit:g} ms/token": tables.estimated(rate),
                        "seeds that\nreached it": f"{len(values)} of {len(ran)}",
                        f"over\n{reference}": "1" if name == reference else tables.estimated(ratio),
                        "the paper\nover vLLM": tables.NONE if paper is None else f"{paper:.2f}",
                        "difference": percent,
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
        groups = [TrialGroup(cell.at, {cell.baseline: cell.trials}) for cell in panel.cells]
        cut = "".join(f"{note.text} " for note in load_changed(groups))
        lead = (
            f"{cut}{'Simulated. ' if all(trial.simulated for trial in trials) else ''}Normalized latency, mean and p90. "
            "Requests/s: where it passes the limit for good, between two loads in a straight line, mean over seeds. The "
            f"ratio is paired by seed. Paper: {claim.source}, {claim.text}. A dash: not within the limit at any load, or at "
            "all of them"
        )
        counts = [line["seeds that\nreached it"].split(" of ") for line in table]
        if any("0" != some != every for some, every in counts):
            lead += (
                ". Seeds whose loads do not reach the limit are left out, so requests/s of two systems may be of different "
                "seeds. The ratio is of those that both reached"
            )
        if any(abs(row["difference_pct"] or 0.0) > EXPLAINED_PCT for row in rows):
            lead += f"; a difference over {EXPLAINED_PCT} % wants an explanation (docs/paper.md)"
        yield Plot(panel, None, lead, rows, table)
