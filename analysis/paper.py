"""paper_throughput: requests a second at the latency at which the paper compared its systems, beside the paper's ratio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from analysis import tables
from analysis.estimates import over_seeds
from analysis.load import STATISTICS, load_axis
from analysis.registry import Plot, columns, figure
from analysis.results import Claim, Trial, TrialGroup, crossing, cut_short, positive_ratio, read_claims, unmet
from analysis.sweep import Panel, Source, number
from pensieve.compose.folder import conf_folder
from pensieve.errors import MissingSeries
from pensieve.statistics import PairedRatio

MEASURE = "throughput_at_latency_ratio"
EXPLAINED_PCT = 15  # a difference beyond this wants an experiment that explains it

BySeed = dict[tuple[int, int], float]
"""(seed, repeat) -> requests a second."""


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
    command="python runners/run.py experiment=paper_opt13b_sharegpt -m",
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
                        **(columns("requests_per_s", rate) if rate else dict.fromkeys(_EMPTY)),
                        f"over_{reference}": ratio and ratio.ratio,
                        "ratio_ci_low": ratio and ratio.ci_low,
                        "ratio_ci_high": ratio and ratio.ci_high,
                        "paper": paper,
                        "difference_pct": difference,
                        "trials": " ".join(cell.ids for cell in panel.of(name)),
                    }
                )
        simulated = all(trial.simulated for trial in trials)
        cut = "".join(f"{sentence} " for sentence in cut_short(_groups(panel)))
        lead = (
            f"{cut}{'Simulated. ' if simulated else ''}Latency over output tokens, mean and 90th percentile; requests/s "
            "where it passes the limit for good, between two loads in a straight line, mean over seeds; the ratio is "
            f"paired by seed. Paper: {claim.source}, {claim.text}. A dash: not within the limit at any load, or at all of "
            "them"
        )
        if missing:
            lead += (
                "; seeds whose loads do not reach the limit are left out, so requests/s of two systems may be of different "
                "seeds, and the ratio is of those that both reached"
            )
        if beyond:
            lead += f"; a difference over {EXPLAINED_PCT} % wants an explanation (docs/paper.md)"
        yield Plot(panel, None, lead, rows, table)


def _groups(panel: Panel) -> list[TrialGroup]:
    return [TrialGroup(cell.at, {cell.baseline: cell.trials}) for cell in panel.cells]


_EMPTY = ("requests_per_s", "ci_low", "ci_high", "n", "n_seeds")
